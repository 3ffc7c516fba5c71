"""Generation in this process: a prompt answered as a stream of text, or a file of prompts."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.chat import ChatTemplate, encode_chat, to_template_messages
from maxstack.errors import ConfigError, DataError, shortened
from maxstack.inference.multi_step import STEPS
from maxstack.inference.request import Output, Sampling, Token
from maxstack.inference.resumable_file import ResumableFile
from maxstack.inference.text import TextStream
from maxstack.report.progress import progress

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer
    from maxstack.inference.engine import Engine
    from maxstack.inference.engine_setup import Served

log = logging.getLogger(__name__)

AHEAD = 4
"""Requests that are queued in the engine, as a multiple of those that it runs."""
KINDS = "prompt", "tokens", "messages"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts."""

    where: str
    id: Any
    kind: str
    value: Any


def read_prompts(file: str) -> list[Prompt]:
    """Read the prompts of a JSONL file, in their order; DataError for an invalid line, and where
    two have the same id. A line without id has its number, from 0."""
    if storage.kind(file) != "file":
        raise DataError(f"{file}: no such file")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    with storage.open_file(file) as stored:
        for number, line in enumerate(strict_json.lines(stored, file, strict_json.LARGEST)):
            where = f"{file}:{number + 1}"
            if not line.strip():
                continue
            row = strict_json.parse(line, where, strict=False)
            kinds = [kind for kind in KINDS if isinstance(row, dict) and row.get(kind) is not None]
            if len(kinds) != 1:
                raise DataError(
                    f"{where}: holds {' and '.join(kinds) or 'no prompt'}; wanted: an object with "
                    f"one of {', '.join(KINDS)}, and an id"
                )
            kind = kinds[0]
            check_prompt(where, kind, row[kind])
            own = row.get("id", number)
            # An id may be any JSON value, also one that cannot be the key of a dict.
            key = json.dumps(own)
            if key in lines:
                raise DataError(f"{where}: line {lines[key]} has the id {shortened(key, 80)} too")
            lines[key] = number + 1
            prompts.append(Prompt(where, own, kind, row[kind]))
    if not prompts:
        raise DataError(f"{file}: holds no prompt")
    return prompts


def check_prompts(
    model: str, tokenizer: Any, vocab: int, prompts: Sequence[Prompt], text: bool
) -> None:
    """Raise ConfigError or DataError where the model cannot answer; `text`: there are prompts of
    text."""
    if tokenizer is None and (text or any(prompt.kind != "tokens" for prompt in prompts)):
        raise ConfigError(
            f"{model} has no tokenizer; name one in data.tokenizer, or give prompts as "
            '{"id", "tokens"} in --prompts'
        )
    for prompt in prompts:
        tokens = prompt.value if prompt.kind == "tokens" else ()
        outside = next((token for token in tokens if not 0 <= token < vocab), None)
        if outside is not None:
            raise DataError(
                f"{prompt.where}: token {outside} is outside the model's vocabulary of {vocab}"
            )


def check_prompt(where: str, kind: str, value: Any) -> None:
    """Raise DataError where the value is not of its kind."""
    if kind == "prompt" and not isinstance(value, str):
        raise DataError(f"{where}: prompt is {shortened(json.dumps(value), 80)}, and must be text")
    if kind == "tokens" and not (
        isinstance(value, list) and all(type(token) is int for token in value)
    ):
        raise DataError(f"{where}: tokens must be a list of whole numbers")
    if kind == "messages" and not (
        isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ):
        raise DataError(f'{where}: messages must be a list of {{"role", "content"}}')
    if kind == "messages":
        try:
            to_template_messages(value)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def encode(
    tokenizer: "Tokenizer",
    template: ChatTemplate | None,
    text: str,
    chat: bool,
    system: str | None,
) -> list[int]:
    """Return the tokens of a text, or with `chat` of a new conversation with this message."""
    if not chat:
        return tokenizer.encode(os.fsencode(text)).tolist()
    messages = [{"role": "system", "content": system}] if system else []
    return encode_messages(tokenizer, template, [*messages, {"role": "user", "content": text}])


def encode_messages(
    tokenizer: "Tokenizer", template: ChatTemplate | None, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the tokens of a conversation, up to where the model's answer begins."""
    assert template, "messages without a chat template"
    return encode_chat(tokenizer, template.render(to_template_messages(messages)))[0].tolist()


class Question(NamedTuple):
    """A prompt that is to be answered."""

    key: Any
    tokens: Sequence[int]
    sampling: Sampling
    text: TextStream | None
    """None: of the answer, tokens alone are wanted."""
    adapter: str | None = None
    where: str = ""
    """Where the prompt stands, for errors."""


class Answer:
    """The answer to a question, of the tokens so far."""

    def __init__(self, question: Question):
        self.question = question
        self.tokens: list[Token] = []
        self.prompt: list[Token] = []
        """Tokens of the prompt, where their log-probabilities were asked for."""
        self.finish = "stop"
        """stop: a stop token or a stop string; length: max_tokens, or the model's length."""
        self._parts: list[str] = []

    @property
    def text(self) -> str | None:
        """The text of an answer that has ended; None where none was wanted."""
        text = self.question.text
        return "".join(self._parts) + text.flush() if text else None

    def add(self, output: Output) -> bool:
        """Add the progress of a step -> True where the answer has ended."""
        self.prompt += output.prompt
        text = self.question.text
        for token in output.tokens:
            self.tokens.append(token)
            if text is not None:
                self._parts.append(text.feed(token.token))
                # The engine knows tokens alone.
                if text.stopped is not None:
                    return True
        self.finish = output.finish or self.finish
        return output.finish is not None


def answer_all(engine: "Engine", questions: Iterable[Question]) -> Iterator[Answer]:
    """Answer questions, many at a time -> each answer as it ends. DataError for a prompt that
    cannot be answered."""
    # A few more than run at a time keep the engine full; the rest need not be held there as well.
    limit = engine.cfg.serve.max_requests * AHEAD
    waiting, running = iter(questions), dict[int, Answer]()
    with _ending(engine, running):
        while True:
            for question in itertools.islice(waiting, limit - len(running)):
                try:
                    number = engine.add(
                        question.tokens, question.sampling, adapter=question.adapter
                    )
                except DataError as error:
                    raise DataError(f"{question.where}: {error}") from None
                running[number] = Answer(question)
            if not running:
                return
            # Nobody reads along, so several steps in one program cost no latency.
            for output in engine.step(many=STEPS):
                answer = running[output.request]
                if answer.add(output):
                    del running[output.request]
                    # Does nothing where the engine ended it.
                    engine.abort(output.request)
                    yield answer


def stream_answer(engine: "Engine", question: Question) -> Iterator[str]:
    """Yield the text of an answer, in pieces as they become certain."""
    text = question.text
    assert text is not None
    number = engine.add(question.tokens, question.sampling, adapter=question.adapter)
    with _ending(engine, [number]):
        # Stop strings are found here, because the engine knows tokens alone.
        while engine.sequence(number) is not None and text.stopped is None:
            for output in engine.step():
                for token in output.tokens:
                    yield text.feed(token.token)
    yield text.flush()


@contextlib.contextmanager
def _ending(engine: "Engine", numbers: Collection[int]) -> Iterator[None]:
    """End the requests of these numbers that still run at the end, also where a caller stops
    reading: their pages go back."""
    try:
        yield
    except KeyboardInterrupt:
        # In a notebook the engine lives on, and the step may have taken its cache.
        engine.renew()
        raise
    finally:
        for number in numbers:
            engine.abort(number)


class Generator:
    """Generates text from prompts."""

    def __init__(
        self,
        served: "Served",
        sampling: Sampling,
        template: ChatTemplate | None = None,
        stops: Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str | None = None,
    ):
        """`template` is for prompts that are messages."""
        self._served = served
        self._stops = stops
        self._template = template
        self._adapter = adapter
        ends = frozenset() if ignore_eos else served.stop_tokens
        self.sampling = dataclasses.replace(sampling, stop_tokens=ends)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return encode(self._tokenizer, None, text, False, None)

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins."""
        return encode_messages(self._tokenizer, self._template, messages)

    def stream(self, prompt: Sequence[int], choice: int = 0) -> Iterator[str]:
        """Yield the answer to a prompt, in pieces as they become certain."""
        engine = self._served.engine
        sampling = dataclasses.replace(self.sampling, choice=choice)
        room = engine.max_length - len(prompt)
        # Once for a prompt, not for each of its answers.
        if choice == 0 and sampling.max_tokens > room >= 0:
            log.warning(
                "serve.max_length=%d: the answer ends after %d tokens",
                engine.max_length,
                room,
            )
        text = TextStream(self._tokenizer, prompt, self._stops)
        yield from stream_answer(engine, Question(0, prompt, sampling, text, self._adapter))

    def answer_file(
        self, prompts: Sequence[Prompt], out: str, count: int, chat: bool, system: str | None
    ) -> None:
        """Write `count` answers to each prompt to the file `out`, in the order of the prompts.
        Answers are appended to OUT.unfinished as they end, from which a later call resumes."""
        answers = ResumableFile(out, self._settings(prompts, count, chat, system))
        # Encode all before answering any, so that a bad prompt is told at once and not after hours.
        encoded = {}
        for i, prompt in enumerate(prompts):
            for choice in range(count):
                if (i, choice) not in answers.lines:
                    encoded[i, choice] = self._encode_prompt(prompt, chat, system)
        self._answer(prompts, encoded, count, answers)
        answers.write()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        encoded: dict[tuple[int, int], list[int]],
        count: int,
        answers: ResumableFile,
    ) -> None:
        # A choice of its own for each answer, so that equal prompts get different answers; by its
        # place in the file, so that a resumed call makes the same.
        questions = (
            Question(
                key,
                tokens,
                dataclasses.replace(self.sampling, choice=key[0] * count + key[1], logprobs=0),
                self._text(tokens),
                self._adapter,
                prompts[key[0]].where,
            )
            for key, tokens in encoded.items()
        )
        shown = progress(len(prompts) * count, "generating", "answers", len(answers.lines))
        # Tokens of this call alone, for the speed: those of an earlier call cost no time now.
        made = 0
        with shown:
            for answer in answer_all(self._served.engine, questions):
                i, choice = key = answer.question.key
                row = {"id": prompts[i].id} | ({"choice": choice} if count > 1 else {})
                row |= {
                    "text": answer.text,
                    "tokens": [token.token for token in answer.tokens],
                    "logprobs": [token.logprob for token in answer.tokens],
                    "finish_reason": answer.finish,
                }
                answers.append(key, row)
                made += len(answer.tokens)
                shown.update()
                if shown.format_dict["elapsed"]:
                    speed = f"{made / shown.format_dict['elapsed']:.1f} tokens/s"
                    shown.set_postfix_str(speed, refresh=False)

    def _encode_prompt(self, prompt: Prompt, chat: bool, system: str | None) -> list[int]:
        if prompt.kind == "tokens":
            return prompt.value
        try:
            if prompt.kind == "prompt":
                return encode(self._tokenizer, self._template, prompt.value, chat, system)
            return self.encode_messages(prompt.value)
        except DataError as error:
            raise DataError(f"{prompt.where}: {error}") from None

    def _text(self, prompt: Sequence[int]) -> TextStream | None:
        if self._served.tokenizer is None and not self._stops:
            return None
        return TextStream(self._tokenizer, prompt, self._stops)

    @property
    def _tokenizer(self) -> Any:
        assert self._served.tokenizer, "text without a tokenizer"
        return self._served.tokenizer

    def _settings(self, prompts: Sequence[Prompt], *others: Any) -> str:
        """Return a hash of all that answers depend on."""
        # Without `where`: the same prompts in a file of another name have the same answers.
        told = [dataclasses.astuple(prompt)[1:] for prompt in prompts], others, self._stops
        sampling = dataclasses.asdict(self.sampling)
        sampling["stop_tokens"] = sorted(sampling["stop_tokens"])
        # No grammar can be given here, and it would not be JSON.
        del sampling["grammar"]
        words = json.dumps([self._served.model, self._adapter, told, sampling], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()
