"""Batches of a run that learns from its own samples.

A rollout answers prompts with the current weights and rewards the answers; its samples become the
batches of the next `steps` steps (minibatches, epochs). With `rollout.ahead`, rollouts use the
weights of as many rollouts before: on one device the next one is made in a thread beside training,
on a mesh between steps, since all devices need the same order of programs.

A rollout is made again, not kept. Its samples depend on the weights before its first step (or
older ones), the seed and the place in the order of prompts, and on nothing else. A checkpoint holds
these: the state has the older weights that a rollout in progress or ahead was made with
(`State.behind`), and the position is that before the rollout. So a rollout that a kill
interrupted, or of which some steps are done, is made anew, bit for bit, on any mesh, and a save
need not wait for one. The price is memory, which `plan` counts; with adapters it is an adapter's.
"""

import concurrent.futures
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.cluster.peers import Peers
from maxstack.data.feed import BatchFeed
from maxstack.data.lanes import Batch
from maxstack.data.mixture import Mixture
from maxstack.data.prompts import Prompts
from maxstack.errors import ConfigError
from maxstack.report.append import Appender
from maxstack.rollouts import metrics
from maxstack.rollouts.maker import Maker
from maxstack.rollouts.sample import Group, make_rows
from maxstack.state import State, weights_at
from maxstack.step import combine

if TYPE_CHECKING:
    from maxstack.run import Run

FILE = "rollouts.jsonl"


class Rollout(NamedTuple):
    """The samples of some steps."""

    number: int
    batches: list[Batch]
    """One for each minibatch."""
    metrics: dict[str, float]
    before: np.ndarray
    """Positions of the lanes of prompts before it."""
    after: np.ndarray
    groups: list[Group]


class RolloutFeed(BatchFeed):
    """Iterates over batches of samples, as `data.feed.Feed` does over batches of documents."""

    def __init__(self, run: "Run", maker: Maker, folder: Path):
        """ConfigError where a process cannot hold the samples of a prompt."""
        cfg, rollout = run.cfg, run.cfg.rollout
        assert rollout
        self._run, self._maker = run, maker
        self._cfg = rollout
        size = cfg.train.batch_size
        self._rows = run.batches.rows(size)
        # A lane for each prompt of a minibatch, whose samples fill whole rows; or for each row,
        # which then holds the samples of several prompts.
        self._lanes = min(size, rollout.prompts // rollout.minibatches)
        self._rows_each = size // self._lanes
        # A process draws the prompts of its own rows; the samples of one prompt are made in one
        # place.
        held = sorted({row // self._rows_each for row in self._rows})
        if len(held) * self._rows_each != len(self._rows):
            raise ConfigError(
                f"train.batch_size={size}: a process holds {len(self._rows)} rows, and a prompt's "
                f"samples fill {self._rows_each}; give a multiple of both"
            )
        self._peers = Peers()
        self._held = held
        # No rollout is made ahead that no step would learn from.
        self._last = (cfg.train.steps - 1) // rollout.steps
        limit = maker.prompt_limit(cfg.data.seq_len)
        self._prompts = Prompts(cfg.data, self._lanes, held, *limit)
        self._first = jax.process_index() == 0
        self._file = Appender(folder / FILE)
        self.waited = 0.0
        self._reset(self._lane_positions())
        self._told: list[str] = []
        # On a mesh a thread would start programs of all devices in an order of its own.
        beside = rollout.ahead and run.mesh.size == 1
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollouts") if beside else None

    def _reset(self, position: np.ndarray) -> None:
        self._position = position
        self._futures: dict[int, concurrent.futures.Future[Rollout]] = {}
        self._current: Rollout | None = None
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._stop = threading.Event()

    def __iter__(self) -> "RolloutFeed":
        return self

    def __next__(self) -> Batch:
        """Return the batch of the next step, after `refresh`."""
        assert self._current and self._step is not None, "refresh comes first"
        inside = self._step % self._cfg.steps
        self._step += 1
        self._metrics = {} if inside else self._current.metrics
        ended = inside == self._cfg.steps - 1
        # A rollout of which some steps are done is made again from before it, so its prompts are
        # drawn again.
        self._position = self._current.after if ended else self._current.before
        return self._current.batches[inside % self._cfg.minibatches]

    def refresh(self, state: State, frozen: Sequence[Any] = ()) -> None:
        """Make what the next step needs and begin what later ones do; `state` is that before the
        step, `frozen` its further inputs."""
        # Read from the devices once: reading it each time would wait for the update before.
        if self._step is None:
            self._step = int(state.step)
        number, inside = divmod(self._step, self._cfg.steps)
        if self._current and self._current.number == number:
            return
        if not self._thread:
            jax.block_until_ready(state.step)  # or the last update would count as rollout time
        began = time.perf_counter()
        # Rollouts under way have drawn their prompts already, in order.
        if not self._futures:
            self._prompts.restore(self._position[:: self._rows_each])
        ahead = range(number, min(number + self._cfg.ahead, self._last) + 1)
        for later in ahead:
            if later not in self._futures:
                self._begin(later, state)
        self._current = self._futures.pop(number).result()
        waited = time.perf_counter() - began
        # Counted as waiting for data: in a thread all of it, else only the rewards, since the
        # devices work while they sample.
        self.waited += waited if self._thread else self._current.metrics["reward_seconds"]
        if not inside:
            self._current.metrics["rollout_wait"] = waited
            self._report(self._current)
        if self._run.objective.annotations:
            self._annotate(self._current, self._weights(state, number), frozen)

    def _weights(self, state: State, number: int) -> Any:
        """Return all weights of the model from before the first step of a rollout."""
        assert self._step is not None
        # Rollouts before the first one have the weights with which the run began.
        older = weights_at(state, self._step, max(number, 0), self._cfg.steps)
        return state.params if older is None else combine(older, state.params)

    def _begin(self, number: int, state: State) -> None:
        """Begin a rollout, in the thread where there is one; else make it at once."""
        weights = self._weights(state, number - self._cfg.ahead)
        if self._thread:
            weights = jax.tree.map(jnp.copy, weights)  # the step donates the others
            future = self._thread.submit(self._make, number, weights, self._stop)
        else:
            future = concurrent.futures.Future()
            future.set_result(self._make(number, weights, self._stop))
        self._futures[number] = future

    def _make(self, number: int, weights: Any, stop: threading.Event) -> Rollout:
        cfg, lanes = self._cfg, self._held
        began = time.perf_counter()
        each = cfg.prompts // self._lanes
        before = self._lane_positions()
        with self._maker.using(weights, lambda: not stop.is_set()):
            by_lane = self._maker.groups(number, lanes, each, self._prompts.next)
            drawn, waited = self._maker.drawn, self._maker.reward_seconds
        after = self._lane_positions()
        batches: list[Batch] = []
        shape = self._rows_each, self._run.cfg.data.seq_len
        share = each // cfg.minibatches
        for minibatch in range(cfg.minibatches):
            # Whole groups go to a minibatch: an advantage is relative to the other samples of its
            # prompt.
            own = slice(minibatch * share, (minibatch + 1) * share)
            parts = [make_rows(by_lane[lane][own], 1 + lane * share, shape, cfg) for lane in lanes]
            batches.append(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts))
        groups = [group for lane in lanes for group in by_lane[lane]]
        # Through the coordination service, which a thread beside training may use.
        sums = self._peers.exchange("rollouts", metrics.sum_groups(groups, drawn, waited))
        computed = metrics.compute(metrics.merge(sums))
        computed["staleness"] = float(cfg.steps * min(number, cfg.ahead))
        computed["rollout_seconds"] = time.perf_counter() - began
        return Rollout(number, batches, computed, before, after, groups)

    def _lane_positions(self) -> np.ndarray:
        """Return the position of each row's lane of prompts."""
        return np.repeat(self._prompts.state(), self._rows_each, axis=0)

    def _annotate(self, rollout: Rollout, weights: Any, frozen: Sequence[Any]) -> None:
        """Add the log-probabilities of samples by the weights before the rollout's first step."""
        run, size = self._run, self._run.cfg.train.batch_size
        for batch in rollout.batches:
            added = run.annotate(weights, run.batches.place(batch, size), *frozen)
            for name, array in added.items():
                # Whole on every device; this process keeps the rows that it gives to the next
                # steps.
                batch[name] = np.asarray(array)[self._rows]

    def _report(self, rollout: Rollout) -> None:
        cfg = self._cfg
        if not self._first:
            return
        if cfg.record:
            step = rollout.number * cfg.steps + 1
            self._file.add(metrics.records(rollout.number, step, rollout.groups, cfg.record))
        if "reward" not in rollout.metrics:
            self._told.append(
                f"rollout {rollout.number}: every sample was dropped, since a reward failed for "
                "each, so nothing was learned; rollouts.jsonl has the reasons"
            )
        if cfg.show and rollout.number % cfg.show == 0:
            self._told.append(metrics.describe_first(rollout.number, rollout.groups))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a rollout after its first batch; else none."""
        return self._metrics

    def state(self) -> np.ndarray:
        """Return positions of the lanes of prompts before the rollout of the next step, int64
        [rows, K]."""
        return self._position.copy()

    def restore(self, state: np.ndarray) -> None:
        """Go on after the step that `state` was taken at."""
        # A rollout under way has drawn prompts of the history that is given up.
        self.close()
        self._reset(np.array(state, np.int64))

    def skipped(self) -> list[str]:
        """Return lines about skipped prompts, failed rewards, and a sample now and then."""
        told, self._told = self._told, []
        return told + self._prompts.skipped() + self._maker.news()

    def describe(self) -> list[str]:
        """Return lines about the prompts and the rollouts."""
        cfg, mixture = self._cfg, self.mixture
        lines = [f"{source.name}: {len(source)} prompts" for source in mixture.sources]
        lines.append(
            f"rollouts of {cfg.prompts} prompts x {cfg.samples} samples, {cfg.steps} steps per "
            f"rollout, at most {cfg.max_tokens} tokens an answer; the engine's programs are "
            "compiled with the first"
        )
        if not self._maker.generator.stops:
            lines.append(
                "no token ends an answer (data.tokenizer.eos): each has rollout.max_tokens"
            )
        moved = self._maker.generator.moved
        if moved:
            lines.append(
                f"rollout.tensor: {moved / 2**20:,.1f} MiB of weights move to the engine's "
                "devices for each rollout"
            )
        if cfg.ahead and not self._thread:
            lines.append(
                "rollout.ahead: on a mesh of several devices rollouts are made between steps, but "
                "also with older weights"
            )
        return lines

    @property
    def mixture(self) -> Mixture:  # type: ignore[override]
        """The mixture of prompts."""
        return self._prompts.mixture

    def start(self) -> None:
        """Do nothing: rollouts begin with the first `refresh`."""

    def close(self) -> None:
        """End rollouts under way. The feed may be used again."""
        self._stop.set()
        for future in self._futures.values():
            if not future.cancel():
                concurrent.futures.wait([future])
        self._futures.clear()
