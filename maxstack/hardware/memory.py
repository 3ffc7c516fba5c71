"""Memory of a process that trains on one CPU device, under glibc's allocator.

XLA takes its temporaries anew at every step, and the system clears each page that it gives again: a
tenth of a step in huge pages, a quarter in small ones (EXPERIMENTS.md). GLIBC_TUNABLES in the
environment, even empty, leaves the allocator as it is.
"""

import ctypes
import os
import sys
from pathlib import Path

from maxstack.hardware.devices import host_memory

_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""Parameters of mallopt, as malloc.h numbers them."""


def use_huge_pages() -> None:
    """Start over with the allocator in huge pages, where Linux leaves that choice to programs; the
    process stays the same one."""
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if _TUNABLES not in os.environ and choice.exists() and "[madvise]" in choice.read_text():
        os.execve(sys.executable, sys.orig_argv, os.environ | {_TUNABLES: _HUGE})


def run_in_this_thread() -> bool:
    """Let the thread that calls a program of the CPU run it, so that its temporaries are that
    thread's -> whether it does: under glibc, unless the environment has chosen for its allocator.
    To be called before jax sees its devices."""
    chosen = os.environ.get(_TUNABLES, _HUGE) != _HUGE
    if chosen or not _is_glibc():
        return False
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def give_back() -> None:
    """Return what is free to the system, where glibc holds it."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed(temporaries: int) -> None:
    """Keep what the main thread frees for what it takes next, from here on; large blocks of other
    threads still go back to the system, so `run_in_this_thread` comes before. Small blocks between
    may cost `temporaries`, in bytes, a second or third time, so nothing is kept where they are more
    than a sixteenth of the memory."""
    if 16 * temporaries <= (host_memory() or 0):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def _is_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ())
