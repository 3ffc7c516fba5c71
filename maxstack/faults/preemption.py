"""Preemption: a signal asks the run to save and leave."""

import os
import signal
from collections.abc import Callable
from types import FrameType

import jax

from maxstack.report.console import tell

INTERRUPTED = 130
"""The exit code after a second SIGINT."""


class Preemption:
    """SIGTERM or SIGINT asks the run to save and leave; a second SIGINT calls `before_leaving` and
    leaves at once.

    With several processes one signalled process is enough: jax's preemption service makes all of
    them agree on one step.
    """

    def __init__(self, before_leaving: Callable[[], None] = lambda: None) -> None:
        self._asked, self._before_leaving = False, before_leaving
        self._several = jax.process_count() > 1
        numbers = [signal.SIGINT] if self._several else [signal.SIGTERM, signal.SIGINT]
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def close(self) -> None:
        """Put back what the signals did before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def requested(self, step: int) -> bool:
        """True where to save after `step` and leave; the same in every process."""
        if self._several:
            from jax.experimental import multihost_utils

            reached = multihost_utils.reached_preemption_sync_point(step)
            if reached:
                tell(f"\nleaving after step {step}: a signal asked a process of the run to\n")
            return reached
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, self._leave)
        tell(f"\n{signal.Signals(number).name}: leaving after this step\n")
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Leave without an exception, which would wait for threads that may hold locks."""
        tell("\nSIGINT again: leaving at once; what was not saved before is lost\n")
        self._before_leaving()
        os._exit(INTERRUPTED)
