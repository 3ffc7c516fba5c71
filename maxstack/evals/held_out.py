"""Evaluation in training: loss and bits per byte on held-out documents.

Each source has a feed of its own, which is put back to its start for every evaluation. Batches give
sums (of losses, weights, bytes and the objective's metrics), which are added over batches and
sources and divided once at the end."""

import collections
import contextlib
import math
import sys
import time
from typing import Any

from maxstack.config.own_kinds import is_own
from maxstack.data.feed import Feed
from maxstack.data.sources import check_classes, open_sources
from maxstack.errors import DataError
from maxstack.faults import preemption
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run
from maxstack.state import Tree


class Evaluator:
    """Computes the loss on held-out documents, read from the start at each call, so that every
    evaluation of a run is over the same tokens."""

    def __init__(self, run: Run, log: Log, writer: Writer, frozen: tuple[dict[str, Any], ...] = ()):
        """`frozen`: arguments of the step beside state and batch."""
        cfg = run.cfg
        self._run, self._frozen = run, frozen
        self._log, self._writer = log, writer
        self._data = cfg.eval.data or cfg.data
        self._batch_size = cfg.eval.batch_size or cfg.train.batch_size
        whole = cfg.eval.data is not None
        # One feed for each source, so that each has a loss of its own; the total adds their sums.
        self._feeds = {
            name: Feed(
                data,
                run.batches.rows(self._batch_size),
                self._batch_size,
                evaluation=True,
                whole=whole,
                fields=run.objective.fields,
            )
            for name, data in self._data.one_by_one(whole).items()
        }
        sources = [source for feed in self._feeds.values() for source in feed.sources]
        if any(source.classes for source in sources):
            check_classes([*(open_sources(cfg.data) if cfg.eval.data else ()), *sources])
        # Every evaluation begins here, so that all are over the same tokens.
        self._starts = {name: feed.state() for name, feed in self._feeds.items()}
        self._bits: float | None = None

    def __call__(self, step: int, params: Tree) -> dict[str, float]:
        """Return the mean loss over at most eval.steps batches, in nats a token or a unit that the
        objective counts, and other metrics, after writing and logging them."""
        begin = time.perf_counter()
        sums = {name: self._sums(name, params) for name in self._feeds}
        total = collections.defaultdict[str, float](float)
        for own in sums.values():
            for key, value in own.items():
                total[key] += value
        by_source = {
            f"eval_loss/{name}": own["nll"] / own["weight"] for name, own in sums.items() if own
        }
        # Sums over sources and batches, divided once: a mean of means would count short batches
        # more.
        loss = total["nll"] / total["weight"]
        self._bits = total["nll"] / math.log(2) / total["bytes"] if total["bytes"] > 0 else None
        if is_own(self._run.cfg.objective.kind):  # whose loss may be more than a likelihood
            self._bits = None
        # Shards without sizes give NaN bytes rather than a wrong number.
        if math.isnan(total["bytes"]):
            self._log.warn(
                "no bits per byte: held-out token shards of an older version do not say how "
                "large their texts were; make them again with `maxstack data prepare`"
            )
        row: dict[str, Any] = {
            "eval_loss": loss,
            f"eval_{self._run.objective.unit}": int(total["weight"]),
            "eval_seconds": time.perf_counter() - begin,
        }
        if self._bits is not None:
            row["eval_bits_per_byte"] = self._bits
        weights = {name: total.get(f"{name}/weight") for name in total}
        shares = {name: total[name] / weight for name, weight in weights.items() if weight}
        row |= {f"eval_{name}": share for name, share in shares.items()}
        row |= by_source if len(by_source) > 1 else {}
        self._writer.write({"step": step, **row})
        bits = f", {self._bits:.4f} bits per byte" if self._bits is not None else ""
        more = "".join(f", {name} {share:.4f}" for name, share in shares.items())
        self._log.say(
            f"eval at step {step}: loss {loss:.4f}{bits}{more} over {int(total['weight']):,} "
            f"held-out {self._run.objective.unit}"
        )
        return row

    def _sums(self, name: str, params: Tree) -> dict[str, float]:
        """Return sums over at most eval.steps batches of one source."""
        feed, total = self._feeds[name], dict[str, float]()
        feed.restore(self._starts[name])
        with contextlib.closing(feed):
            # 0 is no limit: all held-out documents.
            for _ in range(self._run.cfg.eval.steps or sys.maxsize):
                # At each batch: an evaluation may take longer than the grace of a signal.
                preemption.raise_if_leaving()
                batch = self._run.batches.place(next(feed), self._batch_size)
                sums = self._run.eval_step(params, batch, *self._frozen)
                # After the last document batches are empty. The weight is a sum over all processes,
                # so all leave the loop together.
                if not float(sums["weight"]):
                    break
                for key, value in sums.items():
                    total[key] = total.get(key, 0.0) + float(value)
        for line in feed.skipped():
            self._log.warn(line)
        return total

    def compare(self) -> None:
        """Log what gzip -9 and an order-2 byte model reach on the same documents, beside the last
        evaluation."""
        from maxstack.evals.baselines import baselines

        cfg = self._run.cfg
        try:
            known = baselines(cfg.data, cfg.eval.data)
        except DataError as error:
            self._log.warn(f"no compressors beside this model's bits per byte: {error}")
            return
        ours = "not measured in bytes" if self._bits is None else f"{self._bits:.3f}"
        self._log.say(
            f"held-out bits per byte: this model {ours}, gzip -9 {known['gzip']:.3f}, "
            f"order-2 bytes {known['order2']:.3f}"
        )
