"""What a run says, on the console."""

import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from maxstack.report.append import Appender


class Log:
    """log.txt and the console: a live line on a terminal, plain lines elsewhere. Other processes
    than the first write nothing."""

    def __init__(self, folder: Path, steps: int, first: bool, seconds: float = 10.0):
        self._file = Appender(folder / "log.txt") if first else None
        self._steps, self._seconds, self._last = steps, seconds, -math.inf
        self._out: TextIO | None = sys.stdout if first else None
        self._live = False

    def say(self, text: str) -> None:
        """A line for the console and the log."""
        self._clear()
        if self._out:
            print(text, file=self._out, flush=True)
        if self._file:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.add("".join(f"{stamp} {line}\n" for line in text.splitlines()))

    def warn(self, text: str) -> None:
        """As `say`; other processes than the first tell it too, on stderr."""
        if self._out is None:
            print(text, file=sys.stderr, flush=True)
        self.say(text)

    def step(self, row: dict[str, Any], left: float) -> None:
        """One step's metrics: replaces the live line on a terminal; elsewhere a line at most every
        few seconds, and the first and the last."""
        if not self._out:
            return
        number, now = row["step"], time.monotonic()
        mfu = f"  mfu {row['mfu']:.1%}" if "mfu" in row else ""
        wait = f"  data wait {row['data_wait']:.0%}" if row["data_wait"] >= 0.005 else ""
        text = (
            f"step {number}/{self._steps} {number / self._steps:4.0%}  loss "
            f"{row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
            f"{mfu}{wait}  {_clock(left)} left"
        )
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
            self._live = True
        if now - self._last >= self._seconds or number in (1, self._steps):
            self._last = now
            if not self._out.isatty():
                print(text, file=self._out, flush=True)
            if self._file:
                self._file.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def ended(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep in log.txt what ended the run, as the end of a context; the console has it from
        elsewhere."""
        self._clear()
        if error is not None and self._file:
            self._file.add(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} ended by "
                f"{kind.__name__ if kind else ''}: {error}\n"
            )

    def close(self) -> None:
        """End the live line."""
        self._clear()

    def _clear(self) -> None:
        if self._live and self._out:
            self._out.write("\n")
            self._live = False


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
