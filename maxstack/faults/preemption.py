"""Preemption: a signal asks the run to save and leave."""

import os
import signal
import sys
from types import FrameType

import jax


class Preemption:
    """SIGTERM or SIGINT asks the run to save and leave; a second SIGINT leaves at once.

    With several processes one signalled process is enough: jax's preemption service makes all of them agree on one step.
    """

    def __init__(self) -> None:
        self._asked = False
        self._several = jax.process_count() > 1
        if not self._several:
            signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def requested(self, step: int) -> bool:
        """Whether to save after `step` and leave; the same in every process."""
        if self._several:
            from jax.experimental import multihost_utils
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(sys.stderr.fileno(), f"\n{signal.Signals(number).name}: leaving after this step\n".encode())
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
