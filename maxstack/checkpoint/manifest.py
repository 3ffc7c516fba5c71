"""The manifest of a checkpoint's step: a checksum of every file. A step counts once its manifest is
there, and is compared with it when it is read.

xxh3 with 64 bits: it finds damage by disks, networks and copies, not by an adversary.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from maxstack import strict_json
from maxstack.config import atomic, retries
from maxstack.errors import LASTING, Passing
from maxstack.regular_file import read_regular

NAME = "manifest.json"
UNFINISHED = atomic.UNFINISHED
"""The end of a mark's name."""
UNKNOWN = "0" * 16
"""The manifest's own checksum while that is computed."""
T = TypeVar("T")
READERS = 8
"""Threads that read files."""
EVERY = slice(None)


class Damage(Exception):
    """A file of a step is lost or changed; the message names it and the fault."""


class Unreadable(Passing):
    """A file of a step could not be read, however often it was tried: nothing is known of it."""


def judge(found: Sequence[tuple[list[str], str]]) -> None:
    """Unreadable or Damage by what each process found: lines about what is lost or changed, and
    what it could not read, or ""."""
    if unreadable := "; ".join(filter(None, (each for _, each in found))):
        raise Unreadable(unreadable)
    if lines := [line for each, _ in found for line in each]:
        raise Damage("\n".join(lines))


def _tried(path: Path, act: Callable[[], T]) -> T:
    """What `act` makes of a file, tried again where its disk fails. FileNotFoundError; an OSError
    of `errors.LASTING`, which whoever owns the file must mend; else Unreadable."""
    try:
        return retries.retried(f"{path}", act)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        if error.errno in LASTING:
            raise OSError(error.errno, error.strerror, f"{path}") from error
        raise Unreadable(
            f"{path}: cannot be read: {error.strerror}; nothing was moved, and the same command "
            "reads it again"
        ) from error


Entry = dict[str, Any]
"""A file as it was written: `bytes`, and `xxh3` in hexadecimal digits."""


def checksums(folder: Path, share: slice = EVERY) -> dict[str, Entry]:
    """The entry of each file of a folder, read as it lies on disk; `share` of them alone."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return dict(pool.map(lambda name: (name, _entry(folder / name)), files(folder)[share]))


def files(folder: Path) -> list[str]:
    """Path of every file below `folder` but the manifest, relative to `folder`."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != NAME and not name.endswith(UNFINISHED))


def steps(folder: Path) -> list[int]:
    """The steps in a folder that have a manifest, oldest first; none where there is no folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(path.name) for path in paths if path.name.isdecimal() and (path / NAME).exists()
    )


def mark(step: Path) -> Path:
    """STEP.unfinished: a file beside a step's folder while that is written or deleted, which a
    killed process leaves behind."""
    return step.with_name(f"{step.name}{UNFINISHED}")


def delete(step: Path) -> None:
    """Delete a finished step: its manifest first, so that half of a step never counts."""
    with contextlib.suppress(OSError):  # there may be no room
        mark(step).touch()
    (step / NAME).unlink(missing_ok=True)
    shutil.rmtree(step, ignore_errors=True)
    if not step.exists():
        mark(step).unlink(missing_ok=True)


def write(folder: Path, entries: Mapping[str, Entry], facts: Mapping[str, Any]) -> None:
    """Write the manifest, whole or not at all; with it the step counts. `facts` are plain data
    about the step."""
    text = json.dumps(
        {"xxh3": UNKNOWN, "facts": dict(facts), "files": dict(sorted(entries.items()))}, indent=1
    )
    with atomic.writing(folder / NAME) as unfinished:
        unfinished.write_text(text.replace(UNKNOWN, _digest(text), 1), encoding="utf-8")


def note(folder: Path, more: Mapping[str, Any]) -> None:
    """Add facts to those of a finished step. Damage or Unreadable where it is none."""
    facts, entries = read(folder)
    write(folder, entries, facts | dict(more))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """(facts, files). Damage where the manifest is missing or cannot be understood, Unreadable
    where it cannot be read."""
    path = folder / NAME
    try:
        text = _tried(path, lambda: read_regular(path, strict_json.LARGEST).decode())
        saved = strict_json.parse_object(text, NAME)
        if _digest(text.replace(saved["xxh3"], UNKNOWN, 1)) != saved["xxh3"]:
            raise ValueError("its own checksum is another one")
        return saved["facts"], {
            name: {"bytes": int(entry["bytes"]), "xxh3": str(entry["xxh3"])}
            for name, entry in saved["files"].items()
        }
    except FileNotFoundError:
        raise Damage(f"{path}: is missing, so the save was never finished") from None
    except Unreadable:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damage(f"{path}: cannot be understood: {error}") from error


def damages(
    folder: Path, share: slice = EVERY, done: Callable[[int], Any] = lambda size: None
) -> Iterator[str]:
    """A line for each lost or changed file of a step, none where it is intact; `share` of its files
    alone, in their order. `done` is called with the bytes of each file that was read. Unreadable
    where a file cannot be read."""
    try:
        entries = [*read(folder)[1].items()][share]
    except Damage as error:
        yield str(error)
        return
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        faults = pool.map(lambda item: _fault(folder / item[0], item[1]), entries)
        for (name, entry), fault in zip(entries, faults, strict=True):
            done(entry["bytes"])
            if fault:
                yield f"{folder / name}: {fault}"


def _fault(path: Path, written: Entry) -> str | None:
    try:
        entry = _tried(path, lambda: _entry(path))
    except FileNotFoundError:
        return "is missing"
    if entry["bytes"] != written["bytes"]:
        return f"has {entry['bytes']:,} bytes, and {written['bytes']:,} were written"
    if entry != written:
        return f"its checksum is {entry['xxh3']}, and {written['xxh3']} was written"
    return None


def _entry(path: Path) -> Entry:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
        return {"bytes": file.tell(), "xxh3": digest}


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
