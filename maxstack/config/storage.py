"""Files by path or URL (gs://, s3://, memory://, ...): what has `://` goes through fsspec, which is
imported then, and anything else through the operating system."""

import contextlib
import errno
import fnmatch
import hashlib
import os
import posixpath
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from maxstack.config import atomic
from maxstack.errors import ConfigError, shortened

_VERSIONS = "etag", "ETag", "mtime", "LastModified", "created"
"""Keys by which stores tell that a file was written again, best first."""


def is_url(path: object) -> bool:
    return "://" in str(path)


def join(folder: str, name: str) -> str:
    """The path of `name` in a folder, if it is relative; `..` is resolved in URLs, since object
    stores do not."""
    name = os.path.expanduser(name)
    if not is_url(folder) or is_url(name) or os.path.isabs(name):
        return name if is_url(name) else os.path.join(folder, name)
    scheme, _, inside = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(inside, name))}"


@contextlib.contextmanager
def filesystem(path: str) -> Iterator[tuple[Any, str]]:
    """fsspec's file system for a path or URL, and the path in it.

    ConfigError where its driver is not installed. Any error of the driver in the block becomes an
    OSError with `strerror`.
    """
    import fsspec
    from fsspec.registry import known_implementations

    scheme = path.partition("://")[0]
    if is_url(path) and scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"{path}: no file system is called {shortened(scheme)}://; use gs://, s3://, another "
            "of fsspec's, or a local path"
        )
    try:
        yield fsspec.url_to_fs(path)
    except ConfigError:
        raise
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        reason = shortened(str(error.__cause__ or error))
        advice = "" if package == "fsspec" else f"; pip install {package}"
        raise ConfigError(
            f"{path}: what reads {scheme}:// cannot be imported: {reason}{advice}"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except Exception as error:  # each driver has errors of its own
        words = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        if isinstance(error, OSError) and type(error).__module__ == "builtins":
            words = error.strerror or words
        raise OSError(errno.EIO, words, path) from error


def open_file(path: str) -> IO[bytes]:
    """A file to read from at any position. OSError if it cannot be opened."""
    if not is_url(path):
        return open(path, "rb")
    with filesystem(path) as (files, inside):
        return files.open(inside, "rb")


def read(path: str, most: int = -1) -> bytes:
    """A file's bytes, at most so many from its beginning. OSError if it cannot be read."""
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read(most)
    with filesystem(path) as (files, inside), files.open(inside, "rb") as file:
        return file.read(most)


def kind(path: str) -> str | None:
    """file, directory, or None for neither. ConfigError if a store does not answer."""
    if not is_url(path):
        if os.path.isdir(path):
            return "directory"
        return "file" if os.path.exists(path) else None
    try:
        with filesystem(path) as (files, inside):
            return files.info(inside)["type"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def stamp(path: str) -> tuple[int, int | str]:
    """A file's size in bytes and its modification time in ns, or the store's name of its version.
    OSError if there is no such file."""
    if not is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    with filesystem(path) as (files, inside):
        info = files.info(inside)
    return info["size"], str(next((info[key] for key in _VERSIONS if info.get(key)), ""))


def names_below(folder: str, depth: int | None = None) -> list[str]:
    """The relative paths of all files in a folder at a URL and its subfolders, sorted; none where
    it does not exist. OSError if a store does not answer."""
    try:
        with filesystem(folder) as (files, inside):
            paths = files.find(inside, maxdepth=depth)
    except FileNotFoundError:
        return []
    return sorted(path.removeprefix(inside).lstrip("/") for path in paths)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[Path]:
    """A local file to write in the block, which becomes `path` at its end: nobody sees it half
    written. Its folder is made. What is no file, such as /dev/stdout, is written directly. OSError
    if that fails."""
    if not is_url(path):
        if os.path.exists(path) and not os.path.isfile(path):
            yield Path(path)
            return
        with atomic.writing(Path(path), shared=True) as unfinished:
            yield unfinished
        return
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder) / posixpath.basename(path)
        yield unfinished
        with filesystem(path) as (files, inside):
            if path.startswith("file://"):  # object stores have no folders, and would make a bucket
                os.makedirs(os.path.dirname(inside), exist_ok=True)
            files.put_file(str(unfinished), inside)


def cache_folder() -> Path:
    """$MAXSTACK_CACHE, by default ~/.cache/maxstack."""
    return Path(os.environ.get("MAXSTACK_CACHE", "~/.cache/maxstack")).expanduser()


def local_folder(path: str, patterns: Sequence[str] = ("*",), depth: int | None = None) -> Path:
    """A folder itself, or at a URL a copy in the cache of those of its files that match, made once
    and shared by all processes; it belongs to their versions. ConfigError if it cannot be made.

    `depth`: levels of the folder that are listed; None: all.
    """
    if not is_url(path):
        return Path(path).expanduser()
    try:
        names = names_below(path, depth)
        if not names:
            raise ConfigError(f"{path}: no such folder, or no file is in it")
        names = [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]
        versions = repr([path, *((name, stamp(join(path, name))) for name in names)])
        digest = hashlib.blake2b(versions.encode(), digest_size=16).hexdigest()
        folder = cache_folder() / "folders" / digest / posixpath.basename(path.rstrip("/"))
        for name in names:
            if not (folder / name).exists():
                with replacing(str(folder / name)) as copy, filesystem(path) as (files, inside):
                    files.get_file(f"{inside}/{name}", str(copy))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be copied to {cache_folder()}: {error.strerror or error}; set "
            "MAXSTACK_CACHE to a folder with room"
        ) from error
    return folder
