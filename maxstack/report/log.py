"""Writes messages and progress of a run to the console and log.txt."""

import logging
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from maxstack.report.append import Appender


class _Warnings(logging.Handler):
    """Writes warnings of any part of the package, also from threads, to the log."""

    def __init__(self, log: "Log"):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warn(record.getMessage())


class Log:
    """Writes to log.txt and the console: a live line on a terminal, plain lines elsewhere.
    Processes other than the first write nothing."""

    def __init__(self, folder: Path, steps: int, first: bool, seconds: float = 10.0):
        self._file = Appender(folder / "log.txt") if first else None
        self._steps = steps
        self._seconds = seconds
        self._last = -math.inf
        self._out: TextIO | None = sys.stdout if first else None
        self._live = False
        self._warnings = _Warnings(self)
        # Parts of the package warn by `logging`, without knowing a run; the run's log shows them.
        logging.getLogger("maxstack").addHandler(self._warnings)

    def say(self, text: str) -> None:
        """Write lines to the console and the log."""
        self.close()
        if self._out:
            print(text, file=self._out, flush=True)
        self._note(text)

    def warn(self, text: str) -> None:
        """`say` from any process; those other than the first write to stderr."""
        if self._out is None:
            print(text, file=sys.stderr)
        self.say(text)

    def step(self, row: dict[str, Any], left: float) -> None:
        """Show a step's metrics and the seconds left: on a terminal in the live line, elsewhere in
        a line every few seconds and for the first and last step."""
        if not self._out:
            return
        number = row["step"]
        now = time.monotonic()
        mfu = f"  mfu {row['mfu']:.1%}" if "mfu" in row else ""
        wait = f"  data wait {row['data_wait']:.0%}" if row["data_wait"] >= 0.005 else ""
        shown = [name for name in ("reward", "accuracy") if name in row]
        figures = "".join(f"{name} {row[name]:.4g}  " for name in shown)
        rate = f"{row['tokens_per_second']:,.0f} tokens/s"
        if "images_per_second" in row:
            rate = f"{row['images_per_second']:,.0f} images/s"
        text = (
            f"step {number}/{self._steps} {number / self._steps:4.0%}  loss {row['loss']:.4f}  "
            f"{figures}{rate}{mfu}{wait}  {_clock(left)} left"
        )
        if self._out.isatty():
            # Back to the line's beginning, and clear it: the new text may be shorter.
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
            self._live = True
        if now - self._last >= self._seconds or number in (1, self._steps):
            self._last = now
            # On a terminal the live line shows it already; log.txt gets it in both cases.
            if not self._out.isatty():
                print(text, file=self._out, flush=True)
            self._note(text)

    def ended(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the error that ended the run to log.txt, as a context's exit; cli prints it."""
        self.close()
        logging.getLogger("maxstack").removeHandler(self._warnings)
        if error is not None:
            self._note(f"ended by {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the live line."""
        if self._live and self._out:
            self._out.write("\n")
            self._live = False

    def _note(self, text: str) -> None:
        """Add lines with the time to log.txt."""
        if self._file:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.add("".join(f"{stamp} {line}\n" for line in text.splitlines()))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
