"""Makes groups of samples: answers of an engine, turns of an environment, rewards.

Prompts are drawn by lane, each answered `rollout.samples` times, and each answer is rewarded in the
background as soon as it is complete. With rollout.drop_equal, groups whose rewards are all equal
are replaced by new draws. Random numbers belong to (seed, rollout, prompt, sample), so a group is
the same whichever process makes it, and however often.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.data.examples import Chats
from maxstack.errors import DataError
from maxstack.rewards.pool import Pool
from maxstack.rollouts.generator import Cancelled, Generator, seed_of
from maxstack.rollouts.sample import Group, Sample
from maxstack.rollouts.scores import Scores
from maxstack.rollouts.turns import Turns
from maxstack.schema.data import ChatRecord

if TYPE_CHECKING:
    from maxstack.data.prompts import Prompt
    from maxstack.run import Run

Draw = Callable[[int], "Prompt | None"]


class Maker:
    """Answers prompts with given weights, and rewards the answers."""

    def __init__(self, run: "Run", pool: Pool):
        """ConfigError where the engine, a reward or an environment cannot be made."""
        cfg = run.cfg.rollout
        assert cfg
        self._cfg = cfg
        self._seed = run.cfg.train.seed
        self.generator = Generator(run, cfg.prompts * cfg.samples)
        self._pool = pool
        self._scores = Scores(run, pool)
        self._turns = Turns(run, self.generator, pool) if cfg.environment else None
        self._wanted: Callable[[], bool] = lambda: True
        self.drawn = 0
        """Prompts of the last rollout, replaced ones among them."""
        self.reward_seconds = 0.0
        """Seconds that it waited for rewards once all samples were answered."""
        self._lock = threading.Lock()
        self._answers = Chats(ChatRecord(kind="chat"), run.cfg.data, {})
        self._news: list[str] = []
        self._told: set[str] = set()
        self._crowded = 0

    @contextlib.contextmanager
    def using(
        self,
        weights: Any,
        wanted: Callable[[], bool] = lambda: True,
        temperature: float | None = None,
    ) -> Iterator[None]:
        """Sample with these weights inside the context, in one thread at a time; `wanted` returns
        whether to go on."""
        # One engine serves the rollout thread and evaluations, with different weights.
        with self._lock:
            self._wanted = wanted
            self.drawn, self.reward_seconds = 0, 0.0
            if temperature is None:
                temperature = self._cfg.temperature
            self.generator.temperature = temperature
            self.generator.load(weights)
            try:
                yield
            finally:
                # The engine's copies are memory that the update needs.
                self.generator.load(None)
                self._scores.forget()

    def groups(
        self, number: int, lanes: Sequence[int], each: int, draw: Draw
    ) -> dict[int, list[Group]]:
        """Return `each` groups of a rollout by lane, of prompts that `draw` returns; with
        rollout.drop_equal, groups whose rewards are equal are replaced while draws are left."""
        cfg = self._cfg
        kept: dict[int, list[Group]] = {lane: [] for lane in lanes}
        spare: dict[int, list[Group]] = {lane: [] for lane in lanes}
        for _ in range(cfg.draws if cfg.drop_equal else 1):
            made = self._make(number, {lane: each - len(kept[lane]) for lane in lanes}, draw)
            for lane, groups in made.items():
                for group in groups:
                    # Equal rewards have advantages of 0 (DAPO's dynamic sampling, arXiv:2503.14476,
                    # section 3.2).
                    useless = cfg.drop_equal and group.has_no_signal
                    (spare if useless else kept)[lane].append(group)
            if all(len(groups) == each for groups in kept.values()):
                break
        missing = sum(each - len(groups) for groups in kept.values())
        if missing:
            self._news.append(
                f"rollout.drop_equal: after {cfg.draws} draws {missing} groups of rollout {number} "
                "still have equal rewards; they stay in the batch and teach nothing"
            )
        # The batch is filled all the same: its shape is the program's.
        return {lane: (groups + spare[lane])[:each] for lane, groups in kept.items()}

    def _make(self, number: int, counts: dict[int, int], draw: Draw) -> dict[int, list[Group]]:
        by_lane: dict[int, list[Group]] = {}
        for lane, count in counts.items():
            prompts = [draw(lane) for _ in range(count)]
            by_lane[lane] = [self._group(number, prompt) for prompt in prompts if prompt]
        groups = [group for made in by_lane.values() for group in made]
        self.drawn += len(groups)
        self.complete(f"rollout {number}", groups)
        # A control: rewards that say nothing of their answers must teach nothing.
        if self._cfg.permute:
            samples = [sample for group in groups for sample in group.samples]
            rewards = [sample.reward for sample in samples]
            random.Random(f"{self._seed} {number}").shuffle(rewards)
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = reward
        return by_lane

    def _group(self, number: int, prompt: "Prompt") -> Group:
        """Make a group of samples that are still to be answered, or, for the share of prompts that
        rollout.on_policy leaves, with the record's answer."""
        group = Group.of(prompt, self._cfg.samples)
        # By a hash of the prompt, so that the choice does not depend on lanes or processes.
        if seed_of(self._seed, "on policy", number, prompt.key) < self._cfg.on_policy * 2**64:
            return group
        try:
            (unit,) = self._answers.units(prompt.record, lambda attempt: prompt.record)
        except DataError as error:
            raise DataError(f"{prompt.where}: rollout.on_policy: {error}") from error
        (segment,) = unit.segments
        stops = self.generator.stops
        for sample in group.samples:
            sample.ids = segment.ids.tolist()
            sample.sampled = (segment.values["mask"] > 0).tolist()
            sample.logps = [0.0] * len(sample.ids)
            sample.from_record = sample.done = True
            sample.texts = [""]
            chosen = segment.ids[segment.values["mask"] > 0].tolist()
            begin = sample.sampled.index(True)
            self.generator.note_answer(
                sample, sample.ids[:begin], chosen[: -1 if chosen[-1] in stops else None]
            )
        if len(segment.ids) > self.generator.room:
            raise DataError(
                f"{prompt.where}: has {len(segment.ids)} tokens with its completion, and a sample "
                f"has room for {self.generator.room}; raise data.seq_len or train.batch_size"
            )
        return group

    def prompt_limit(self, seq_len: int) -> tuple[int, str]:
        """Return the most tokens of a prompt, and the reason in words."""
        room = self.generator.room - self._cfg.max_tokens
        return room, (
            f"data.seq_len={seq_len} with rollout.max_tokens={self._cfg.max_tokens} allows "
            f"({room} tokens; more with another data.seq_len or train.batch_size)"
        )

    def complete(self, name: str, groups: Sequence[Group]) -> None:
        """Answer and reward the samples of groups; `name` is part of their seeds."""
        samples = [sample for group in groups for sample in group.samples]
        asked = [sample for sample in samples if not sample.from_record]

        def seed(sample: Sample) -> int:
            return seed_of(self._seed, name, sample.prompt.key)

        if self._turns:
            self._turns.play(asked, seed, self._submit, self._wanted)
        else:
            self.generator.answer(asked, seed, self._submit, self._wanted)
        for sample in samples:
            if sample.from_record:
                self._submit(sample)
        began = time.perf_counter()
        # Rewards were computed while other samples were answered; what is waited for here is the
        # rest.
        self._scores.collect(samples)
        self.reward_seconds += time.perf_counter() - began
        if not self._wanted():
            raise Cancelled

    def _submit(self, sample: Sample) -> None:
        end = len(sample.prompt.ids)
        self._scores.submit(sample, self.generator.prompt_text(sample.ids[:end]))

    def news(self) -> list[str]:
        """Return lines about what happened since the last call, each once."""
        failed = [
            line for name, line in self._scores.first_failures.items() if name not in self._told
        ]
        self._told |= {*self._scores.first_failures}
        news, self._news = self._news, []
        # Told at the first such sample, and whenever their number has a further digit.
        crowded = self._turns.crowded if self._turns else 0
        if len(str(crowded)) > len(str(self._crowded)) or (crowded and not self._crowded):
            news.append(
                f"rollout.environment: {crowded} samples so far ended because the environment's "
                f"messages left no room in the {self.generator.room} tokens of a sample; raise "
                "data.seq_len, or shorten the messages"
            )
        self._crowded = crowded
        return news + failed + self._pool.news()
