"""Opening of regular files only: reading a pipe, a socket or a device may block or never end."""

import errno
import os
import stat
from typing import BinaryIO

from maxstack.errors import DataError


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. OSError if it cannot be opened, or is no regular file."""
    return open(path, "rb", opener=_opened)


def read_regular(path: str | os.PathLike[str], largest: int) -> bytes:
    """The bytes of a file. DataError if they are more than `largest`, OSError if it cannot be read,
    or is no regular file."""
    with open_regular(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise DataError(f"{path}: is larger than the limit of {largest:,} bytes")
    return data


def _opened(path: str, flags: int) -> int:
    number = os.open(path, flags | os.O_NONBLOCK)  # else a pipe waits for who writes to it
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return number
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "is a pipe, a socket or a device, and only files are read", path)
