"""How worker processes, of any kind, take signals."""

import os
import signal
import threading
from multiprocessing import parent_process

from maxstack.report import stacks

_GRACE_SECONDS = 30


def settle() -> None:
    """Set a worker's signals as it starts.

    A terminal or a scheduler signals the whole process group; the main process may still want
    batches while it saves, so a worker ignores an interrupt and ends 30 seconds after a request to
    end. If the main process is killed, the worker ends at once.
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
