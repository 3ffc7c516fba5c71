"""JSON as other programs read it, which has no NaN and no infinity: there such a value is null, and
`not_finite` of its object says which: `{"loss": null, "not_finite": {"loss": "nan"}}`. In a list it
is null alone."""

import contextlib
import json
import math
from typing import Any

KEY = "not_finite"


def write(value: Any, **options: Any) -> str:
    """The text of plain data, made with json's own options."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def read(text: str | bytes) -> dict[str, Any] | None:
    """The object of a text that `write` made, or of an older one with bare NaN and Infinity, its
    own floats as they were; None where it is no object."""
    with contextlib.suppress(ValueError):
        if isinstance(row := json.loads(text), dict):
            return restore(row)
    return None


def restore(row: dict[str, Any]) -> dict[str, Any]:
    """The object with the floats that its `not_finite` names."""
    if isinstance(named := row.get(KEY), dict):
        row |= {name: float(text) for name, text in named.items() if name in row}
        del row[KEY]
    return row


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        odd = {key: str(each) for key, each in value.items() if _is_odd(each)}
        return {key: _finite(each) for key, each in value.items()} | ({KEY: odd} if odd else {})
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return None if _is_odd(value) else value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
