"""Names of tasks, groups and tags in a folder of lm-evaluation-harness's task files, read without a
parser: it has thousands, and some name code."""

import contextlib
import functools
import os
import re
from pathlib import Path

from maxstack.config.reader import MAX_BYTES
from maxstack.regular_file import read_regular


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
    texts: dict[str, str] = {}
    waiting = [path]
    while waiting:
        each = os.path.normpath(waiting.pop())
        if each not in texts:
            texts[each] = ""
            with contextlib.suppress(OSError, ValueError):  # told where the file is asked for
                texts[each] = read_regular(each, MAX_BYTES).decode()
            names = _words("include", texts[each])
            waiting += [os.path.join(os.path.dirname(each), name) for name in names]
    return "\n".join(texts.values())


def _words(key: str, text: str) -> list[str]:
    """The words at a key at the top, where it comes first, in its line or in a list below it."""
    found = re.search(rf"^[\"']?{key}[\"']?:([^\n]*(?:\n[ \t]*- [^\n]*)*)", text, re.M)
    if not found:
        return []
    return re.findall(r"[^\s\"'\[\],-][^\s\"'\[\],]*", re.sub(" #.*", "", found[1]))
