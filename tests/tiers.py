"""Which cases of a parametrized test belong to `make test`, and which to `make test-all` alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def of(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """All cases; those that are not among `fast` are marked slow."""
    cases = [*cases]
    assert {*fast} <= {*cases}, f"no cases: {sorted({*fast} - {*cases})}"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
