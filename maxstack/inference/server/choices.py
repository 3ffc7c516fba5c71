"""The text and the log-probabilities of an answer, while its tokens arrive."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from maxstack.data.tokenizers import Tokenizer
from maxstack.inference.request import Output, Sampling, Token
from maxstack.inference.service import Answers
from maxstack.inference.text import TextStream
from maxstack.inference.tools import ToolCall, ToolStream

# A scored prompt as one event took 145 ms of the event loop, vectors of 200 texts 155 ms; now no
# callback takes more than 0.7 ms.
FEW = 16
"""Tokens that are handled on the event loop; more at a time are work for a thread."""


@dataclasses.dataclass
class Delta:
    """What an answer grew by."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    """Of the text, or of what will become text when more is known."""
    finish: str | None = None
    stopped: int | str | None = None
    """The stop token or string that ended it, except the model's own."""
    calls: tuple[ToolCall, ...] = ()
    echoed: int = 0
    """How many of the tokens are the echoed prompt's."""

    @property
    def ids(self) -> list[int]:
        """Ids of the generated tokens."""
        return [token.token for token in self.tokens[self.echoed :]]

    def __add__(self, other: "Delta") -> "Delta":
        return Delta(
            self.text + other.text,
            self.tokens + other.tokens,
            other.finish or self.finish,
            self.stopped if other.stopped is None else other.stopped,
            self.calls + other.calls,
            self.echoed + other.echoed,
        )


class Choice:
    """An answer to a prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        sampling: Sampling,
        stream: TextStream | None,
        *,
        shows_stop: bool = False,
        own_stops: frozenset[int] = frozenset(),
        echo: str | None = None,
        empty: bool = False,
        tools: ToolStream | None = None,
        parallel: bool = True,
    ):
        """`own_stops` are the model's own stop tokens; `echo` is the prompt's text, with which the
        answer begins; `empty` drops the generated tokens, of which the engine makes at least one;
        `tools` reads tool calls in the text, and without `parallel` the first ends it."""
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.sampling = sampling
        self.prompt_tokens: list[Token] = []
        self.generated = self.called = self.cached = 0
        self._stream = stream
        self._own_stops = own_stops
        self._shows_stop = shows_stop
        self._echo = echo
        self._empty = empty
        self._tools = tools
        self._parallel = parallel
        self._echoed = echo
        self._offset = 0

    def size(self, output: Output) -> int:
        """Return the number of tokens that `feed` handles."""
        echoed = 0 if self._echo is None else len(self.prompt)
        return len(output.tokens) + len(output.prompt) + echoed

    def feed(self, output: Output) -> Delta:
        """Return what the answer grew by with the progress of its request."""
        self.prompt_tokens += output.prompt
        self.cached = output.cached
        delta = self._grow(output) if output.tokens or output.finish else Delta()
        if self._tools is None:
            return delta
        delta.text, calls = self._tools.feed(delta.text)
        if delta.finish:
            rest, last = self._tools.flush()
            delta.text, calls = delta.text + rest, calls + last
        # The first call ends the answer; the engine is told by `deltas`.
        if calls and not self._parallel:
            delta.finish, calls = "stop", calls[:1]
        delta.calls = tuple(calls)
        self.called += len(calls)
        return delta

    def _grow(self, output: Output) -> Delta:
        delta = Delta()
        if self._echo is not None:
            # With log-probabilities where they were asked for.
            known = self.prompt_tokens or [Token(token) for token in self.prompt]
            delta, self._echo = Delta(self._echo, tuple(known), echoed=len(known)), None
        # The engine makes one token at least, which nobody asked for.
        if self._empty:
            return delta + Delta(finish="length")
        for token in output.tokens:
            self.generated += 1
            delta += self._feed_token(token, output.finish)
            if delta.finish:
                return delta
        if output.finish:
            delta += self._end(self._stream.flush() if self._stream else "", output.finish)
        return delta

    def _feed_token(self, token: Token, finish: str | None) -> Delta:
        # A stop token has no text, unless it was asked for; the model's own is not reported as a
        # reason.
        ends = finish == "stop" and token.token in self.sampling.stop_tokens
        stopped = token.token if ends and token.token not in self._own_stops else None
        text = ""
        # Without a stream (no tokenizer) there are ids alone.
        if self._stream and (self._shows_stop or not ends):
            text = self._stream.feed(token.token)
        return self._end(text, None) + Delta(tokens=(token,), stopped=stopped)

    def _end(self, text: str, finish: str | None) -> Delta:
        """Return the text, with its end where a stop string ended it."""
        stopped = self._stream.stopped if self._stream else None
        return Delta(text, finish="stop" if stopped is not None else finish, stopped=stopped)

    def token_text(self, token: int) -> str:
        """Return the text of a token by itself; bytes that are not UTF-8 as `bytes:\\\\x..`."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token by itself."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return f"token_id:{token}".encode()
        if token in tokenizer.special:
            return tokenizer.special[token].encode()
        return tokenizer.pieces[token] if token < tokenizer.vocab_size else b""

    def completion_logprobs(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Return them as /v1/completions has them: tokens with the same text count once, with the
        larger probability. Offsets count characters of the returned text, in which a special token
        may be hidden and a token's first space stripped."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += self._length(token.token)
        return {
            "tokens": [self.token_text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _length(self, token: int) -> int:
        """Return the characters that the next token adds to the text."""
        if self._reader is None or self.tokenizer is None:
            return 0
        spelt = self.tokenizer.special.get(token)
        if spelt and self._echoed and self._echoed.startswith(spelt, self._offset):
            return len(spelt)
        return len(self._reader.grow(token))

    @functools.cached_property
    def _reader(self) -> TextStream | None:
        """Reads the text that offsets count; few requests ask for them."""
        if self.tokenizer is None or self._stream is None:
            return None
        before = self.prompt if self._echoed is None else ()
        return TextStream(self.tokenizer, before, shown=self._stream.shown)

    def chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Return them as /v1/chat/completions has them."""
        content = []
        for token in tokens:
            top = [self._described(*pair) for pair in token.top]
            assert token.logprob is not None
            content.append(self._described(token.token, token.logprob) | {"top_logprobs": top})
        return {"content": content}

    def prompt_logprobs(self) -> list[dict[int, dict[str, Any]] | None]:
        """Return them as vLLM has them: by token, with ranks where known."""
        rows: list[dict[int, dict[str, Any]] | None] = []
        for token in self.prompt_tokens:
            pairs = [*token.top]
            pairs += [(token.token, token.logprob)] if token.logprob is not None else []
            row: dict[int, dict[str, Any]] = {}
            for i, (key, value) in enumerate(pairs):
                rank = i + 1 if i < len(token.top) else None
                text = self.token_text(key)
                row.setdefault(key, {"logprob": value, "rank": rank, "decoded_token": text})
            rows.append(row or None)
        return rows

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        raw = [*self.token_bytes(token)]
        return {"token": self.token_text(token), "logprob": logprob, "bytes": raw}

    def _top(self, token: Token) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for key, value in (*token.top, (token.token, token.logprob)):
            # The likeliest comes first and stays: `top_logprobs` has one value for a text.
            top.setdefault(self.token_text(key), value)
        return top


async def deltas(answers: Answers, choices: Sequence[Choice]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield (index, growth) of all answers; end requests whose text has ended."""
    async for index, output in answers:
        choice = choices[index]
        # Prompts with log-probabilities come at once, answers of an echo too.
        if choice.size(output) > FEW:
            delta = await asyncio.to_thread(choice.feed, output)
        else:
            delta = choice.feed(output)
        if delta.finish and not output.finish:
            answers.stop(index)
        yield index, delta


def usage(choices: Sequence[Choice], choices_each: int) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once."""
    # The n answers to a prompt lie side by side.
    prompt = sum(len(choice.prompt) for choice in choices[::choices_each])
    completion = sum(choice.generated for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.cached for choice in choices[::choices_each])
        },
    }
