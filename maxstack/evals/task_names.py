"""Names of tasks, groups and tags in a folder of lm-evaluation-harness's task files.

They are found by regular expressions, not by a YAML parser: the harness's folder has thousands of
files, and some name code by tags that a parser refuses.
"""

import contextlib
import functools
import os
import re
from pathlib import Path

from maxstack.config.reader import MAX_BYTES
from maxstack.regular_file import read_regular


@functools.cache
def files_of(folder: str, below: bool) -> dict[str, list[str]]:
    """Return the files of each name in a folder, with `below` also in the folders below it: of a
    task or group its file, the first by path; of a tag those of its tasks, by their names."""
    named: dict[str, list[str]] = {}
    tags: dict[str, dict[str, str]] = {}
    # Sorted, so that the same file wins on every machine where two have one name.
    for path in sorted(Path(folder).glob("**/*.y*ml" if below else "*.y*ml")):
        text = _text(str(path))
        if name := name_in(text):
            named.setdefault(name, [str(path)])
            # In the file of a group `tag` names no task.
            for tag in [] if _words("group", text) else _words("tag", text):
                tags.setdefault(tag, {}).setdefault(name, str(path))
    by_tag = {tag: [*dict(sorted(found.items())).values()] for tag, found in tags.items()}
    # A task's name comes before a tag of the same name.
    return by_tag | named


def name_in(text: str) -> str | None:
    """Return the name of the group or task that a file's text describes."""
    return next(iter(_words("group", text) or _words("task", text)), None)


@functools.cache
def _text(path: str) -> str:
    """Return a file's text, followed by the texts of the files that it includes."""
    texts: dict[str, str] = {}
    waiting = [path]
    while waiting:
        each = os.path.normpath(waiting.pop())
        # Files may include one another in a circle.
        if each not in texts:
            texts[each] = ""
            with contextlib.suppress(OSError, ValueError):  # reported where the file is asked for
                texts[each] = read_regular(each, MAX_BYTES).decode()
            names = _words("include", texts[each])
            waiting += [os.path.join(os.path.dirname(each), name) for name in names]
    return "\n".join(texts.values())


def _words(key: str, text: str) -> list[str]:
    """Return the words after the first occurrence of a top-level key, in its line or a list below
    it."""
    found = re.search(rf"^[\"']?{key}[\"']?:([^\n]*(?:\n[ \t]*- [^\n]*)*)", text, re.M)
    if not found:
        return []
    return re.findall(r"[^\s\"'\[\],-][^\s\"'\[\],]*", re.sub(" #.*", "", found[1]))
