"""The manifest of a checkpoint's step: checksum and size of every file, and its own checksum.

A step counts once its manifest is there: it is written last and deleted first. Orbax has no
checksums and calls a step latest that was never written whole, so its managers are not used.
STEP.unfinished marks a step that is being written or deleted, so that a later start can tell what a
killed save left from files of another program. A run's retention may delete a step while it is
read: what was read before the manifest went was whole, so readers look for it again afterwards.

The checksum is xxh3 with 64 bits: it finds damage by disks, networks and copies, not an adversary.
A thread computes 3.6 GB/s of it, of crc32c 1.8 (EXPERIMENTS.md).
"""

import concurrent.futures
import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from maxstack import strict_json
from maxstack.config import atomic, retries
from maxstack.errors import LASTING, ConfigError, TransientError
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


class Unreadable(TransientError):
    """A file of a step could not be read, however often it was tried: nothing is known of it."""


def judge(found: Sequence[tuple[list[str], str]]) -> None:
    """Raise Unreadable or Damage by what each process found: lines about lost or changed files, and
    an error of reading, or ""."""
    if unreadable := "; ".join(filter(None, (each for _, each in found))):
        raise Unreadable(unreadable)
    if lines := [line for each, _ in found for line in each]:
        raise Damage("\n".join(lines))


def _retry(path: Path, act: Callable[[], T]) -> T:
    """Call `act` on a file, again where its disk fails. FileNotFoundError; an OSError of
    `errors.LASTING`, such as missing permission; else Unreadable."""
    try:
        return retries.retry(f"{path}", act)
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
"""A written file: `bytes`, and `xxh3` in hexadecimal digits."""


def checksums(folder: Path, share: slice = EVERY) -> dict[str, Entry]:
    """Compute the entry of each file of a folder as it lies on disk, or of a `share` of them."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return dict(pool.map(lambda name: (name, _entry(folder / name)), files(folder)[share]))


def files(folder: Path) -> list[str]:
    """List every file below `folder` but the manifest, relative to `folder`."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != NAME and not name.endswith(UNFINISHED))


def steps(folder: Path) -> list[int]:
    """List the steps in a folder that have a manifest, oldest first; none without a folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(path.name) for path in paths if path.name.isdecimal() and (path / NAME).exists()
    )


def mark(step: Path) -> Path:
    """Return the path of STEP.unfinished, beside a step's folder."""
    return step.with_name(f"{step.name}{UNFINISHED}")


def delete(step: Path) -> None:
    """Delete a finished step."""
    with contextlib.suppress(OSError):  # there may be no room
        mark(step).touch()
    # The order counts: the mark tells a later start whose files these are, and without its manifest
    # the step no longer counts, however far the deletion gets.
    (step / NAME).unlink(missing_ok=True)
    shutil.rmtree(step, ignore_errors=True)
    if not step.exists():
        mark(step).unlink(missing_ok=True)


def write(folder: Path, entries: Mapping[str, Entry], facts: Mapping[str, Any]) -> None:
    """Write the manifest, whole or not at all. `facts` are plain data about the step."""
    text = json.dumps(
        {"xxh3": UNKNOWN, "facts": dict(facts), "files": dict(sorted(entries.items()))}, indent=1
    )
    with atomic.writing(folder / NAME) as unfinished:
        # The first occurrence is the field itself. The manifest has a checksum of its own since all
        # 12 of 40 injected damages that went unnoticed were in this file.
        unfinished.write_text(text.replace(UNKNOWN, _digest(text), 1), encoding="utf-8")


def note(folder: Path, more: Mapping[str, Any]) -> None:
    """Add facts to a finished step. Damage or Unreadable where that cannot be read."""
    facts, entries = read(folder)
    write(folder, entries, facts | dict(more))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Read (facts, files). Damage where the manifest is missing or cannot be parsed, Unreadable
    where the disk fails."""
    path = folder / NAME
    try:
        # Bounded, and only a regular file: a fifo of this name would be waited for.
        text = _retry(path, lambda: read_regular(path, strict_json.LARGEST).decode())
        saved = strict_json.parse_object(text, NAME)
        if _digest(text.replace(saved["xxh3"], UNKNOWN, 1)) != saved["xxh3"]:
            raise ValueError("its own checksum differs")
        return saved["facts"], {
            name: {"bytes": int(entry["bytes"]), "xxh3": str(entry["xxh3"])}
            for name, entry in saved["files"].items()
        }
    except FileNotFoundError:
        raise Damage(f"{path}: is missing, so the save was never finished") from None
    except Unreadable:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damage(f"{path}: cannot be parsed: {error}") from error


def damages(
    folder: Path, share: slice = EVERY, done: Callable[[int], Any] = lambda size: None
) -> Iterator[str]:
    """Yield a line for each lost or changed file of a step, or of a `share` of its files. `done` is
    called with the bytes of each file that was read. Unreadable where a disk fails."""
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


def is_whole(step: Path) -> bool:
    """False for a step that was deleted, is being deleted, or was never finished."""
    return (step / NAME).exists()


def deleted_error(step: Path) -> ConfigError:
    """Return the error for a step that is not whole, with the steps that are left."""
    left = ", ".join(map(str, steps(step.parent))) or "no other step"
    return ConfigError(
        f"{step}: was deleted meanwhile, as a run's retention does (checkpoint.keep), or never "
        f"finished; {step.parent} holds {left}; name one of these, or the run's folder for its "
        "newest"
    )


def retry_if_deleted(find: Callable[[], Path], work: Callable[[Path], T], retry: bool = True) -> T:
    """Call `work` with the step that `find` returns, again with the next one where that was deleted
    meanwhile. Without `retry` ConfigError there: other processes could find another step."""
    while True:
        step = find()
        try:
            return work(step)
        except Exception as error:  # any library may fail in its own way where files are gone
            # Still there: then the error is the reader's own.
            if is_whole(step):
                raise
            if not retry:
                raise deleted_error(step) from error
            print(f"{step}: was deleted meanwhile; looking for the newest step", file=sys.stderr)


def _fault(path: Path, written: Entry) -> str | None:
    try:
        entry = _retry(path, lambda: _entry(path))
    except FileNotFoundError:
        return "is missing"
    if entry["bytes"] != written["bytes"]:
        return f"has {entry['bytes']:,} bytes, and {written['bytes']:,} were written"
    if entry != written:
        return f"its checksum is {entry['xxh3']}, and {written['xxh3']} was written"
    return None


def _entry(path: Path) -> Entry:
    # file_digest took 0.018 s for 200 MiB in memory, a loop of our own 0.022.
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
        return {"bytes": file.tell(), "xxh3": digest}


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
