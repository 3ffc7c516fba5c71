"""Step times and throughput without stalling the devices.

The loop dispatches a step and then reads the numbers of the one before, so the devices always have
work. A step's time is the interval between two results, which a thread waits for: the time of
dispatch says nothing, as jax returns before the work is done. What a batch costs is the part of its
waiting in which the devices had nothing to do, since waiting mostly overlaps with the step before.
"""

import collections
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxstack.data.feed import BatchFeed
from maxstack.faults.stragglers import Lag
from maxstack.hardware.chips import peak_flops
from maxstack.optim.rounding import STILL
from maxstack.run import Run

PATIENCE = 20
"""Steps in a row before a warning that nothing is learned."""


class Meter:
    """Turns device scalars into rows of metrics.jsonl. A step's time ends when its results are
    ready, which a thread waits for, and begins where the one before ended."""

    def __init__(self, run: Run, feed: BatchFeed):
        cfg = run.cfg
        self._feed, self._steps = feed, cfg.train.steps
        self._stages = cfg.stages
        self._images = run.objective.unit == "images"
        self._run = run
        self._peak = run.mesh.size * (peak_flops(run.mesh.devices.flat[0].device_kind) or 0)
        self._pending: tuple[int, dict[str, jax.Array], float, float, Future[float]] | None = None
        # A thread notes when results are ready: the main thread may come later, after a wait for
        # data.
        self._thread = ThreadPoolExecutor(1, "meter")
        self._ready = self._waited = 0.0
        self._busy = 0.0
        self._count = self._rows = 0
        self._tokens = self._before = 0
        self._fed = collections.Counter[str]()
        self._lag = Lag(0, 0.0, 0.0, 0.0)
        self._still = collections.deque[float](maxlen=PATIENCE)
        self._rate = float("inf")
        self._told = False
        self._without_signal = 0

    def to_json(self) -> dict[str, int]:
        """What a checkpoint keeps: the tokens of all steps so far, without padding."""
        return {"tokens": self._tokens}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Go back to a step at which `to_json` returned `saved`."""
        # Older checkpoints lack the count of real tokens: then as many as the rows hold.
        self._tokens = saved.get("tokens", self._stages.tokens(step)) if step else 0
        self._before = self._tokens

    def restart(self) -> None:
        """Start timing the next step now."""
        # After a save or an evaluation the time since the last result belongs to that, not to a
        # step.
        self._ready, self._waited = time.perf_counter(), self._feed.waited

    def add(self, step: int, scalars: dict[str, Any]) -> dict[str, Any] | None:
        """Note a step that was just dispatched -> the row of the step before, as from `flush`."""
        dispatched, ready = time.perf_counter(), self._thread.submit(_ready, scalars)
        # Only now, after this step is dispatched, is there time to wait for the one before.
        row = self.flush()
        self._pending = step, scalars, self._feed.waited, dispatched, ready
        return row

    def drop(self) -> None:
        """Forget the step noted last: the run goes back to before it."""
        self._pending = None
        self.lag()

    def flush(self) -> dict[str, Any] | None:
        """Wait for the step noted last -> its row; None where none is pending."""
        if self._pending is None:
            return None
        step, scalars, waited, dispatched, ready = self._pending
        self._pending = None
        with jax.profiler.TraceAnnotation("wait for the step before"):
            now = ready.result()
        # One transfer for all scalars.
        values = {name: float(value) for name, value in jax.device_get(scalars).items()}
        for name in [name for name in values if f"{name}/weight" in values]:
            if not values.pop(f"{name}/weight"):
                del values[name]  # a mean over nothing is not 0
        fed = {name[4:]: int(value) for name, value in values.items() if name.startswith("fed/")}
        del values["weight"]
        # Seconds in which the devices had finished the step before and this one was not dispatched;
        # of them, those that went by waiting for a batch. All of the waiting would be 2.97 s where
        # 0.11 s were idle, in a measurement with a simulated device.
        late = min(max(0.0, dispatched - self._ready), now - self._ready)
        starved = max(0.0, min(waited - self._waited, late))
        seconds = now - self._ready
        self._ready, self._waited = now, waited
        row = {"step": step, "loss": values.pop("loss")} | values
        _, rows, length = self._stages.at(step)
        # Padding is no work: counted are the tokens that the feed says it gave.
        tokens = sum(fed.values()) if fed and not self._images else rows * length
        self._tokens += tokens
        row |= {
            "tokens": self._tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
        }
        if self._images:
            row["images_per_second"] = rows / seconds
        if self._peak:
            flops = self._run.flops_of(length)
            # MFU as in PaLM (arXiv:2204.02311, appendix B), over all positions of the rows: the
            # devices compute padding too.
            row["mfu"] = flops * rows * length / seconds / self._peak
        row["data_wait"] = starved / seconds
        if "rollout_wait" in row:
            row["update_seconds"] = max(0.0, seconds - row["rollout_wait"])
        self._busy, self._count = self._busy + seconds, self._count + 1
        self._rows += rows
        self._fed.update(fed)
        lag = self._lag
        self._lag = Lag(
            lag.steps + 1, lag.seconds + seconds, lag.late + late, lag.starved + starved
        )
        return row

    @property
    def begins(self) -> bool:
        """Whether no step has ended yet."""
        return not self._count

    def warnings(self, row: dict[str, Any]) -> Iterator[str]:
        """Warnings about a step's row, each given once."""
        self._without_signal = (
            self._without_signal + 1 if row.get("groups_without_signal") == 1.0 else 0
        )
        if self._without_signal == PATIENCE:
            yield (
                f"no group of samples had a signal in {PATIENCE} steps: all rewards of a group are "
                "equal, so nothing is learned; use rewards that tell answers apart, more "
                "rollout.samples, or a model that is sometimes right (model.from)"
            )
        rate, before = row.get("learning_rate", 0.0), self._rate
        self._rate = rate
        stochastic = self._run.cfg.optimizer.rounding == "stochastic"
        # While the rate still rises updates are small on purpose.
        warms_up = rate > before
        if STILL not in row or stochastic or self._told or warms_up or row["skipped"]:
            return
        self._still.append(row[STILL])
        share = sum(self._still) / len(self._still)
        if len(self._still) == PATIENCE and share >= 0.5:
            self._told = True
            yield (
                f"{share:.0%} of the weights in {self._run.cfg.model.param_dtype} did not change "
                f"in a step, on average over {PATIENCE}, because updates are smaller than their "
                "last bit: set optimizer.rounding=stochastic, model.param_dtype=float32 or a "
                "higher optimizer.learning_rate"
            )

    def lag(self) -> Lag:
        """Times of the steps since the last call, for the comparison of processes."""
        lag, self._lag = self._lag, Lag(0, 0.0, 0.0, 0.0)
        return lag

    def left(self, step: int) -> float:
        """Estimated seconds for the steps after `step`, at the mean speed so far."""
        return (self._steps - step) * self._busy / self._count

    def summary(self, finished: bool) -> str:
        """A line with the number and speed of all steps; "" where there were none."""
        if not self._count:
            return ""
        number, unit = (
            (self._rows, "images") if self._images else (self._tokens - self._before, "tokens")
        )
        shares = [f"{count / self._fed.total():.1%} {name}" for name, count in self._fed.items()]
        fed = f"; fed {', '.join(shares)}" if len(shares) > 1 else ""
        return (
            f"{'done' if finished else 'stopped; run the same command to resume'}: "
            f"{self._count} steps in {self._busy:.1f} s, {number / self._busy:,.0f} {unit}/s on "
            f"average{fed}"
        )


def _ready(scalars: dict[str, jax.Array]) -> float:
    jax.block_until_ready(scalars)
    return time.perf_counter()
