"""What every worker process does first: leave interrupts to the main process, and never outlive it; its stacks can be seen."""

import os
import signal
import threading
from multiprocessing import parent_process

from maxstack import stacks

_GRACE_SECONDS = 30


def settle(worker: int = 0, workers: int = 1) -> None:
    """Call in a worker as it starts.

    A terminal or a scheduler signals the whole process group; the main process may still want batches while it saves, so an interrupt is ignored
    and a request to end is granted after 30 seconds. If the main process is killed, the worker ends at once.
    """
    stacks.show()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
