"""The processes that descend from a worker, found and ended. What is of Linux alone (adoption of
orphans, /proc) does nothing on other systems."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PR_SET_DUMPABLE, _JOIN_SESSION_KEYRING = 4, 1
_KEYCTL = {"x86_64": 250, "aarch64": 219}
"""The number of a system call that C's library has no function for, by the machine."""
_PAUSE = 0.001
_LINUX = sys.platform == "linux"


class Process(NamedTuple):
    """A process, told apart from a later one of the same number."""

    pid: int
    started: str


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, instead of process 1."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def seal() -> None:
    """Keep other programs of the same user from memory and descriptors of this process and of its
    forks (no /proc/PID/mem, /proc/PID/fd, ptrace, pidfd_getfd), and these from the session's keys.
    OSError where the first cannot be."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    if call := _KEYCTL.get(os.uname().machine):
        library.syscall(call, _JOIN_SESSION_KEYRING, None)  # fails where the kernel has no keys


def end_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent, whose number was `parent`, ends."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def descendants(spared: Collection[Process] = ()) -> list[Process]:
    """Living descendants of this process, parents first, without those that are spared and their
    descendants."""
    found, parents = [], [os.getpid()]
    while parents:
        for pid in _children(parents.pop()):
            process = _living(pid)
            if process and process not in spared:
                found.append(process)
                parents.append(pid)
    return found


def kill(processes: Collection[Process]) -> None:
    """SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def kill_all(seconds: float) -> None:
    """Kill and reap the descendants until none is left, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        kill(descendants())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE)


def namespace() -> str:
    """A name of the namespace of this process's number; "" where there are none."""
    return os.readlink("/proc/self/ns/pid") if _LINUX else ""


def private_memory() -> dict[int, int]:
    """Bytes of memory that is no file's and not shared, by the number of each process that this
    one sees."""
    found = dict[int, int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            _, resident, shared = Path(f"/proc/{name}/statm").read_bytes().split()[:3]
            found[int(name)] = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return found


def _children(pid: int) -> list[int]:
    """Children of all threads of a process, from the kernel's lists, or where it keeps none
    (CONFIG_PROC_CHILDREN) by asking every process for its parent."""
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [number for number in numbers if (_stat(number) or [b"", b""])[1] == b"%d" % pid]
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_bytes().split())
    return found


def _living(pid: int) -> Process | None:
    fields = _stat(pid)
    return None if fields is None or fields[0] in b"ZX" else Process(pid, fields[19].decode())


def _stat(pid: int) -> list[bytes] | None:
    """A process's state, parent and so on, what follows its name in /proc/PID/stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat[stat.rindex(b")") + 2 :].split()
