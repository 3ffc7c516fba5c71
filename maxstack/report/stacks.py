"""Stacks on demand: on SIGUSR2, a process appends the stacks of all its threads to a file that the
processes of a run share."""

import faulthandler
import os
import signal
import tempfile
from pathlib import Path

FILE = "MAXSTACK_STACKS"
"""Environment variable that passes the file to child processes."""


def new_file() -> Path:
    """Create an empty file for this process and its children."""
    handle, path = tempfile.mkstemp(prefix="maxstack-stacks-")
    os.close(handle)
    os.environ[FILE] = path
    return Path(path)


def show() -> None:
    """Register the signal handler if there is a file."""
    if os.path.exists(os.environ.get(FILE, "")):
        # faulthandler runs in C without the interpreter, so it works in a process that hangs in C++
        # or holds the GIL.
        faulthandler.register(
            signal.SIGUSR2,
            # O_APPEND: several processes write to this file at once.
            file=os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND),
            all_threads=True,
        )
