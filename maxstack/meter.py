"""True step times without stalling the device: each step's numbers are read while the next one
runs."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxstack.data.feed import Feed
from maxstack.faults.policy import NOT_FINITE, Policy, Rewind
from maxstack.faults.stragglers import Lag
from maxstack.hardware.chips import peak_flops
from maxstack.models.flops import flops_per_token
from maxstack.report.ledger import Ledger
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run


class Meter:
    """Turns device scalars into rows of metrics.jsonl. A step's time ends when its results are
    ready, which a thread waits for, and begins where the one before ended."""

    def __init__(
        self, run: Run, feed: Feed, log: Log, writer: Writer, ledger: Ledger, policy: Policy
    ):
        cfg = run.cfg
        self._feed, self._log, self._writer, self._ledger, self._policy, self._steps = (
            feed,
            log,
            writer,
            ledger,
            policy,
            cfg.train.steps,
        )
        self._tokens = cfg.train.batch_size * cfg.data.seq_len
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._mfu = (
            flops_per_token(cfg.model, cfg.data.seq_len, run.weights.adapters)
            / (peak * run.mesh.size)
            if peak
            else None
        )
        self._pending: tuple[int, dict[str, jax.Array], float, float, Future[float]] | None = None
        self._watch = ThreadPoolExecutor(1, "meter")
        self._ready = self._waited = 0.0
        self._busy, self._count = 0.0, 0
        self._lag = Lag(0, 0.0, 0.0, 0.0)

    def restart(self) -> None:
        """The next step's time begins now."""
        self._ready, self._waited = time.perf_counter(), self._feed.waited

    def add(self, step: int, scalars: dict[str, jax.Array]) -> Rewind | None:
        """Note a step that was just dispatched, and report the one before it, as `flush` does."""
        dispatched, ready = time.perf_counter(), self._watch.submit(_ready, scalars)
        rewind = self.flush()
        self._pending = step, scalars, self._feed.waited, dispatched, ready
        return rewind

    def passed_over(self, step: int) -> Rewind | None:
        """Report the step before, and note one whose batch was not trained on."""
        rewind = self.flush()
        self._writer.write({"step": step, "passed_over": 1})
        self._ledger.passed_over(step)
        self.restart()
        return rewind

    def drop(self) -> None:
        """Forget the step noted last: the run goes back before it."""
        self._pending = None
        self.lag()

    def flush(self) -> Rewind | None:
        """Wait for the step noted last and report it -> what the policy for faults makes of it.
        ConfigError where that ends the run."""
        if self._pending is None:
            return None
        (step, scalars, waited, dispatched, ready), self._pending = self._pending, None
        now = ready.result()
        values = {name: float(value) for name, value in jax.device_get(scalars).items()}
        late = min(max(0.0, dispatched - self._ready), now - self._ready)
        starved = max(0.0, min(waited - self._waited, late))
        seconds, self._ready = now - self._ready, now
        row: dict[str, Any] = {"step": step, "loss": values.pop("loss")} | {
            k: v for k, v in values.items() if k != "weight"
        }
        row |= {
            "tokens": step * self._tokens,
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds,
        }
        if self._mfu:
            row["mfu"] = self._mfu * row["tokens_per_second"]
        row["data_wait"] = starved / seconds
        self._waited = waited
        self._busy, self._count = self._busy + seconds, self._count + 1
        self._lag = Lag(
            self._lag.steps + 1,
            self._lag.seconds + seconds,
            self._lag.late + late,
            self._lag.starved + starved,
        )
        self._ledger.step(step, seconds, starved, counts=not values["skipped"])
        self._writer.write(row)
        if (share := self._ledger.news()) is not None:
            self._writer.write({"step": step, "goodput": share})
        self._log.step(row, (self._steps - step) * self._busy / self._count)
        if row["skipped"]:
            self._log.say(
                f"step {step}: loss {row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}: "
                f"{'not finite' if row['skipped'] == NOT_FINITE else 'a spike'}; the "
                "update was refused"
            )
        return self._policy.read(row)

    def lag(self) -> Lag:
        """How this process kept up with its devices in the steps since the last call."""
        lag, self._lag = self._lag, Lag(0, 0.0, 0.0, 0.0)
        return lag

    def summary(self, finished: bool) -> None:
        """The last line: how many steps, how fast."""
        if self._count:
            rate = self._tokens * self._count / self._busy
            self._log.say(
                f"{'done' if finished else 'stopped, to be resumed by the same command'}: "
                f"{self._count} steps in {self._busy:.1f} s, {rate:,.0f} tokens/s on average"
            )


def _ready(scalars: dict[str, jax.Array]) -> float:
    jax.block_until_ready(scalars)
    return time.perf_counter()
