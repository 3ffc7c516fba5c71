"""Which cases of a parametrized test belong to `make test`, which to `make test-all`, and which to
`make test-release`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def of(cases: Iterable[Any], *fast: Any, slow: Collection[Any] | None = None) -> list[Any]:
    """All cases. Those among `fast` are every day's, those among `slow` are marked so, and the rest
    is for a release; where `slow` is None, all that are not fast are slow."""
    cases = [*cases]
    named = [*fast, *(slow or ())]
    assert all(name in cases for name in named), f"{named} are not all among {cases}"
    return [case if case in fast else _marked(case, slow) for case in cases]


def _marked(case: Any, slow: Collection[Any] | None) -> Any:
    """A case that may be a tuple of several parameters."""
    mark = pytest.mark.slow if slow is None or case in slow else pytest.mark.release
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
