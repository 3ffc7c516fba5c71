"""Plain bytes of files that are compressed or at URLs, and copies of them in the cache folder.

Documents are asked for in any order, so a file that cannot be read from any position (compressed,
or Parquet, whose rows are decoded by group) or whose every read would be a request (at a URL) is
copied once, in plain form, to $MAXSTACK_CACHE/data, under a hash of path, size, version and form.
Files come from others, so what they become is counted piece by piece while it is decompressed, and
a file or a cache that grows beyond its limit is refused before the disk or memory is full.
"""

import bz2
import contextlib
import fnmatch
import functools
import gzip
import logging
import lzma
import os
import posixpath
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from maxstack.config import atomic, storage
from maxstack.data.files import File, check_length, digest
from maxstack.errors import ConfigError, DataError
from maxstack.regular_file import open_regular
from maxstack.report.progress import progress

log = logging.getLogger(__name__)
_AT_ONCE = 8
"""Files that are copied at once, each with two ranges of a store ahead: 384 MiB at most."""
_CHUNK = 1 << 24
_COMPRESSED = {
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\0",
}
"""Endings of compressed files and their first bytes, which decide where they are known."""
_READERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_PATIENCE = 5
"""Seconds of copying after which a bar is shown."""
_FEED = 1 << 12
"""Compressed bytes that zstd gets at once, of which it makes at most 32,000 times as many."""
RATIO, _LEAST = 100, 1 << 30
"""The default limit of a file's plain size: so many times its own, or so many bytes if that is
less."""
_UNUSED, _STEP = 7 * 24 * 3600, 1 << 28
"""Seconds after which an unused copy may go, and bytes after which the cache is measured again."""
Told = Callable[[float], object]
"""Called with the number of a file's bytes that were read since the last call."""
Form = tuple[Callable[[str, storage.Stamp, Told], Iterator[bytes]], str]
"""The bytes of a copy of a path, and a key that differs where copies do; empty: plain bytes."""


def read_file(file: File, most: int | None = None) -> bytes:
    """Read a whole file, decompressed if it is compressed. DataError if it cannot be read or is
    longer than a record, StoreError if it is at a URL and not as it was listed."""
    pieces = list[bytes]()
    size = 0
    # check_length bounds one record; limit_growth bounds what a small file may become.
    for piece in limit_growth(read_pieces(file.path, file.version), file, most):
        pieces.append(piece)
        check_length(size := size + len(piece), file.path)
    return b"".join(pieces)


def limit_growth(pieces: Iterator[bytes], file: File, most: int | None) -> Iterator[bytes]:
    """Pass on the plain pieces of a file. DataError as of `check_growth`."""
    size = compressed = 0
    for piece in pieces:
        size += len(piece)
        compressed = compressed or int(file.pin()[0])
        check_growth(file.path, compressed, size, most)
        yield piece


def check_growth(path: str, compressed: int, size: int, most: int | None) -> None:
    """DataError if a file becomes more than `most` bytes; None: more than any honest file."""
    limit = max(RATIO * compressed, _LEAST) if most is None else most
    if size > limit:
        raise DataError(
            f"{path}: its {compressed:,} bytes become more than {limit:,}, as if to fill memory or "
            "disk; leave it out, or set max_bytes of its source if the size is intended"
        )


def _limit_cache(pieces: Iterator[bytes], folder: Path) -> Iterator[bytes]:
    """Pass on pieces that are written to a folder of copies. ConfigError if it has no room."""
    size = measured = 0
    for piece in pieces:
        # Measured before the first piece and again later, since other processes write there too.
        if not size or size - measured > _STEP:
            measured = size
            _check_room(folder)
        size += len(piece)
        yield piece


def _check_room(folder: Path) -> None:
    """ConfigError if copies take more than $MAXSTACK_CACHE_BYTES, or nearly all of the disk,
    also without those that nobody has used for a week, which are deleted."""
    states: dict[Path, os.stat_result] = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # finished, or deleted, meanwhile
            states[path] = path.stat()
    used = sum(state.st_size for state in states.values())
    disk = shutil.disk_usage(folder)
    try:
        given = float(os.environ.get("MAXSTACK_CACHE_BYTES", "inf"))
    except ValueError as error:
        raise ConfigError(f"MAXSTACK_CACHE_BYTES: {error}; give a number, such as 2e12") from None
    most = min(given, used + disk.free - min(disk.total // 20, _LEAST))
    # plain_copy sets the modification time at each use, since many systems keep no access times.
    for path in sorted(states, key=lambda path: states[path].st_mtime):
        if used <= most or states[path].st_mtime > time.time() - _UNUSED:
            break
        path.unlink(missing_ok=True)
        used -= states[path].st_size
    if used > most:
        raise ConfigError(
            f"{folder}: its copies take {used:,} bytes, and {int(max(most, 0)):,} are allowed; "
            "delete some, raise MAXSTACK_CACHE_BYTES, or set MAXSTACK_CACHE to a folder with room"
        )


def plain_copies(files: Sequence[File], form: Form, most: int | None = None) -> list[str]:
    """Return `plain_copy` of each file, made a few at a time, with a bar after some seconds."""
    size = sum(int(file.pin()[0]) for file in files if form[1] or _needs_copy(file.path))
    with (
        progress(size, "copying to the cache", "B", delay=_PATIENCE) as bar,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        return list(pool.map(lambda file: plain_copy(file, form, bar.update, most), files))


def plain_copy(
    file: File, form: Form, told: Told = lambda size: None, most: int | None = None
) -> str:
    """Return a local path to the file's plain bytes: itself, or of one at a URL, compressed or read
    in another form a copy in the cache folder, made once and shared by all processes. DataError
    if it becomes more than `most` bytes, ConfigError if the cache has no room.

    The copy, in $MAXSTACK_CACHE/data, belongs to one path, size, version and form.
    """
    path, is_url = file.path, storage.is_url(file.path)
    if not form[1] and not _needs_copy(path):
        return path
    try:
        size, version = file.version or storage.stamp(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    # With size and version, so a file that changed gets a copy of its own; the old one is deleted
    # once nobody has used it for a week and the space is needed.
    identity = f"{path if is_url else os.path.abspath(path)}\0{size}\0{version}{form[1]}"
    copy = storage.cache_folder() / "data" / digest(identity.encode())
    if copy.exists():
        told(size)
        with contextlib.suppress(OSError):  # of another user's cache
            os.utime(copy)
        return str(copy)
    try:
        # Shared: a random temporary name, since containers that share a cache may have equal
        # process ids.
        with atomic.writing(copy, shared=True) as unfinished, unfinished.open("wb") as made:
            pieces = limit_growth(form[0](path, (size, version), told), file, most)
            made.writelines(_limit_cache(pieces, copy.parent))
    except OSError as error:
        raise DataError(
            f"{path}: its plain copy cannot be written to {copy.parent}: {error.strerror}; "
            "set MAXSTACK_CACHE to a folder with room"
        ) from error
    # Ranges read before and after a change would be put together to a file that never was.
    if is_url and storage.stamp(path) != (size, version):
        copy.unlink(missing_ok=True)
        raise DataError(f"{path}: changed while it was copied; start again once it is whole")
    log.info("%s: copied once to %s (%.1f MB)", path, copy, copy.stat().st_size / 1e6)
    return str(copy)


def local_folder(path: str, patterns: Sequence[str] = ("*",), depth: int | None = None) -> Path:
    """Return a folder itself, or at a URL a copy in the cache of those of its files that match,
    made once and shared by all processes; it belongs to their versions. ConfigError if it cannot be
    made.

    `depth`: levels of the folder that are listed; None: all.
    """
    if not storage.is_url(path):
        return Path(path).expanduser()
    try:
        found = storage.stamps_below(path, depth)
        if not found:
            raise ConfigError(f"{path}: no such folder, or no file is in it")
        names = [*dict.fromkeys(n for p in patterns for n in fnmatch.filter(found, p))]
        versions = repr([path, *((name, found[name]) for name in names)])
        key, name = digest(versions.encode()), posixpath.basename(path.rstrip("/"))
        folder = storage.cache_folder() / "folders" / key / name
        # Files appear one by one, each whole, so a copy that was stopped continues with the others.
        absent = [name for name in names if not (folder / name).exists()]
        size = sum(found[name][0] for name in absent)
        with progress(size, f"copying {path}", "B", delay=_PATIENCE) as bar:
            for name in absent:
                with storage.replacing(str(folder / name)) as copy, copy.open("wb") as file:
                    for piece in storage.pieces(storage.join(path, name), found[name]):
                        bar.update(file.write(piece))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be copied to {storage.cache_folder()}: {error.strerror or error}; set "
            "MAXSTACK_CACHE to a folder with room"
        ) from error
    return folder


def _needs_copy(path: str) -> bool:
    if storage.is_url(path):
        return True
    with contextlib.suppress(OSError), open_regular(path) as file:  # told when it is read
        return _find_compression(path, file) is not None
    return False


def _find_compression(path: str, file: IO[bytes]) -> str | None:
    """Return the ending of the files that this one is like: by its first bytes, or else by its
    name. Bagz begins with its records, each compressed."""
    if path.endswith(".bagz"):
        return None
    # First bytes before the name: a gzip file under another name was taken for UTF-16, and
    # compressed bytes would be trained on.
    begin = file.read(10)
    file.seek(0)
    found = [end for end, magic in _COMPRESSED.items() if begin.startswith(magic)]
    # A text may begin with BZh; the magic number of a block does not come by chance.
    if found == [".bz2"] and begin[4:] != b"1AY&SY":
        found = []
    return next(iter(found), os.path.splitext(path)[1] if path.endswith((*_COMPRESSED,)) else None)


def read_pieces(
    path: str, wanted: storage.Stamp | None, told: Told = lambda size: None
) -> Iterator[bytes]:
    """Yield the plain bytes of a file. DataError or, of a store, StoreError if it cannot be read,
    or at a URL is not the one `wanted`."""
    try:
        with storage.open_file(path, storage.AHEAD, wanted) as file:
            at = 0
            for piece in _decompress(path, file):
                yield piece
                told(file.tell() - at)
                at = file.tell()
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: corrupt gzip, bz2 or xz data: {error}") from error
    except OSError as error:
        raise storage.error_of(path, error)(f"{path}: {error.strerror or error}") from error


def _decompress(path: str, file: IO[bytes]) -> Iterator[bytes]:
    kind = _find_compression(path, file)
    # Readers take an empty file for empty data, and the source would lose its documents in silence.
    if kind and not file.read(1):
        raise DataError(f"{path}: empty, which no compressed file is; it was cut short")
    file.seek(0)
    if kind == ".zst":
        yield from _zstd_pieces(path, file)
        return
    stream: IO[bytes] = _READERS[kind](file) if kind else file
    yield from iter(functools.partial(stream.read, _CHUNK), b"")


def _zstd_pieces(path: str, file: IO[bytes]) -> Iterator[bytes]:
    import zstandard

    frame = None
    try:
        for piece in iter(functools.partial(file.read, _FEED), b""):
            # A decompressor ends with its frame, and a file may have several, one after the other.
            while piece:
                frame = zstandard.ZstdDecompressor().decompressobj() if frame is None else frame
                yield frame.decompress(piece)
                piece = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: corrupt zstd data: {error}") from error
    if frame is not None:
        raise DataError(f"{path}: the zstd data is cut short")
