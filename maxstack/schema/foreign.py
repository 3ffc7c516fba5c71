"""Keys of other frameworks and our names for them, from foreign.yml, for error messages."""

import functools
from pathlib import Path

import yaml


@functools.cache
def rows() -> dict[str, dict[str, str]]:
    """Rows of foreign.yml by each of the foreign keys."""
    path = Path(__file__).with_name("foreign.yml")
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: row for row in table for name in row["theirs"].split()}


def equivalent(path: str) -> str:
    """The message about the foreign key at a dotted path, by its longest suffix with a row. Empty
    if there is none, or if it is our own key, which another kind of section has."""
    words = path.lower().replace("-", "_").split(".")
    parts = ["N" if word.isdecimal() else word for word in words]
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    row = next((rows()[end] for end in ends if end in rows()), {})
    keys, remark = row.get("ours", "").split(), row.get("remark", "")
    if any(key.split(".")[-2:] == parts[-2:] for key in keys):
        return ""
    note = f" ({remark})" if remark else ""
    return f"here that is {' and '.join(keys)}{note}" if keys else remark
