"""Batches of samples: prompts, answers by the current weights, rewards, rows."""

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
from maxstack.rollouts.figures import figures, line, records, sums, together
from maxstack.rollouts.maker import Maker
from maxstack.rollouts.sample import Group, rows_of
from maxstack.state import State, weights_at
from maxstack.step import combine

if TYPE_CHECKING:
    from maxstack.run import Run

FILE = "rollouts.jsonl"


class Rollout(NamedTuple):
    """The samples of some steps."""

    number: int
    batches: list[Batch]
    """By minibatch."""
    metrics: dict[str, float]
    before: np.ndarray
    """Where the lanes of prompts stood before it, and after."""
    after: np.ndarray
    groups: list[Group]


class RolloutFeed(BatchFeed):
    """Iterates over the batches of a run that learns from its own samples, as `data.feed.Feed` does
    over those of documents.

    What a rollout holds depends on the weights before its first step (or, with rollout.ahead, on
    older ones), on the seed and on the place in the order of prompts, and on nothing else; so a
    rollout that a kill interrupted, or of which some steps are done, is made again from a
    checkpoint, whose state has these weights.
    """

    def __init__(self, run: "Run", maker: Maker, folder: Path):
        """`maker` answers and rewards. ConfigError where a process cannot hold the samples of a
        prompt."""
        cfg, rollout = run.cfg, run.cfg.rollout
        assert rollout
        self._run, self._cfg, self._maker = run, rollout, maker
        self._rows, size = run.batches.rows(cfg.train.batch_size), cfg.train.batch_size
        self._lanes = min(size, rollout.prompts // rollout.minibatches)
        self._rows_each = size // self._lanes
        held = sorted({row // self._rows_each for row in self._rows})
        if len(held) * self._rows_each != len(self._rows):
            raise ConfigError(
                f"train.batch_size={size}: a process holds {len(self._rows)} rows, and a prompt's "
                f"samples fill {self._rows_each}; give a multiple of both"
            )
        self._peers = Peers()
        self._held, self._last = held, (cfg.train.steps - 1) // rollout.steps
        room = maker.generator.room - rollout.max_tokens
        self._prompts = Prompts(
            cfg.data,
            self._lanes,
            held,
            room,
            f"data.seq_len={cfg.data.seq_len} with rollout.max_tokens={rollout.max_tokens} "
            f"allows ({room} tokens; more with another data.seq_len or train.batch_size)",
        )
        self._first = jax.process_index() == 0
        self._file = Appender(folder / FILE)
        self.waited = 0.0
        self._reset(np.repeat(self._prompts.state(), self._rows_each, axis=0))
        self._told: list[str] = []
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
        """The batch of the next step, after `refresh`."""
        assert self._current and self._step is not None, "refresh comes first"
        inside = self._step % self._cfg.steps
        self._step += 1
        self._metrics = {} if inside else self._current.metrics
        ended = inside == self._cfg.steps - 1
        self._position = self._current.after if ended else self._current.before
        return self._current.batches[inside % self._cfg.minibatches]

    def refresh(self, state: State, frozen: Sequence[Any] = ()) -> None:
        """Make what the next step needs, and begin what later ones do; `state` is that before the
        step, `frozen` what it takes beside state and batch."""
        if self._step is None:
            self._step = int(state.step)
        number, inside = divmod(self._step, self._cfg.steps)
        if self._current and self._current.number == number:
            return
        if not self._thread:
            jax.block_until_ready(state.step)  # the last update's time is no rollout's
        began = time.perf_counter()
        if not self._futures:
            self._prompts.restore(self._position[:: self._rows_each])
        ahead = range(number, min(number + self._cfg.ahead, self._last) + 1)
        for later in ahead:
            if later not in self._futures:
                self._begin(later, state)
        self._current = self._futures.pop(number).result()
        waited = time.perf_counter() - began
        self.waited += waited if self._thread else self._current.metrics["reward_seconds"]
        if not inside:
            self._current.metrics["rollout_wait"] = waited
            self._report(self._current)
        if self._run.objective.annotations:
            self._annotate(self._current, self._weights(state, number), frozen)

    def _weights(self, state: State, number: int) -> Any:
        """All weights of the model as they were before the first step of a rollout."""
        assert self._step is not None
        older = weights_at(state, self._step, max(number, 0), self._cfg.steps)
        return state.params if older is None else combine(older, state.params)

    def _begin(self, number: int, state: State) -> None:
        """Begin a rollout, in a thread of its own where it may go on beside training; a mesh of
        several devices needs the same order of programs on all, so there it is made at once."""
        weights = self._weights(state, number - self._cfg.ahead)
        if self._thread:
            weights = jax.tree.map(jnp.copy, weights)  # the step takes the others
            made = self._thread.submit(self._made, number, weights, self._stop)
        else:
            made = concurrent.futures.Future()
            made.set_result(self._made(number, weights, self._stop))
        self._futures[number] = made

    def _made(self, number: int, weights: Any, stop: threading.Event) -> Rollout:
        cfg, lanes, began = self._cfg, self._held, time.perf_counter()
        each = cfg.prompts // self._lanes
        before = np.repeat(self._prompts.state(), self._rows_each, axis=0)
        with self._maker.by(weights, lambda: not stop.is_set()):
            by_lane = self._maker.groups(number, lanes, each, self._prompts.next)
            drawn, waited = self._maker.drawn, self._maker.reward_seconds
        after = np.repeat(self._prompts.state(), self._rows_each, axis=0)
        batches, share = [], each // cfg.minibatches
        for minibatch in range(cfg.minibatches):
            own = slice(minibatch * share, (minibatch + 1) * share)
            parts = [
                rows_of(by_lane[lane][own], 1 + lane * share, self._rows_each, self._run.cfg)
                for lane in lanes
            ]
            batches.append(
                {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            )
        groups = [group for lane in lanes for group in by_lane[lane]]
        made = figures(together(self._peers.exchange("rollouts", sums(groups, drawn, waited))))
        made["staleness"] = float(cfg.steps * min(number, cfg.ahead))
        made["rollout_seconds"] = time.perf_counter() - began
        return Rollout(number, batches, made, before, after, groups)

    def _annotate(self, rollout: Rollout, weights: Any, frozen: Sequence[Any]) -> None:
        """Add what the weights before the rollout's first step say of its samples."""
        run, size = self._run, self._run.cfg.train.batch_size
        for batch in rollout.batches:
            made = run.annotate(weights, run.batches.place(batch, size), *frozen)
            for name, array in made.items():
                batch[name] = np.asarray(array)[self._rows]

    def _report(self, rollout: Rollout) -> None:
        cfg = self._cfg
        if not self._first:
            return
        if cfg.record:
            step = rollout.number * cfg.steps + 1
            self._file.add(records(rollout.number, step, rollout.groups, cfg.record))
        if "reward" not in rollout.metrics:
            self._told.append(
                f"rollout {rollout.number}: no sample counts, since a reward failed for each, so "
                "nothing was learned from it; rollouts.jsonl has the reasons"
            )
        if cfg.show and rollout.number % cfg.show == 0:
            self._told.append(line(rollout.number, rollout.groups))

    def metrics(self) -> dict[str, float]:
        """Figures of the rollout whose first batch next() gave last; else none."""
        return self._metrics

    def state(self) -> np.ndarray:
        """int64 [rows, K]: where the lanes of prompts stood before the rollout that the next step
        learns from."""
        return self._position.copy()

    def restore(self, state: np.ndarray) -> None:
        """Go on with the step after that which `state` was taken after."""
        self.close()
        self._reset(np.array(state, np.int64))

    def damaged(self) -> list[str]:
        """Lines about prompts passed over, rewards that failed, and a sample now and then."""
        told, self._told = self._told, []
        return told + self._prompts.damaged() + self._maker.news()

    def describe(self) -> list[str]:
        """Lines about the prompts and the rollouts."""
        cfg, mixture = self._cfg, self.mixture
        lines = [f"{source.name}: {len(source)} prompts" for source in mixture.sources]
        lines.append(
            f"rollouts of {cfg.prompts} prompts x {cfg.samples} samples, {cfg.steps} "
            f"step{'s' * (cfg.steps > 1)} each, at most {cfg.max_tokens} tokens an answer; the "
            "engine's programs are compiled with the first"
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
                "rollout.ahead: on a mesh of several devices rollouts are made between steps, by "
                "older weights all the same"
            )
        return lines

    @property
    def mixture(self) -> Mixture:  # type: ignore[override]
        """The mixture of prompts."""
        return self._prompts.mixture

    def start(self) -> None:
        """Rollouts begin with the first `refresh`."""

    def close(self) -> None:
        """End rollouts that are under way. The feed may be used again."""
        self._stop.set()
        for future in self._futures.values():
            if not future.cancel():
                concurrent.futures.wait([future])
        self._futures.clear()
