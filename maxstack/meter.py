"""True step times without stalling the device: each step's numbers are read while the next one runs."""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxstack.config import ConfigError
from maxstack.data.feed import Feed
from maxstack.metrics import Log, Writer, peak_flops
from maxstack.models.flops import flops_per_token
from maxstack.run import Run


class Meter:
    """Turns device scalars into rows of metrics.jsonl. A step's time ends when its results are ready, which a thread waits for, and begins where the
    one before ended."""

    def __init__(self, run: Run, feed: Feed, log: Log, writer: Writer):
        cfg = run.cfg
        self._feed, self._log, self._writer, self._steps = feed, log, writer, cfg.train.steps
        self._tokens = cfg.train.batch_size * cfg.data.seq_len
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._mfu = flops_per_token(cfg.model, cfg.data.seq_len) / (peak * run.mesh.size) if peak else None
        self._pending: tuple[int, dict[str, jax.Array], float, Future[float]] | None = None
        self._watch = ThreadPoolExecutor(1, "meter")
        self._ready = self._waited = 0.0
        self._busy, self._count = 0.0, 0

    def restart(self) -> None:
        """The next step's time begins now."""
        self._ready, self._waited = time.perf_counter(), self._feed.waited

    def add(self, step: int, scalars: dict[str, jax.Array]) -> None:
        """Note a step that was just dispatched, and report the one before it."""
        self.flush()
        self._pending = step, scalars, self._feed.waited, self._watch.submit(_ready, scalars)

    def flush(self) -> None:
        """Wait for the step noted last and report it; ConfigError if its loss or gradient is not finite."""
        if self._pending is None:
            return
        (step, scalars, waited, ready), self._pending = self._pending, None
        now = ready.result()
        values = {name: float(value) for name, value in jax.device_get(scalars).items()}
        seconds, self._ready = now - self._ready, now
        row: dict[str, Any] = {"step": step, "loss": values.pop("loss")} | {k: v for k, v in values.items() if k != "weight"}
        row |= {"tokens": step * self._tokens, "tokens_per_second": self._tokens / seconds, "step_seconds": seconds}
        if self._mfu:
            row["mfu"] = self._mfu * row["tokens_per_second"]
        row["data_wait"] = min(1.0, (waited - self._waited) / seconds)
        self._waited = waited
        self._busy, self._count = self._busy + seconds, self._count + 1
        self._writer.write(row)
        self._log.step(row, (self._steps - step) * self._busy / self._count)
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            raise ConfigError(f"step {step}: loss {row['loss']}, gradient norm {row['grad_norm']}: training has diverged, and nothing was saved "
                              "after it; lower optimizer.learning_rate or add clip_by_global_norm to optimizer.chain, then run again from the last "
                              "checkpoint")

    def summary(self, finished: bool) -> None:
        """The last line: how many steps, how fast."""
        if self._count:
            rate = self._tokens * self._count / self._busy
            self._log.say(f"{'done' if finished else 'stopped, to be resumed by the same command'}: "
                          f"{self._count} steps in {self._busy:.1f} s, {rate:,.0f} tokens/s on average")


def _ready(scalars: dict[str, jax.Array]) -> float:
    jax.block_until_ready(scalars)
    return time.perf_counter()
