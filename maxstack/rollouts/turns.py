"""Samples of several turns: the model answers, an environment answers it."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.data.chat import ChatTemplate, encode_chat, template_of
from maxstack.data.conversations import Completion, alone, messages_of
from maxstack.data.tokenizers import open_prompt_tokenizer
from maxstack.errors import DataError
from maxstack.inference.tools import read_calls
from maxstack.rewards.pool import Observation, Pool, Turn
from maxstack.rollouts.generator import Generator
from maxstack.rollouts.sample import Sample

if TYPE_CHECKING:
    from maxstack.run import Run

NAME = "environment"
"""Of its rewards in metrics."""


class Turns:
    """Plays samples with the environment of a run. All answers of a turn are complete before any
    of the next begins, so what an engine computes together does not depend on how long an
    environment takes."""

    def __init__(self, run: "Run", generator: Generator, pool: Pool):
        assert run.cfg.rollout and run.cfg.rollout.environment
        self._cfg, self._data = run.cfg.rollout.environment, run.cfg.data
        self._generator, self._pool = generator, pool
        self._plain = open_prompt_tokenizer(run.cfg.data.tokenizer, bos=False)
        self.crowded = 0
        """Samples that ended because what the environment said left no room for an answer."""

    def play(
        self,
        samples: Sequence[Sample],
        seed: Callable[[Sample], int],
        done: Callable[[Sample], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Play each sample to its end; `done` hears of it then. DataError where an environment
        fails that must not."""
        self._observe(samples, seed)
        for _ in range(self._cfg.turns):
            playing = [sample for sample in samples if not sample.done]
            if not playing:
                break
            self._generator.answer(playing, seed, self._note_calls, wanted)
            self._observe(playing, seed)
        for sample in samples:
            if not sample.done:
                self._pool.forget(self._session(sample, seed))
                sample.finish = "length"
            sample.rewards[NAME] = sample.earned
            done(sample)

    def _session(self, sample: Sample, seed: Callable[[Sample], int]) -> str:
        return f"{seed(sample)} {sample.number}"

    def _observe(self, samples: Sequence[Sample], seed: Callable[[Sample], int]) -> None:
        cfg, futures = self._cfg, []
        for sample in samples:
            given = Turn(
                cfg.call,
                self._session(sample, seed),
                sample.prompt.record,
                seed(sample) % 2**63,
                tuple(sample.texts),
                cfg.timeout,
                cfg.memory,
                f"{sample.prompt.where}, sample {sample.number}",
                tuple(sample.calls),
            )
            futures.append(self._pool.turn(given))
        for sample, future in zip(samples, futures, strict=True):
            self._take(sample, future.result())

    def _take(self, sample: Sample, observed: Observation) -> None:
        """Let a sample read what its environment answered."""
        if observed.failure:
            if self._cfg.failure == "fail":
                raise DataError(
                    f"{observed.failure}; mend it, or set rollout.environment.failure to zero or "
                    "drop, which count such samples and go on"
                )
            sample.failures[NAME] = observed.failure
            sample.dropped |= self._cfg.failure == "drop"
            sample.done, sample.earned = True, 0.0
            return
        sample.earned += observed.reward
        for name, value in observed.components.items():
            key = f"{NAME}/{name}"
            sample.rewards[key] = sample.rewards.get(key, 0.0) + value
        sample.done = observed.done
        begins = not sample.texts
        if begins:
            self._begin(sample, observed.messages)
        elif not sample.done and observed.messages is not None:
            self._go_on(sample, observed.messages)
        if not sample.done and len(sample.ids) >= self._generator.room:
            sample.done, sample.finish = True, "length"
            self._cut(sample)
            self.crowded += 1

    def _begin(self, sample: Sample, messages: Any) -> None:
        """The prompt: the row's own, or what the environment begins with."""
        record = dict(sample.prompt.record)
        if messages is None:
            given = alone(record)
            sample.messages = None if isinstance(given, Completion) else list(given.messages)
            return
        sample.ids, sample.chosen, sample.logps = [], [], []
        if isinstance(messages, str):
            sample.read(self._generator.tokenizer.encode(messages.encode()).tolist())
            return
        sample.messages = messages_of(messages)
        text = self._chat.render(sample.messages, record.get("tools"))
        sample.read(encode_chat(self._generator.tokenizer, text)[0].tolist())

    def _go_on(self, sample: Sample, messages: Any) -> None:
        """The tokens between an answer and the next one: the answer's own stay as they are."""
        if sample.messages is None:
            if not isinstance(messages, str):
                raise DataError(
                    f"environment {self._cfg.call}: answers messages, and the prompt of "
                    f"{sample.prompt.where} is a text; let both be texts or both messages"
                )
            sample.read(self._plain.encode(messages.encode()).tolist())
            return
        after = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        before = sample.messages
        tools = sample.prompt.record.get("tools")
        spoken = [*before, {"role": "assistant", "content": sample.texts[-1]}]
        whole = self._chat.render([*spoken, *messages_of(after)], tools)
        answered = self._chat.render(before, tools) + sample.texts[-1]
        if not whole.startswith(answered):
            raise DataError(
                f"{self._chat.where}: the template writes an answer otherwise once something "
                "follows it, so what the model said cannot be kept as it was; use a template that "
                "leaves answers as they are"
            )
        ids = encode_chat(self._generator.tokenizer, whole[len(answered) :])[0].tolist()
        if sample.finish == "stop" and ids and ids[0] == sample.ids[-1]:
            ids = ids[1:]  # the token that ended the answer
        sample.read(ids)
        sample.messages = [*spoken, *messages_of(after)]

    def _cut(self, sample: Sample) -> None:
        """Drop what a sample read last, where nothing is left to answer it with."""
        while sample.ids and not sample.chosen[-1]:
            for tokens in (sample.ids, sample.chosen, sample.logps):
                tokens.pop()

    def _note_calls(self, sample: Sample) -> None:
        """The tool calls of an answer that is complete."""
        form = self._generator.form if sample.messages is not None else None
        calls = read_calls(form, sample.texts[-1]) if form else []
        sample.calls.append(
            tuple(
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            )
        )

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        return template_of(self._data)
