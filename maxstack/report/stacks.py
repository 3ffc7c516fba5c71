"""Stacks on demand: SIGUSR2 makes a process append those of all its threads to a file that the
processes of a run share, whatever it is doing."""

import faulthandler
import os
import signal
import tempfile
from pathlib import Path

FILE = "MAXSTACK_STACKS"
"""In the environment, for the processes that this one starts: the file."""


def new_file() -> Path:
    """An empty file for this process and those that it starts."""
    handle, path = tempfile.mkstemp(prefix="maxstack-stacks-")
    os.close(handle)
    os.environ[FILE] = path
    return Path(path)


def show() -> None:
    """From now on a signal shows this process's stacks, if a file for them is known."""
    if hasattr(signal, "SIGUSR2") and os.path.exists(os.environ.get(FILE, "")):
        faulthandler.register(
            signal.SIGUSR2,
            file=os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND),
            all_threads=True,
        )
