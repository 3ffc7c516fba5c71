"""Constrained answers: tokens that a JSON schema, a regular expression or a grammar allows next,
by the llguidance library. Runs on the host, imports no jax.

A grammar is compiled once (`Compiler`) into a matcher, which each answer copies. Before each token
the matcher gives a mask of the vocabulary, and the chosen token moves it on. Grammars come from
clients, so each of size, parser and time is bounded: text and depth before the library sees them,
compilation in a process with limits (grammar_sandbox.py), items and states by the library, and the
processor time of an answer's masks here, since the engine waits for them.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.errors import ConfigError, installing, shortened

if TYPE_CHECKING:
    from maxstack.data.tokenizers import Tokenizer

# A character before a text, behind which tokenizers write no space of their own.
_SEPARATOR = b"\x02"
_BLANKS = r"[ \t\n\r]{0,32}"
_PROBE = '{"a b": [1, "\u00e9"]}\n'
LONGEST = 1 << 18
"""Bytes of a grammar at most."""
DEEPEST = 256
"""Levels of a JSON schema at most, counted through its references."""
# The longest step of an ambiguous grammar: 2.6 s at 2,000 items, 0.25 s at 1,000, 0.05 s at 600,
# which refuses objects of 150 optional properties.
ROW = 1000
"""Items in a row of the parser (llguidance's own limit is 2,000, at which a token of an ambiguous
grammar takes seconds; an optional property of an object takes four)."""
# A mask that was cheap in the trial and dear later took 4.9 s, with this limit 0.24.
ITEMS = 5000
"""Items of the parser in one mask: at the library's 50,000 a mask of many rules takes seconds."""
STATES = 50_000
"""States of a lexer, of 1 to 2 kB each."""
FIRST_SECONDS = 0.5
"""Processor time that the masks of an answer may take."""
TOKEN_SECONDS = 0.005
"""What each token adds to that."""


class Compiler:
    """Compiles grammars over a vocabulary. It takes seconds to make for a large vocabulary, then
    milliseconds per grammar."""

    def __init__(self, vocabulary: "Vocabulary"):
        """Raise ConfigError if the library is missing."""
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                f"grammars need the llguidance package: {installing('serve')}"
            ) from error
        self._matcher: Any = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=ROW,
            step_max_items=ITEMS,
            max_lexer_states=STATES,
            verbose_errors=False,
        )
        self._words = -(-len(vocabulary.tokens) // 32)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), eos_token=vocabulary.special_token_ids
        )
        # The library asks the vocabulary for tokens while it is made, so this can only be set
        # afterwards.
        vocabulary.greedy = self._tokens.greedy_tokenize

    def compile(self, kind: str, value: Any) -> "Matcher":
        """Compile by the method `kind`. ConfigError for what cannot be compiled, and for more than
        `LONGEST` bytes or `DEEPEST` levels, before the library sees it."""
        check_size(value)
        return getattr(self, kind)(value)

    def json_schema(self, schema: Mapping[str, Any] | bool) -> "Matcher":
        """Compile a JSON schema. Blanks are limited to 32 in a row, because a model may write them
        for ever, unless the schema has its own `x-guidance`. ConfigError for keys that the library
        does not know, and for a schema that no text follows."""
        if isinstance(schema, Mapping):
            # Before the schema's keys, so that its own `x-guidance` replaces this one.
            schema = {"x-guidance": {"whitespace_pattern": _BLANKS}, **schema}
        text = json.dumps(schema)
        return self._compiled("JSON schema", self._matcher.grammar_from_json_schema(text))

    def regex(self, pattern: str) -> "Matcher":
        """Compile a regular expression of Rust's regex crate, without look-around, for the whole
        answer. ConfigError for others."""
        return self._compiled("regular expression", self._matcher.grammar_from_regex(pattern))

    def lark(self, grammar: str) -> "Matcher":
        """Compile a grammar in llguidance's variant of Lark's notation, from its rule `start`.
        ConfigError for others."""
        return self._compiled("Lark grammar", self._matcher.grammar_from_lark(grammar))

    def choices(self, texts: Sequence[str]) -> "Matcher":
        """Compile a choice between texts. ConfigError for none."""
        if not texts:
            raise ConfigError("grammar: the list of choices is empty; give at least one text")
        escaped = [_escape(text) for text in texts]
        return self._compiled("choices", self._matcher.grammar_from_regex("|".join(escaped)))

    def _compiled(self, kind: str, grammar: str) -> "Matcher":
        state = self._matcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if not state.is_error():
            state.compute_bitmask()  # finds grammars that no text follows
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
        """Return int32 [vocab / 32, rounded up]: a bit, the lowest first, for each token that may
        follow. ConfigError beyond the library's limits, or if no token fits."""
        # The library adds a word where the vocabulary fills the last one, as Qwen's 151,936 does.
        mask = np.frombuffer(self._state.compute_bitmask(), np.int32, self._words)
        self._check()
        return mask

    def accept(self, token: int) -> None:
        """Append a token. ConfigError if it may not follow; the matcher is unusable then."""
        self._state.consume_token(int(token))
        self._check()

    def copy(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        return Matcher(self._state.deep_copy(), self._words)

    def _check(self) -> None:
        if self._state.is_error():
            raise ConfigError(f"grammar: the answer cannot go on: {_error(self._state)}")


class Answer:
    """A matcher as the engine uses it: an error ends the answer and is kept as `error`, and so does
    exceeding its processor time, which other requests would wait for."""

    def __init__(self, matcher: Matcher, held: object = None):
        """`held` lives as long as it and its copies do."""
        self._matcher, self._mask = matcher, matcher.mask()
        self._held = held
        self._left = FIRST_SECONDS
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        """True if the answer is whole, or cannot go on."""
        return self.error is not None or self._matcher.finished

    def mask(self) -> np.ndarray:
        """Return the matcher's mask, or the last one where it has none."""
        self._timed(self._masked)
        return self._mask

    def accept(self, token: int) -> None:
        """Append a token."""
        # A long answer may take more time in all, in proportion to its tokens.
        self._left += TOKEN_SECONDS
        self._timed(lambda: self._matcher.accept(token))

    def copy(self) -> "Answer":
        """Return another answer from the same state, with time of its own."""
        return Answer(self._matcher.copy(), self._held)

    def _masked(self) -> None:
        self._mask = self._matcher.mask()

    def _timed(self, step: Callable[[], None]) -> None:
        if self.error is not None:
            return
        # Processor time of this thread: waiting for others is not the grammar's fault.
        began = time.thread_time()
        try:
            step()
        except Exception as error:
            # Any error of the library ends this answer alone: the engine's thread serves all.
            self.error = error
        self._left -= time.thread_time() - began
        if self._left < 0 and self.error is None:
            self.error = ConfigError(
                f"grammar: the answer cannot go on: its masks take more than {FIRST_SECONDS} s of "
                f"processor time and {TOKEN_SECONDS} s a token; give a grammar with fewer ways to "
                "read one text"
            )


class Vocabulary:
    """Tokens as llguidance takes them. Where a grammar leaves no choice of the next bytes, the
    library wants the tokens that the tokenizer would make of them."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        stop_tokens: Collection[int],
        encode: Callable[[bytes], list[int] | None] = lambda text: None,
    ):
        """`tokens`: the bytes of each, as many as the model has rows. `stop_tokens` may end an
        answer, and stand for no text. `encode` gives a text's tokens, or None for the longest from
        left to right."""
        self.special_token_ids = sorted(stop_tokens)
        self.eos_token_id = self.special_token_ids[0]
        self.tokens = [*tokens]
        for token in stop_tokens:
            # Stop tokens have no text in an answer, whatever bytes the tokenizer writes for them.
            self.tokens[token] = b"<|stop|>"
        self._encode = encode
        self.greedy: Callable[[str], list[int]] = lambda text: []
        """The longest tokens from left to right; LLTokenizer has it once it is made."""

    @classmethod
    def of(cls, tokenizer: "Tokenizer", stop_tokens: Collection[int], vocab: int) -> "Vocabulary":
        """Return the vocabulary of a tokenizer, `vocab` tokens wide. ConfigError if there is no
        stop token, or the tokenizer's text is not its tokens' bytes in a row."""
        if not stop_tokens:
            raise ConfigError(
                f"{tokenizer.name}: a grammar needs a token that ends an answer, and neither "
                "tokenizer nor model names one"
            )
        _check_text(tokenizer)
        # The model's vocabulary may be wider than the tokenizer's; rows without a token have no
        # bytes.
        tokens = [*tokenizer.pieces, *[b""] * (vocab - tokenizer.vocab_size)]
        return cls(tokens, stop_tokens, lambda text: _encoded(tokenizer, text))

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encode(text)
        return self.greedy(text.decode()) if ids is None else ids


def check_size(grammar: Any) -> None:
    """Raise ConfigError for a grammar of more than `LONGEST` bytes or `DEEPEST` levels. A local
    `$ref` is followed once, the first time that it is met; what is deeper by another path, the
    sandbox finds."""
    size = 0
    # A list instead of recursion: the walk must survive what it is to refuse.
    found = [(grammar, 1)]
    seen: set[str] = set()
    while found:
        value, depth = found.pop()
        if isinstance(value, dict):
            inner = [*value.values()]
            size += sum(len(key) + 4 for key in value)
            target = value.get("$ref")
            # Once for each target: schemas may refer to themselves, and a chain of doublings has
            # 2^n paths.
            if isinstance(target, str) and target not in seen:
                seen.add(target)
                inner.append(_at(grammar, target))
        elif isinstance(value, list | tuple):
            inner = [*value]
        else:
            size += len(value) if isinstance(value, str) else 8
            continue
        if depth > DEEPEST:
            raise ConfigError(
                f"grammar: is nested too deeply: more than {DEEPEST} levels, counted through $ref"
            )
        size += 2 * len(inner)
        found += [(each, depth + 1) for each in inner]
    if size > LONGEST:
        raise ConfigError(f"grammar: is longer than {LONGEST:,} bytes; give a smaller one")


def _escape(text: str) -> str:
    # Escape every character, so that it does not matter which of them the dialect calls special.
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def _at(schema: Any, reference: str) -> Any:
    """Return the target of a local reference (RFC 6901) in a JSON schema; None for none."""
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict):
            return None
        schema = schema.get(key)
    return schema


def _encoded(tokenizer: "Tokenizer", text: bytes) -> list[int] | None:
    """Return the tokens of a text by itself; None where none of them starts with it."""
    pieces, sizes = tokenizer.pieces, tokenizer.token_bytes
    # Some tokenizers write a space before the first word; behind a separator they do not.
    for prefix in (b"", _SEPARATOR):
        ids = tokenizer.encode(prefix + text)
        ids = ids[sizes[ids] > 0]
        joined = b"".join(pieces[token] for token in ids)
        starts = np.cumsum(sizes[ids]) - sizes[ids]
        first = np.flatnonzero(starts == len(joined) - len(text))
        if joined.endswith(text) and len(first):
            return ids[first[0] :].tolist()
    return None


def _error(state: Any) -> str:
    """Return the library's reason, without the state of its parser."""
    reason = state.get_error().partition("<state>")[0].partition("<backtrace>")[0]
    if reason.startswith("NoExtension"):
        return "no text fits it"
    return shortened(" ".join(reason.split()), 300)


def _check_text(tokenizer: "Tokenizer") -> None:
    ids = tokenizer.encode(_PROBE.encode())
    text = tokenizer.decode(ids)
    joined = b"".join(tokenizer.pieces[token] for token in ids)
    if joined.strip() != text.strip():
        raise ConfigError(
            f"{tokenizer.name}: grammars need a tokenizer whose text is its tokens' bytes in a "
            f"row, but of {_PROBE!r} it makes {text!r} and the tokens make {joined!r}"
        )
