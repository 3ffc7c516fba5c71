"""Reads and writes files by path or URL (gs://, s3://, memory://, ...).

URLs go through fsspec, which is imported on demand, and paths through the operating system. A file
at a URL is read by ranges of bounded size, whose lengths are checked, some of them fetched ahead.
Its stamp (size and version) is compared at the beginning and the end, so that a file that changes
meanwhile is an error. Files are written whole or not at all. All errors of drivers become OSError,
and those that may pass are retried (retries.py)."""

import contextlib
import errno
import fnmatch
import io
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from maxstack.config import atomic
from maxstack.config.retries import Cut, may_be_transient, retry, root_cause
from maxstack.errors import ConfigError, DataError, StoreError, StoreUnavailable, shortened
from maxstack.regular_file import open_regular

T = TypeVar("T")
Stamp = tuple[int, int | str]
"""A file's size in bytes, and its modification time in ns or the store's version."""
RANGE = 1 << 24
"""Maximum number of bytes of a request to a store."""
# 315 MB from a store at hand: 77 to 88 MB/s with none ahead, 110 with two, 110 to 112 with four;
# each takes 16 MiB of memory.
AHEAD = 2
"""Number of ranges to fetch ahead in a file that is read in order."""
_BUFFER = 1 << 20
_WHOLE = 1 << 28
WHOLE, LARGE = 64 << 20, 1 << 28
"""Maximum number of bytes of a file that is read as a whole, and of a file of records."""
STORES = (
    *("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "adl", "oci", "oss", "hf", "http", "https"),
    *("hdfs", "webhdfs", "dbfs", "lakefs", "memory", "file", "local"),
)
"""fsspec schemes that are read and written. Others start programs, log in elsewhere or chain."""
_VERSIONS = (
    "generation",
    "etag",
    "ETag",
    "blob_id",
    "mtime",
    "LastModified",
    "Last-Modified",
    "created",
)
"""Keys by which stores tell that a file was rewritten, best first."""


def local(path: str | Path) -> Path:
    """A path on this machine. ConfigError for a URL."""
    if is_url(str(path)):
        raise ConfigError(f"{path}: must be on this machine; copy the folder to or from the URL")
    return Path(path)


def is_url(path: object) -> bool:
    return "://" in str(path)


def join(folder: str, name: str) -> str:
    """The path of `name`, relative to a folder; `..` is resolved in URLs, since object stores do
    not."""
    name = os.path.expanduser(name)
    if not is_url(folder) or is_url(name) or os.path.isabs(name):
        return name if is_url(name) else os.path.join(folder, name)
    scheme, _, inside = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(inside, name))}"


@contextlib.contextmanager
def filesystem(path: str) -> Iterator[tuple[Any, str]]:
    """fsspec's file system for a path or URL, and the path in it. ConfigError where its driver is
    not installed. Any error of the driver in the block becomes an OSError with `strerror`."""
    import fsspec
    from fsspec.registry import known_implementations

    scheme, _, inside = path.partition("://")
    if is_url(path) and (scheme not in STORES or "::" in inside):
        raise ConfigError(
            f"{shortened(path)}: nothing is read from {shortened(scheme)}://; use "
            f"{', '.join(STORES)}, or a local path"
        )
    # A cached listing would hide that a file changed, which readers compare stamps to find out.
    options = {"use_listings_cache": False} if is_url(path) else {}
    try:
        yield fsspec.url_to_fs(path, **options)
    except ConfigError:
        raise
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        reason = shortened(str(error.__cause__ or error))
        advice = "" if package == "fsspec" else f"; pip install {package}"
        raise ConfigError(
            f"{path}: what reads {scheme}:// cannot be imported: {reason}{advice}"
        ) from error
    except Exception as error:  # each driver has errors of its own
        told = root_cause(error)
        # Some drivers raise FileNotFoundError for an outage; then the cause has another status.
        if isinstance(error, FileNotFoundError) and told is error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        # One kind of error for all drivers, so that callers catch OSError alone.
        words = shortened(" ".join(f"{type(told).__name__}: {told}".split()), 300)
        if isinstance(told, OSError) and type(told).__module__ == "builtins":
            words = told.strerror or words
        raise OSError(errno.EIO, words, path) from error


def on_store(path: str, act: Callable[[Any, str], T]) -> T:
    """Call `act` with the file system of a URL and the path in it, with retries while the store
    does not answer. OSError with `strerror` if it fails."""

    def once() -> T:
        with filesystem(path) as (files, inside):
            return act(files, inside)

    return retry(path, once)


def error_of(path: str, error: Exception) -> type[DataError]:
    """The kind of DataError for a failure to read a path."""
    if may_be_transient(path, error):
        return StoreUnavailable
    return StoreError if is_url(path) else DataError


class _Stored(io.RawIOBase):
    """A file at a URL, read by ranges. `stamp`: its size and version when it was opened; `ahead`:
    number of ranges to fetch ahead, if it is read in order. OSError if it is not the `wanted`
    file."""

    def __init__(self, path: str, ahead: int = 0, wanted: Stamp | None = None):
        self._path, self._at = path, 0
        self._all = b""
        # Until a server has given a part, nothing is fetched ahead: one that ignores ranges would
        # send the whole file for each.
        self._gives_parts = False
        self._ahead, self._pool = ahead, ThreadPoolExecutor(ahead + 1)
        self._coming: dict[int, Future[bytes]] = {}
        self.stamp = stamp(path)
        # A file that was replaced since it was listed would give other documents for the same
        # positions.
        if wanted not in (None, self.stamp):
            raise _changed(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.stamp[0]}[whence]
        self._at = max(0, start + offset)
        return self._at

    def close(self) -> None:
        # Without waiting: a store that does not answer must not hold the end of a run.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._coming.clear()
        super().close()

    def readinto(self, buffer: Any) -> int:
        end = min(self.stamp[0], self._at + min(len(buffer), RANGE))
        if end <= self._at:
            return 0
        if self._all:
            piece = self._all[self._at : end]
        else:
            piece = self._in_order(end) if self._ahead else self._fetch(self._at, end)
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _in_order(self, end: int) -> bytes:
        """Bytes from the current position to `end` or the end of its range, while the next ranges
        are fetched."""
        number, size = self._at // RANGE, self.stamp[0]
        last = number + self._ahead if self._gives_parts else number
        wanted = range(number, min(last, (size - 1) // RANGE) + 1)
        self._coming = {
            n: self._coming.get(n)
            or self._pool.submit(self._fetch, n * RANGE, min(size, (n + 1) * RANGE))
            for n in wanted
        }
        start = number * RANGE
        return self._coming[number].result()[self._at - start : end - start]

    def _fetch(self, start: int, end: int) -> bytes:
        return on_store(self._path, lambda files, inside: self._range(files, inside, start, end))

    def _range(self, files: Any, inside: str, start: int, end: int) -> bytes:
        size, asked = self.stamp[0], end - start
        piece = files.cat_file(inside, start=start, end=end)
        # A server without ranges: the file is small enough to keep, so it is asked for once.
        if len(piece) == size and asked < size <= _WHOLE:
            self._all = piece  # of a server that gives no parts of files
            return piece[start:end]
        if len(piece) > asked:
            raise OSError(
                f"{len(piece)} bytes came where {asked} were asked for: its server gives "
                "no parts of files; copy it to a folder"
            )
        if len(piece) < asked:
            # Some drivers return a short answer without an error. Cut is a ConnectionError, so it
            # is retried.
            raise Cut(f"{len(piece)} bytes came where {asked} were asked for")
        self._gives_parts = True
        return piece


def open_file(path: str, ahead: int = 0, wanted: Stamp | None = None) -> IO[bytes]:
    """Open a file for reading at any position; at a URL by ranges of at most RANGE bytes, with
    `ahead` of them fetched ahead. OSError if it cannot be opened, is no file, or at a URL is not
    the `wanted` one."""
    if not is_url(path):
        return open_regular(path)
    return io.BufferedReader(_Stored(path, ahead, wanted), _BUFFER)


def read(path: str, most: int = -1) -> bytes:
    """A file's bytes, at most `most` from its beginning. OSError if it cannot be read."""
    with open_file(path) as file:
        return file.read(most)


def read_whole(path: str, largest: int = WHOLE) -> bytes:
    """A file's bytes. OSError if it cannot be read, DataError if it is larger than `largest`."""
    if len(data := read(path, largest + 1)) > largest:
        raise DataError(f"{path}: is larger than the limit of {largest:,} bytes")
    return data


def pieces(path: str, wanted: Stamp) -> Iterator[bytes]:
    """The bytes of a file at a URL, in pieces of at most RANGE. OSError if it does not have the
    `wanted` size and version, at the beginning or at the end."""
    with _Stored(path, AHEAD, wanted) as file:
        while piece := file.read(RANGE):
            yield piece
    # Again at the end: the object may have been replaced between two ranges.
    if stamp(path) != wanted:
        raise _changed(path)


def _changed(path: str) -> OSError:
    return OSError(errno.ESTALE, "changed after it was listed; put it back, or start again", path)


def kind(path: str) -> str | None:
    """file, directory, other for a pipe, a socket or a device, or None where nothing exists.
    ConfigError if a store does not answer."""
    if not is_url(path):
        if os.path.isdir(path):
            return "directory"
        there = "other" if os.path.exists(path) else None
        return "file" if os.path.isfile(path) else there
    try:
        return on_store(path, lambda files, inside: files.info(inside)["type"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def stamp(path: str) -> Stamp:
    """A file's size and version. OSError if there is no such file."""
    if not is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    fresh = _fresh(path, expand_info=True)
    info = on_store(path, lambda files, inside: files.info(inside, **fresh))
    if info["type"] != "file":  # file:// of a pipe would wait for who writes to it
        raise OSError(errno.EINVAL, "is no file", path)
    return _stamp(info)


def _stamp(info: dict[str, Any]) -> Stamp:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return info["size"], str(version.timestamp() if hasattr(version, "timestamp") else version)


def stamps_below(folder: str, depth: int | None = None) -> dict[str, Stamp]:
    """Relative paths of all files below a folder at a URL, sorted, with their sizes and versions;
    empty where it does not exist. OSError if a store does not answer."""

    def found(files: Any, inside: str) -> dict[str, Stamp]:
        return {
            info["name"].removeprefix(inside).lstrip("/"): _stamp(
                files.info(info["name"]) if info["size"] is None else info  # of a page of links
            )
            for info in _infos(files, inside, depth, _fresh(folder))
        }

    try:
        return dict(sorted(on_store(folder, found).items()))
    except FileNotFoundError:
        return {}


def _fresh(path: str, **further: bool) -> dict[str, bool]:
    """Options that make a caching driver ask its store again."""
    # Hugging Face's driver keeps listings whatever use_listings_cache says.
    return {"refresh": True, **further} if path.startswith("hf://") else {}


def _infos(
    files: Any, folder: str, depth: int | None, fresh: dict[str, bool]
) -> Iterator[dict[str, Any]]:
    """Files below a folder. The drivers' own `find` leaves out folders that cannot be listed."""
    # Level by level: with `find` an outage became an empty or a shorter source.
    for info in files.ls(folder, detail=True, **fresh):
        if info["name"].strip("/") == folder.strip("/"):
            continue  # the mark of an empty folder
        if info["type"] != "directory":
            yield info
        elif depth is None or depth > 1:
            yield from _infos(files, info["name"], depth and depth - 1, fresh)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[Path]:
    """Yield a local file to write in the block, which becomes `path` at the end, so that nobody
    sees it half written; its folder is made. A path that is not a regular file, such as
    /dev/stdout, is written directly. OSError if it fails."""
    if not is_url(path):
        if os.path.exists(path) and not os.path.isfile(path):
            yield Path(path)
            return
        with atomic.writing(Path(path), shared=True) as unfinished:
            yield unfinished
        return
    # Object stores have no rename: the whole file is made here and stored in one request.
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder) / posixpath.basename(path)
        yield unfinished
        size = unfinished.stat().st_size

        def put(files: Any, inside: str) -> None:
            if path.startswith("file://"):  # object stores have no folders, and would make a bucket
                os.makedirs(os.path.dirname(inside), exist_ok=True)
            files.put_file(str(unfinished), inside)
            # An upload may be cut without an error.
            if (stored := files.info(inside)["size"]) != size:
                raise Cut(f"{stored} bytes of {size} were stored")

        on_store(path, put)


def delete(folder: str, *patterns: str) -> None:
    """Delete the files and folders in a folder whose names match; none need exist. OSError if it
    fails."""

    def remove(files: Any, inside: str) -> None:
        for path in files.ls(inside, detail=False):
            name = posixpath.basename(path.rstrip("/"))
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                files.rm(path, recursive=True)

    with contextlib.suppress(FileNotFoundError):
        on_store(folder, remove)


def cache_folder() -> Path:
    """$MAXSTACK_CACHE, by default ~/.cache/maxstack."""
    return Path(os.environ.get("MAXSTACK_CACHE", "~/.cache/maxstack")).expanduser()


def state_folder() -> Path:
    """The folder maxstack in $XDG_STATE_HOME, by default ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "maxstack"
