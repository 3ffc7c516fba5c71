"""The files behind sources: matching globs, reading compressed files, finding where the records of
a text file begin and end."""

import codecs
import fnmatch
import functools
import glob
import gzip
import hashlib
import logging
import mmap
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxstack.config import atomic, shortened
from maxstack.config.errors import DataError
from maxstack.schema.data import Files

log = logging.getLogger(__name__)
_INSTALLED = ("site-packages", "dist-packages", "__pycache__")
_ESCAPED = re.compile(r"\[([*?[])\]")
_CHUNK = 1 << 24
DECODE_ERRORS = {"refuse": "strict", "replace": "replace", "keep": "surrogateescape"}
"""Of str.decode, by `encoding_errors`."""


@dataclass(frozen=True)
class File:
    """A matched file; `key` is its path below the fixed part of its glob, the same on every
    machine."""

    path: str
    key: str


def matched(cfg: Files) -> list[File]:
    """The files of a source, sorted by key. DataError for a missing file or a glob without a
    match."""
    excluded = {path for pattern in cfg.exclude for path in _expand(pattern)}
    found: dict[str, File] = {}
    for pattern in cfg.files:
        paths = _expand(pattern)
        if not paths:
            raise DataError(
                f"{pattern}: {_missing(pattern)} (relative paths start at "
                f"{os.getcwd()}); correct the `files` of this source"
            )
        root = _rooted(_absolute(pattern))[0]
        for path in paths:
            found.setdefault(path, File(path, Path(os.path.relpath(path, root)).as_posix()))
    kept = (
        file
        for path, file in found.items()
        if path not in excluded and not _anywhere(file, cfg.exclude)
    )
    files = sorted(kept, key=lambda file: (file.key, file.path))
    if not files:
        raise DataError(
            f"{', '.join(cfg.files)}: every matching file is excluded by "
            f"{', '.join(cfg.exclude)}; this source is empty"
        )
    return files


def _missing(pattern: str) -> str:
    if glob.has_magic(_absolute(pattern)):
        return "the glob matches no file"
    if os.path.isdir(_absolute(pattern)):
        return f"is a folder; {pattern.rstrip('/')}/** means all files in it"
    return (
        "is a pipe, a socket or a device, and only files can be read in any order"
        if os.path.exists(_absolute(pattern))
        else "no such file"
    )


def _anywhere(file: File, patterns: Sequence[str]) -> bool:
    """Whether a pattern that begins with **/ matches the file's path below the fixed part of its
    glob."""
    return any(
        pattern.startswith("**/") and fnmatch.fnmatchcase(f"/{file.key}", pattern)
        for pattern in patterns
    )


def brief(text: object) -> str:
    """What a library says about damaged bytes as one printable line of some 300 characters."""
    return shortened(" ".join(str(text).split()), 300)


def read(path: str) -> bytes:
    """A whole file, decompressed if it ends in .gz or .zst. DataError if it cannot be read."""
    return b"".join(_pieces(path))


def text_of(data: bytes, cfg: Files, path: str) -> bytes:
    """A document as `encoding_errors` and `normalize` want it. DataError, naming the file, if it is
    refused."""
    if cfg.encoding_errors != "keep":
        data = decoded(data, cfg, path).encode()
    if "bom" in cfg.normalize:
        data = data.removeprefix(codecs.BOM_UTF8)
    return (
        data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if "newlines" in cfg.normalize else data
    )


def decoded(data: bytes, cfg: Files, path: str) -> str:
    """Text as `encoding_errors` wants it; bytes that are kept become surrogates (PEP 383)."""
    try:
        return data.decode(errors=DECODE_ERRORS[cfg.encoding_errors])
    except UnicodeDecodeError as error:
        if other := other_encoding(data[:4]):
            raise DataError(f"{path}: {other}") from error
        raise DataError(
            f"{path}: not UTF-8 at byte {error.start}: {error.reason}; convert it to "
            "UTF-8, leave it out with "
            "`exclude`, or set encoding_errors of this source to replace, or to keep for the bytes "
            "tokenizer"
        ) from error


def other_encoding(begin: bytes) -> str | None:
    """What to do about text whose first four bytes are those of UTF-16 or UTF-32: a byte order
    mark, or the zeros of characters below U+0100 (The Unicode Standard, section 23.8)."""
    marks = {
        codecs.BOM_UTF32_LE: "UTF-32",
        codecs.BOM_UTF32_BE: "UTF-32",
        codecs.BOM_UTF16_LE: "UTF-16",
        codecs.BOM_UTF16_BE: "UTF-16",
    }
    zeros = {1: "UTF-16", 2: "UTF-16", 3: "UTF-32"}.get(begin.count(0))
    found = next((name for mark, name in marks.items() if begin.startswith(mark)), zeros)
    return (
        found
        and f"not UTF-8: it begins as {found} does; convert it to UTF-8 (a file: iconv -f "
        f"{found} -t UTF-8), or leave it out with `exclude`"
    )


def plain(path: str) -> str:
    """A path to the file's plain bytes: itself, or for .gz and .zst a decompressed copy in the
    cache folder, made once and shared by all processes.

    The folder is $MAXSTACK_CACHE/data, by default ~/.cache/maxstack/data; a copy belongs to one
    path, size and modification time.
    """
    if not path.endswith((".gz", ".zst")):
        return path
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    identity = f"{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}"
    folder = Path(os.environ.get("MAXSTACK_CACHE", "~/.cache/maxstack")).expanduser() / "data"
    copy = folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    if not copy.exists():
        try:
            with atomic.writing(copy, shared=True) as unfinished, unfinished.open("wb") as file:
                file.writelines(_pieces(path))
        except OSError as error:
            raise DataError(
                f"{path}: its decompressed copy cannot be written to {folder}: {error.strerror}; "
                "set MAXSTACK_CACHE to a folder with room"
            ) from error
        log.info("%s: decompressed once to %s (%.1f MB)", path, copy, copy.stat().st_size / 1e6)
    return str(copy)


def line_bounds(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the lines of a plain file that are not blank start and end, in bytes: two int64 arrays,
    from one scan."""
    size = os.path.getsize(path)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        breaks = [
            np.flatnonzero(np.frombuffer(data[at : at + _CHUNK], np.uint8) == 10) + at
            for at in range(0, size, _CHUNK)
        ]
        ends = np.append(np.concatenate(breaks), size)
        starts = np.concatenate([[0], ends[:-1] + 1])
        short = np.flatnonzero(ends - starts < 8)
        blank = [i for i in short if not data[starts[i] : ends[i]].strip()]
    return np.delete(starts, blank), np.delete(ends, blank)


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line at a byte offset of a plain file."""
    with open(path, "rb") as file:
        pieces = (file.read(min(_CHUNK, offset - at)) for at in range(0, offset, _CHUNK))
        return 1 + sum(piece.count(b"\n") for piece in pieces)


def separated_bounds(path: str, separator: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents between matches of a regular expression start and end in a plain file,
    blank ones left out: two int64 arrays, from one scan."""
    size = os.path.getsize(path)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        spans = [match.span() for match in re.finditer(separator, data)]
        starts = np.array([0, *(end for _, end in spans)], np.int64)
        ends = np.array([*(start for start, _ in spans), size], np.int64)
        blank = [
            i for i in np.flatnonzero(ends - starts < 64) if not data[starts[i] : ends[i]].strip()
        ]
    return np.delete(starts, blank), np.delete(ends, blank)


def _absolute(pattern: str) -> str:
    stdlib = glob.escape(os.path.realpath(sysconfig.get_path("stdlib")))
    return os.path.expanduser(pattern.replace("{stdlib}", stdlib))


def _expand(pattern: str) -> list[str]:
    full = _absolute(pattern)
    if not glob.has_magic(full):
        return [os.path.normpath(full)] if os.path.isfile(full) else []
    root, wanted = _rooted(full)
    skipped = _INSTALLED if "{stdlib}" in pattern else ()
    return [os.path.normpath(os.path.join(root, *parts)) for parts in _walk(root, wanted, skipped)]


def _rooted(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the parts of the pattern from there on."""
    parts = pattern.split(os.sep)
    magic = next(
        (i for i, part in enumerate(parts) if glob.has_magic(_ESCAPED.sub("", part))),
        len(parts) - 1,
    )
    root = _ESCAPED.sub(r"\1", os.sep.join(parts[:magic])) or (
        "/" if pattern.startswith("/") else "."
    )
    return root, [part for part in parts[magic:] if part]


def _walk(root: str, wanted: list[str], skipped: tuple[str, ...]) -> Iterator[list[str]]:
    """The paths, in parts, of files below `root` that match; folders that cannot hold a match, or
    named in `skipped`, are not entered."""
    seen = (
        {(place.st_dev, place.st_ino) for place in (os.stat(root),)}
        if os.path.isdir(root)
        else set()
    )
    folders: list[list[str]] = [[]]
    while folders:
        folder = folders.pop()
        try:
            entries = sorted(
                os.scandir(os.path.join(root, *folder)), key=lambda entry: entry.name, reverse=True
            )
        except OSError:
            if folder:
                log.warning("%s cannot be listed and is left out", os.path.join(root, *folder))
            continue
        for entry in entries:
            parts = [*folder, entry.name]
            if entry.is_dir():
                place = entry.stat()
                if (
                    entry.name not in skipped
                    and _may_lead_to(parts, wanted)
                    and (place.st_dev, place.st_ino) not in seen
                ):
                    seen.add((place.st_dev, place.st_ino))
                    folders.append(parts)
            elif _matches(parts, wanted) and entry.is_file():
                yield parts


def _may_lead_to(parts: list[str], wanted: list[str]) -> bool:
    before = wanted[: wanted.index("**")] if "**" in wanted else wanted[:-1]
    return ("**" in wanted or len(parts) <= len(before)) and all(
        _matches([part], [want]) for part, want in zip(parts, before, strict=False)
    )


def _matches(parts: list[str], wanted: list[str]) -> bool:
    """As the shell matches: ** stands for any folders, and a wildcard for no name that begins with
    a dot."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        visible = next((i for i, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_matches(parts[i:], wanted[1:]) for i in range(visible + 1))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def _pieces(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            if path.endswith((".gz", ".zst")) and not os.fstat(file.fileno()).st_size:
                raise DataError(f"{path}: empty, which no compressed file is; it was cut short")
            if path.endswith(".zst"):
                yield from _zstd_pieces(path, file)
                return
            stream = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            yield from iter(functools.partial(stream.read, _CHUNK), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: corrupt gzip data: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _zstd_pieces(path: str, file) -> Iterator[bytes]:
    import zstandard

    frame = None
    try:
        for piece in iter(functools.partial(file.read, _CHUNK >> 4), b""):
            while piece:
                frame = zstandard.ZstdDecompressor().decompressobj() if frame is None else frame
                yield frame.decompress(piece)
                piece = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: corrupt zstd data: {error}") from error
    if frame is not None:
        raise DataError(f"{path}: the zstd data is cut short")
