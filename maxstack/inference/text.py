"""The text of an answer while its tokens arrive.

Tokens have no text of their own: a character may take several, and tokenizers strip a first space
or write one depending on what is before. Decoding the whole answer for each token would cost its
length each time. So each token is decoded behind the last token that had text, and what that one
gives alone is cut off; tokens that stand for bytes are joined here, by an incremental decoder of
UTF-8. Text that may be the start of a stop string is held back until it is not.
"""

import codecs
from collections.abc import Collection, Sequence

import numpy as np

from maxstack.data.tokenizers import Tokenizer

_CONTEXT = 4
"""Tokens with text at the prompt's end that are read: an unfinished character has fewer."""


def answer_text(
    tokenizer: Tokenizer,
    prompt_tokens: Sequence[int],
    tokens: Sequence[int],
    shown: Collection[int] = (),
) -> str:
    """Return the text of a whole answer, as a TextStream would."""
    stream = TextStream(tokenizer, prompt_tokens, shown=shown)
    return "".join(map(stream.feed, tokens)) + stream.flush()


class TextStream:
    """Turns tokens into text as soon as it is certain: whole characters, and nothing that may be
    the start of a stop string.

    The pieces joined are the tokenizer's text of prompt and answer, without the prompt's but with
    the character that the prompt leaves unfinished. Bytes that are no UTF-8 become U+FFFD, and
    valid ones beside them stay, unlike in `decode` of some tokenizer.json. Special tokens have no
    text, but for those in `shown`. Each token costs the same, however long the answer is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        shown: Collection[int] = (),
    ):
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._tokenizer, self.shown = tokenizer, shown
        self._stops, self._include_stop = [stop for stop in stops if stop], include_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._anchor: list[int] = []  # the last token that has text alone
        self._after: list[int] = []  # the last token, where it has none, as a stripped space
        start, with_text = len(prompt_tokens), 0
        # The prompt's end alone: it decides a first space, and an unfinished character has few
        # tokens.
        while start and with_text < _CONTEXT:
            start -= 1
            with_text += bool(self._decode([prompt_tokens[start]]))
        for token in prompt_tokens[start:]:
            self.grow(token)

    def feed(self, token: int) -> str:
        """Return the text that became certain with the next token; none after a stop string."""
        return self._until_stop(self.grow(token), last=False)

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._until_stop(self._utf8.decode(b"", final=True), last=True)

    def grow(self, token: int) -> str:
        """Return the text that the next token completes, regardless of stop strings."""
        special = self._tokenizer.special
        if token in self.shown and token in special:
            # End an unfinished character first: it cannot go on behind a special token.
            return self._utf8.decode(b"", final=True) + special[token]
        # Models may have more rows than the tokenizer has tokens.
        if token in special or token >= self._tokenizer.vocab_size:
            return ""
        raw = self._tokenizer.raw(token)
        # Behind a token with text, nothing is stripped: the bytes are the text.
        if raw is not None and self._anchor:
            return self._utf8.decode(raw)
        context = self._anchor + self._after
        text = self._decode([*context, token])
        # A token without text alone (a space that is stripped at the start) cannot be the anchor:
        # the next token would be decoded as the first of a text.
        if self._decode([token]):
            self._anchor, self._after = [token], []
        else:
            self._after = [token]
        if raw is not None:
            return self._utf8.decode(raw if text else b"")
        return self._utf8.decode(b"", final=True) + text[len(self._decode(context)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self._tokenizer.vocab_size]
        return self._tokenizer.decode(np.array(known, np.int32)).decode(errors="replace")

    def _until_stop(self, text: str, last: bool) -> str:
        """Return text that is certain. The stop string that ends first ends the text, so the result
        does not depend on how the text is divided."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        # By the end, not the start: the stop string that is complete first ends the text however it
        # arrived. Of two that end together the longer one begins earlier and wins.
        matches = [
            (text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if matches:
            end, length, self.stopped = min(matches)
            return text[: end if self._include_stop else end + length]
        held = [] if last else [_partial_match(text, stop) for stop in self._stops]
        certain = len(text) - max(held, default=0)
        self._held = text[certain:]
        return text[:certain]


def _partial_match(text: str, stop: str) -> int:
    """Return how many characters of a stop string, not all, end a text."""
    most = min(len(stop) - 1, len(text))
    # The longest first, which stops early; only its size matters. All sizes of 16 stop strings of
    # 256 characters cost 0.8 ms a token, this 0.02.
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
