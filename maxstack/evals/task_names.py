"""Names of tasks, groups and tags in a folder of lm-evaluation-harness's task files, read without a
parser: it has thousands, and some name code."""

import functools
import os
import re
from pathlib import Path


@functools.cache
def files_of(folder: str, below: bool) -> dict[str, list[str]]:
    """By name, the file of a task or group, the first in the order of paths, or those of a tag, by
    their tasks' names; of the folder, and of those below it."""
    named: dict[str, list[str]] = {}
    tags: dict[str, dict[str, str]] = {}
    for path in sorted(Path(folder).glob("**/*.y*ml" if below else "*.y*ml")):
        text = _text(str(path))
        names = (_words("group", text) or _words("task", text))[:1]
        for name in names:
            named.setdefault(name, [str(path)])
            for tag in [] if _words("group", text) else _words("tag", text):
                tags.setdefault(tag, {}).setdefault(name, str(path))
    by_tag = {tag: [found[name] for name in sorted(found)] for tag, found in tags.items()}
    return by_tag | named


@functools.cache
def _text(path: str) -> str:
    """A file's text, and after it those of files that it includes."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError):  # which is told where the file is asked for
        return ""
    folder = os.path.dirname(path)
    included = [os.path.join(folder, name) for name in _words("include", text)]
    return "\n".join([text, *map(_text, included)])


def _words(key: str, text: str) -> list[str]:
    """The words at a key at the top, where it comes first, in its line or in a list below it."""
    found = re.search(rf"^[\"']?{key}[\"']?:([^\n]*(?:\n[ \t]*- [^\n]*)*)", text, re.M)
    if not found:
        return []
    return re.findall(r"[^\s\"'\[\],-][^\s\"'\[\],]*", re.sub(" #.*", "", found[1]))
