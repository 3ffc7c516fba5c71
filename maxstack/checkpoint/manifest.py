"""The manifest of a checkpoint's step: a checksum of every file. A step counts once its manifest is
there, and is held against it when it is read.

xxh3 with 64 bits: it finds what disks, networks and copies do to files, not what an adversary
would.
"""

import concurrent.futures
import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

NAME = "manifest.json"
UNFINISHED = ".unfinished"
"""The end of a mark's name."""
UNKNOWN = "0" * 16
"""Stands for the manifest's own checksum where that is made."""
READERS, BLOCK = 8, 1 << 22
"""Files are read by so many threads, so many bytes at a time."""


class Damage(Exception):
    """A step is not what was written: which file, and what is wrong with it."""


Entry = dict[str, Any]
"""What a file was when it was written: `bytes`, and `xxh3` in hexadecimal digits."""


def checksums(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Of some files of a folder, read as they lie on disk."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return dict(pool.map(lambda name: (name, _entry(folder / name)), names))


def files(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest itself, by its path there."""
    return sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and not (name := path.relative_to(folder).as_posix()).startswith(NAME)
    )


def steps(folder: Path) -> list[int]:
    """The steps in a folder that have a manifest, oldest first; none where there is no folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(path.name) for path in found if path.name.isdigit() and (path / NAME).exists()
    )


def mark(step: Path) -> Path:
    """STEP.unfinished, a file beside a step's folder: that is being written or deleted, or was when
    its process was killed."""
    return step.with_name(f"{step.name}{UNFINISHED}")


def delete(step: Path) -> None:
    """Delete a finished step: first the manifest, so that half of one never counts."""
    with contextlib.suppress(OSError):  # there may be no room
        mark(step).touch()
    (step / NAME).unlink(missing_ok=True)
    shutil.rmtree(step, ignore_errors=True)
    if not step.exists():
        mark(step).unlink(missing_ok=True)


def write(folder: Path, found: Mapping[str, Entry], facts: Mapping[str, Any]) -> None:
    """Put the manifest into place, whole or not at all; with it the step counts. `facts` are plain
    data about the step."""
    unfinished = folder / f"{NAME}.unfinished"
    text = json.dumps(
        {"xxh3": UNKNOWN, "facts": dict(facts), "files": dict(sorted(found.items()))}, indent=1
    )
    unfinished.write_text(
        text.replace(UNKNOWN, xxhash.xxh3_64_hexdigest(text.encode()), 1), encoding="utf-8"
    )
    unfinished.replace(folder / NAME)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """(facts, files). Damage where the manifest cannot be understood."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        found = json.loads(text)
        if (
            xxhash.xxh3_64_hexdigest(text.replace(found["xxh3"], UNKNOWN, 1).encode())
            != found["xxh3"]
        ):
            raise ValueError("its own checksum is another one")
        return found["facts"], {
            name: {"bytes": int(entry["bytes"]), "xxh3": str(entry["xxh3"])}
            for name, entry in found["files"].items()
        }
    except FileNotFoundError:
        raise Damage(f"{folder / NAME}: is missing, so the save was never finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damage(f"{folder / NAME}: cannot be read: {error}") from error


def damages(
    folder: Path, share: slice = slice(None), done: Callable[[int], Any] = lambda size: None
) -> Iterator[str]:
    """What is wrong with the files of a step, each named, none where it is intact; `share` of its
    files alone, in their order. `done` is told the bytes of each file that was read."""
    try:
        wanted = [*read(folder)[1].items()][share]
    except Damage as error:
        yield str(error)
        return
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for (name, entry), wrong in zip(
            wanted, pool.map(lambda pair: _wrong(folder / pair[0], pair[1]), wanted), strict=True
        ):
            done(entry["bytes"])
            if wrong:
                yield f"{folder / name}: {wrong}"


def _wrong(path: Path, wanted: Entry) -> str | None:
    try:
        found = _entry(path)
    except OSError as error:
        return (
            "is missing"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read: {error.strerror}"
        )
    if found["bytes"] != wanted["bytes"]:
        return f"has {found['bytes']:,} bytes, and {wanted['bytes']:,} were written"
    return (
        None
        if found == wanted
        else f"its checksum is {found['xxh3']}, and {wanted['xxh3']} was written"
    )


def _entry(path: Path) -> Entry:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3": digest.hexdigest()}
