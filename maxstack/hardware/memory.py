"""Settings of glibc's allocator for a process that trains on one CPU device.

XLA allocates its temporaries anew in every step, and the kernel clears every page that it hands out
again: a tenth of a step with huge pages, a quarter with small ones (EXPERIMENTS.md). So `train`
restarts itself with huge pages, runs programs in its main thread, and keeps what that thread frees.
GLIBC_TUNABLES in the environment, even empty, disables all of it."""

import ctypes
import os
import sys
from pathlib import Path

from maxstack.hardware.devices import host_memory

_TUNABLES = "GLIBC_TUNABLES"
_HUGE = "glibc.malloc.hugetlb=1"
_MMAP_MAX = -4
_TRIM_THRESHOLD = -1
"""Parameters of mallopt, as malloc.h numbers them."""


def use_huge_pages() -> None:
    """Execute this program again with huge pages, in the same process, if Linux leaves that choice
    to programs."""
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    # glibc reads its tunables once, at the start of a process. mallopt from inside left the page
    # faults as they were; with huge pages 15 steps had 0.08 instead of 1.59 million.
    if _TUNABLES not in os.environ and choice.exists() and "[madvise]" in choice.read_text():
        os.execve(sys.executable, sys.orig_argv, os.environ | {_TUNABLES: _HUGE})


def run_in_this_thread() -> bool:
    """Run CPU programs in the thread that calls them, so that their temporaries belong to it;
    return whether this is so: under glibc, unless the environment configures its allocator. Call it
    before jax sees its devices."""
    chosen = os.environ.get(_TUNABLES, _HUGE) != _HUGE
    if chosen or not _is_glibc():
        return False
    import jax

    # glibc keeps memory by thread: what XLA's own threads free would not serve the next step.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def give_back() -> None:
    """Return free memory that glibc holds to the system."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed(temporaries: int) -> None:
    """Keep what the main thread frees for its next allocations. Large blocks of other threads still
    go back to the system, so `run_in_this_thread` must come before. Fragmentation may cost
    `temporaries`, in bytes, a second or third time, so nothing is kept if they exceed a sixteenth
    of the memory."""
    if 16 * temporaries <= (host_memory() or 0):
        libc = ctypes.CDLL(None)
        # What compiling left behind goes back first; from here on nothing would.
        libc.malloc_trim(0)
        # Large blocks would be mapped and unmapped at every step, and the kernel clears each page
        # anew.
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def _is_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ())
