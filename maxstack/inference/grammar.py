"""Tokens that a JSON schema, a regular expression or a grammar lets an answer go on with, by the
llguidance library. Runs on the host, imports no jax."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from maxstack.data.tokenizers import Tokenizer
from maxstack.errors import ConfigError, installing, shortened

_SEPARATOR = b"\x02"
_BLANKS = r"[ \t\n\r]{0,32}"
_PROBE = '{"a b": [1, "\u00e9"]}\n'


class Compiler:
    """Matchers over the tokens of a tokenizer. Seconds to make for a large vocabulary, then
    milliseconds a grammar."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int], vocab: int):
        """`stop_tokens` may end an answer, and stand for no text; `vocab` is the model's, and masks
        are that wide. ConfigError if the library is missing, there is no stop token, or the
        tokenizer's text is not its tokens' bytes in a row."""
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                f"grammars need the llguidance package: {installing('serve')}"
            ) from error
        if not stop_tokens:
            raise ConfigError(
                f"{tokenizer.name}: a grammar needs a token that ends an answer, and neither "
                "tokenizer nor model names one"
            )
        _check_text(tokenizer)
        self._matcher: Any = llguidance.LLMatcher
        self._words = -(-vocab // 32)
        vocabulary = _Vocabulary(tokenizer, sorted(stop_tokens), vocab)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), eos_token=sorted(stop_tokens)
        )
        vocabulary.greedy = self._tokens.greedy_tokenize

    def json_schema(self, schema: Mapping[str, Any] | bool) -> "Matcher":
        """Matcher of JSON that follows a schema, with at most 32 blanks in a row, since a model may
        go on with blanks for ever; the schema's own `x-guidance` says otherwise. ConfigError if the
        library does not know all of the schema's keys, or nothing follows it."""
        if isinstance(schema, Mapping):
            schema = {"x-guidance": {"whitespace_pattern": _BLANKS}, **schema}
        try:
            text = json.dumps(schema)
        except RecursionError as error:
            raise ConfigError("grammar: the JSON schema is nested too deeply") from error
        return self._compiled("JSON schema", self._matcher.grammar_from_json_schema(text))

    def regex(self, pattern: str) -> "Matcher":
        """Matcher of whole texts by a regular expression of Rust's regex crate, without
        look-around. ConfigError for others."""
        return self._compiled("regular expression", self._matcher.grammar_from_regex(pattern))

    def lark(self, grammar: str) -> "Matcher":
        """Matcher by a grammar in llguidance's variant of Lark's notation, from its rule `start`.
        ConfigError for others."""
        return self._compiled("Lark grammar", self._matcher.grammar_from_lark(grammar))

    def choices(self, texts: Sequence[str]) -> "Matcher":
        """Matcher of any of some texts. ConfigError for none."""
        if not texts:
            raise ConfigError("grammar: the list of choices is empty; give at least one text")
        escaped = ("".join(f"\\x{{{ord(char):x}}}" for char in text) for text in texts)
        return self._compiled("choices", self._matcher.grammar_from_regex("|".join(escaped)))

    def _compiled(self, kind: str, grammar: str) -> "Matcher":
        state = self._matcher(self._tokens, grammar, log_level=0)
        if not state.is_error():
            state.compute_bitmask()  # which finds what no text follows
        if state.is_error():
            raise ConfigError(f"grammar: not a {kind} that can be followed: {_error(state)}")
        return Matcher(state, self._words)


class Matcher:
    """The state of a grammar after some tokens of an answer."""

    def __init__(self, state: Any, words: int):
        self._state, self._words = state, words

    @property
    def complete(self) -> bool:
        """True if the text so far is a whole answer, which may still go on."""
        return self._state.is_accepting()

    @property
    def finished(self) -> bool:
        """True if nothing but a stop token may follow, or one was accepted."""
        self._check()
        return self._state.is_stopped()

    def mask(self) -> np.ndarray:
        """int32 [vocab / 32, rounded up]: a bit, the lowest first, for each token that may follow.
        ConfigError if the grammar grows beyond the library's limits, or no token fits it."""
        # the library adds a word where the vocabulary fills the last one
        mask = np.frombuffer(self._state.compute_bitmask(), np.int32, self._words)
        self._check()
        return mask

    def allowed(self, tokens: Sequence[int]) -> int:
        """Number of these tokens, in order, that may follow. They are not accepted."""
        return self._state.validate_tokens([*map(int, tokens)])

    def accept(self, token: int) -> None:
        """Appends a token. ConfigError if it may not follow, after which the matcher is of no
        use."""
        self._state.consume_token(int(token))
        self._check()

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens that were accepted."""
        self._state.rollback(count)
        self._check()

    def copy(self) -> "Matcher":
        """A matcher in the same state that goes on by itself."""
        return Matcher(self._state.deep_copy(), self._words)

    def _check(self) -> None:
        if self._state.is_error():
            raise ConfigError(f"grammar: the answer cannot go on: {_error(self._state)}")


class _Vocabulary:
    """A tokenizer as llguidance takes it. Where a grammar leaves no choice of the next bytes, the
    library wants the tokens that the tokenizer would make of them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_tokens: list[int], vocab: int):
        self._tokenizer = tokenizer
        self.eos_token_id = stop_tokens[0]
        self.special_token_ids = stop_tokens
        self.tokens = [*tokenizer.pieces, *[b""] * (vocab - tokenizer.vocab_size)]
        for token in stop_tokens:
            self.tokens[token] = b"<|stop|>"
        self.greedy: Callable[[str], list[int]] = lambda text: []
        """The longest tokens from left to right; LLTokenizer has it once it is made."""

    def __call__(self, text: bytes) -> list[int]:
        pieces, sizes = self._tokenizer.pieces, self._tokenizer.token_bytes
        for prefix in (b"", _SEPARATOR):  # some write a space before the first word
            ids = self._tokenizer.encode(prefix + text)
            ids = ids[sizes[ids] > 0]
            joined = b"".join(pieces[token] for token in ids)
            starts = np.cumsum(sizes[ids]) - sizes[ids]
            first = np.flatnonzero(starts == len(joined) - len(text))
            if joined.endswith(text) and len(first):
                return ids[first[0] :].tolist()
        return self.greedy(text.decode())


def _error(state: Any) -> str:
    """The reason that the library gives, without the state of its parser."""
    reason = state.get_error().partition("<state>")[0].partition("<backtrace>")[0]
    if reason.startswith("NoExtension"):
        return "no text fits it"
    return shortened(" ".join(reason.split()), 300)


def _check_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(_PROBE.encode())
    text = tokenizer.decode(ids)
    joined = b"".join(tokenizer.pieces[token] for token in ids)
    if joined.strip() != text.strip():
        raise ConfigError(
            f"{tokenizer.name}: grammars need a tokenizer whose text is its tokens' bytes in a "
            f"row, but of {_PROBE!r} it makes {text!r} and the tokens make {joined!r}"
        )
