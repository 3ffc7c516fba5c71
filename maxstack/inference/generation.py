"""Generation in this process: a prompt answered as a stream of text, or a file of prompts."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.chat import ChatTemplate, encode_chat, to_template_messages
from maxstack.errors import ConfigError, DataError, shortened
from maxstack.inference.multi_step import STEPS
from maxstack.inference.request import Sampling, Token
from maxstack.inference.resumable_file import ResumableFile
from maxstack.inference.text import TextStream
from maxstack.report.progress import progress

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer
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
        text = TextStream(self._tokenizer, prompt, self._stops)
        sampling = dataclasses.replace(self.sampling, choice=choice)
        room = engine.max_length - len(prompt)
        # Once for a prompt, not for each of its answers.
        if choice == 0 and sampling.max_tokens > room >= 0:
            log.warning(
                "serve.max_length=%d: the answer ends after %d tokens",
                engine.max_length,
                room,
            )
        number = engine.add(prompt, sampling, adapter=self._adapter)
        try:
            # Stop strings are found here, because the engine knows tokens alone.
            while engine.sequence(number) is not None and text.stopped is None:
                for output in engine.step():
                    for token in output.tokens:
                        yield text.feed(token.token)
        finally:
            # Also where the caller stops reading: its pages go back.
            engine.abort(number)
        yield text.flush()

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
        engine, limit = self._served.engine, self._served.cfg.serve.max_requests * AHEAD
        waiting, running = list(encoded), dict[int, _Answer]()
        # `pop` takes from the end in constant time.
        waiting.reverse()
        shown = progress(len(prompts) * count, "generating", "answers", len(answers.lines))
        # Tokens of this call alone, for the speed: those of an earlier call cost no time now.
        made = 0
        with shown:
            while waiting or running:
                # A few more than run at a time keep the engine full; the rest need not be held
                # there as well.
                while waiting and len(running) < limit:
                    i, choice = key = waiting.pop()
                    # A choice of its own for each answer, so that equal prompts get different
                    # answers; by its place in the file, so that a resumed call makes the same.
                    sampling = dataclasses.replace(
                        self.sampling, choice=i * count + choice, logprobs=0
                    )
                    try:
                        number = engine.add(encoded[key], sampling, adapter=self._adapter)
                    except DataError as error:
                        raise DataError(f"{prompts[i].where}: {error}") from None
                    running[number] = _Answer(key, self._text(encoded[key]))
                # Nobody reads along, so several steps in one program cost no latency.
                for output in engine.step(many=STEPS):
                    answer = running[output.request]
                    made += len(output.tokens)
                    # A stop string ends the text before the engine knows of it.
                    if answer.add(output.tokens) and output.finish is None:
                        engine.abort(output.request)
                    elif output.finish is None:
                        continue
                    del running[output.request]
                    i, choice = answer.key
                    row = {"id": prompts[i].id} | ({"choice": choice} if count > 1 else {})
                    answers.append(answer.key, row | answer.row(output.finish))
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


class _Answer:
    """An answer that is being generated."""

    def __init__(self, key: tuple[int, int], text: TextStream | None):
        self.key, self._text = key, text
        self._tokens: list[Token] = []
        self._parts: list[str] = []

    def add(self, tokens: Sequence[Token]) -> bool:
        """Add tokens -> True where a stop string ended the text."""
        for token in tokens:
            self._tokens.append(token)
            if self._text is not None:
                self._parts.append(self._text.feed(token.token))
                if self._text.stopped is not None:
                    return True
        return False

    def row(self, finish: str | None) -> dict[str, Any]:
        text = None
        if self._text is not None:
            text = "".join(self._parts) + self._text.flush()
        return {
            "text": text,
            "tokens": [token.token for token in self._tokens],
            "logprobs": [token.logprob for token in self._tokens],
            "finish_reason": finish or "stop",
        }
