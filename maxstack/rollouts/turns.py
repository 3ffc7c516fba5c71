"""Samples of several turns between the model and an environment.

An environment is reset, then each of the model's answers is given to it, and what it says is added
to the sample as tokens that the model did not sample and does not learn. The tokens that it did
sample stay as they are from turn to turn: a chat template that would render an answer differently
once something follows it is refused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.data.chat import ChatTemplate, encode_chat, open_template
from maxstack.data.conversations import Completion, read_messages, read_prompt
from maxstack.data.tokenizers import open_prompt_tokenizer
from maxstack.errors import DataError
from maxstack.inference.tools import read_calls
from maxstack.rewards.pool import Observation, Pool, Turn
from maxstack.rollouts.generator import Generator
from maxstack.rollouts.sample import Sample

if TYPE_CHECKING:
    from maxstack.run import Run

NAME = "environment"
"""Name of its rewards in metrics."""


class Turns:
    """Plays samples with the environment of a run. All answers of a turn are complete before the
    next turn begins, so what the engine computes together does not depend on an environment's
    speed."""

    def __init__(self, run: "Run", generator: Generator, pool: Pool):
        assert run.cfg.rollout and run.cfg.rollout.environment
        self._cfg = run.cfg.rollout.environment
        self._data = run.cfg.data
        self._generator = generator
        self._pool = pool
        # An environment's text goes on a sequence that has begun.
        self._plain = open_prompt_tokenizer(run.cfg.data.tokenizer, bos=False)
        self.crowded = 0
        """Samples that ended because the environment's messages left no room for an answer."""

    def play(
        self,
        samples: Sequence[Sample],
        seed: Callable[[Sample], int],
        done: Callable[[Sample], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Play each sample to its end; `done` is called with it then. DataError for a failure with
        `failure: fail`."""
        # Without texts so far this resets the environments.
        self._observe(samples, seed)
        for _ in range(self._cfg.turns):
            playing = [sample for sample in samples if not sample.done]
            if not playing:
                break
            self._generator.answer(playing, seed, self._note_calls, wanted)
            self._observe(playing, seed)
        for sample in samples:
            if not sample.done:
                # Its environment stays in a worker until it is given up.
                self._pool.forget(self._session(sample, seed))
                sample.finish = "length"
            sample.rewards[NAME] = sample.environment_reward
            done(sample)

    def _session(self, sample: Sample, seed: Callable[[Sample], int]) -> str:
        return f"{seed(sample)} {sample.number}"

    def _observe(self, samples: Sequence[Sample], seed: Callable[[Sample], int]) -> None:
        cfg = self._cfg
        futures = []
        for sample in samples:
            turn = Turn(
                call=cfg.call,
                session=self._session(sample, seed),
                row=sample.prompt.record,
                seed=seed(sample) % 2**63,
                texts=tuple(sample.texts),
                timeout=cfg.timeout,
                memory=cfg.memory,
                where=f"{sample.prompt.where}, sample {sample.number}",
                tools=tuple(sample.calls),
            )
            # All are asked before the first is waited for.
            futures.append(self._pool.turn(turn))
        for sample, future in zip(samples, futures, strict=True):
            self._take(sample, future.result())

    def _take(self, sample: Sample, observed: Observation) -> None:
        """Add an environment's answer to a sample."""
        if observed.failure:
            if self._cfg.failure == "fail":
                raise DataError(
                    f"{observed.failure}; fix it, or set rollout.environment.failure to zero or "
                    "drop, which count such samples and go on"
                )
            sample.failures[NAME] = observed.failure
            sample.dropped |= self._cfg.failure == "drop"
            sample.done = True
            # What its earlier turns gave does not count either.
            sample.environment_reward = 0.0
            return
        sample.environment_reward += observed.reward
        for name, value in observed.components.items():
            key = f"{NAME}/{name}"
            sample.rewards[key] = sample.rewards.get(key, 0.0) + value
        sample.done = observed.done
        if not sample.texts:
            self._begin(sample, observed.messages)
        elif not sample.done and observed.messages is not None:
            self._go_on(sample, observed.messages)
        if not sample.done and len(sample.ids) >= self._generator.room:
            sample.done = True
            sample.finish = "length"
            self._cut(sample)
            self.crowded += 1

    def _begin(self, sample: Sample, messages: Any) -> None:
        """Set the prompt: the row's own, or the environment's first messages."""
        record = dict(sample.prompt.record)
        if messages is None:
            given = read_prompt(record)
            sample.messages = None if isinstance(given, Completion) else list(given.messages)
            return
        for tokens in (sample.ids, sample.sampled, sample.logps):
            tokens.clear()
        if isinstance(messages, str):
            sample.add_context(self._generator.tokenizer.encode(messages.encode()).tolist())
            return
        sample.messages = read_messages(messages)
        text = self._chat.render(sample.messages, record.get("tools"))
        sample.add_context(encode_chat(self._generator.tokenizer, text)[0].tolist())

    def _go_on(self, sample: Sample, messages: Any) -> None:
        """Add the tokens between an answer and the next one; the answer's own stay as they are."""
        if sample.messages is None:
            if not isinstance(messages, str):
                raise DataError(
                    f"environment {self._cfg.call}: answers with messages, but the prompt of "
                    f"{sample.prompt.where} is a text; use texts or messages for both"
                )
            sample.add_context(self._plain.encode(messages.encode()).tolist())
            return
        after = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        before = sample.messages
        tools = sample.prompt.record.get("tools")
        spoken = [*before, {"role": "assistant", "content": sample.texts[-1]}]
        # The template renders the whole conversation and what it adds after the answer is taken:
        # the answer's own tokens must stay those that were sampled, or their log-probabilities are
        # another text's.
        whole = self._chat.render([*spoken, *read_messages(after)], tools)
        answered = self._chat.render(before, tools) + sample.texts[-1]
        if not whole.startswith(answered):
            raise DataError(
                f"{self._chat.where}: the template renders an answer differently once something "
                "follows it, so the model's tokens would not be kept; use a template that leaves "
                "answers as they are"
            )
        ids = encode_chat(self._generator.tokenizer, whole[len(answered) :])[0].tolist()
        if sample.finish == "stop" and ids and ids[0] == sample.ids[-1]:
            ids = ids[1:]  # the token that ended the answer
        sample.add_context(ids)
        sample.messages = [*spoken, *read_messages(after)]

    def _cut(self, sample: Sample) -> None:
        """Drop the tokens after a sample's last answer, since no room is left for another."""
        while sample.ids and not sample.sampled[-1]:
            for tokens in (sample.ids, sample.sampled, sample.logps):
                tokens.pop()

    def _note_calls(self, sample: Sample) -> None:
        """Parse the tool calls of a complete answer."""
        form = self._generator.form if sample.messages is not None else None
        calls = read_calls(form, sample.texts[-1]) if form else []
        functions = ({"name": call.name, "arguments": call.arguments} for call in calls)
        sample.calls.append(tuple({"type": "function", "function": each} for each in functions))

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        return open_template(self._data)
