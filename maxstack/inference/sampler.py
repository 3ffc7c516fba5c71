"""Choice of the tokens of a step: `sampling` on the device, for sequences on the host.
Shapes: O rows  V vocab."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxstack.inference import sampling
from maxstack.inference.request import Sampling, Token, TokenSequence
from maxstack.layers.batch_invariance import in_groups

# At 260 tokens of vocabulary 31 of 64 rows differed in their last bits from groups of 4; a soak
# test found it, where two answers to one request differed.
GROUP = 4
"""Rows that are computed together: sums over the vocabulary round differently for other numbers."""


class LogitsRow(NamedTuple):
    """A row whose logits are wanted."""

    sequence: TokenSequence
    position: int
    """Position of the row's token."""
    chunk: int
    """Index of the row's chunk in the step."""
    target: int | None
    """The token of the prompt at the next position; None: it is to be chosen."""


def logprobs(
    logits_OV: jax.Array, tokens_O: jax.Array, scale_O: jax.Array, top: int | None
) -> tuple[jax.Array, ...]:
    """Compute `sampling.logprobs` in groups of rows; nothing where `top` is None."""
    if top is None:
        return ()

    def of_group(x_OV: jax.Array, tokens_O: jax.Array, scale_O: jax.Array) -> Any:
        return sampling.logprobs(x_OV, tokens_O, top, scale_O)

    return in_groups(of_group, GROUP)(logits_OV, tokens_O, scale_O)


def logprob_scale(request: Sampling) -> float:
    """Return what a request's logits are divided by for its log-probabilities."""
    return request.temperature if request.scaled and request.temperature else 1.0


class Sampler:
    """Compiled programs that choose tokens and compute log-probabilities."""

    def __init__(self, vocab: int, max_length: int):
        self._vocab, self._max_length = vocab, max_length
        self._choose = jax.jit(in_groups(sampling.choose, GROUP))
        # Compiled in a tenth of the time.
        self._likeliest = jax.jit(sampling.likeliest)
        # No groups here: nothing is summed over the vocabulary, so rows do not depend on their
        # number.
        self._adjust = jax.jit(sampling.adjust)
        self._logprobs = jax.jit(logprobs, static_argnums=3)

    def compile(self, logits_OV: Any, draws: bool) -> None:
        """Compile what chooses tokens by logits of this shape; `draws`: not the likeliest alone."""
        if draws:
            settings = sampling.pack_settings([None] * logits_OV.shape[0])
            self._choose.lower(logits_OV, settings).compile()
        else:
            self._likeliest.lower(logits_OV).compile()

    def tokens(self, logits_OV: Any, wanted: Sequence[LogitsRow]) -> list[Token]:
        """Return the token after each wanted row, with log-probabilities where its request asks for
        them."""
        count = logits_OV.shape[0]
        rows: list[Any] = [None] * count
        tops = []
        for i, (sequence, position, _, target) in enumerate(wanted):
            if target is None:
                rows[i] = sequence.sampling, position + 1
                tops.append(sequence.sampling.logprobs)
            else:
                tops.append(sequence.sampling.prompt_logprobs)
        settings = sampling.pack_settings(rows)
        # Rows of prompts are chosen for as well, greedily, and replaced: fewer rows would be
        # another shape.
        adjusted_OV = self._adjusted(logits_OV, settings, wanted)
        if settings.temperature.any():
            chosen = np.array(self._choose(adjusted_OV, settings))
        else:
            chosen = np.array(self._likeliest(adjusted_OV))
        for i, row in enumerate(wanted):
            if row.target is not None:
                chosen[i] = row.target
        # A program less for requests without log-probabilities.
        if all(top is None for top in tops):
            return [Token(int(token)) for token in chosen[: len(wanted)]]
        scale_O = np.ones(count, np.float32)
        scale_O[: len(wanted)] = [logprob_scale(row.sequence.sampling) for row in wanted]
        logprob_O, top_OT, values_OT = jax.device_get(
            self._logprobs(logits_OV, chosen, scale_O, self.top_count(tops))
        )
        tokens = []
        for i, top in enumerate(tops):
            pairs = zip(top_OT[i, : top or 0], values_OT[i, : top or 0], strict=True)
            best = tuple((int(token), float(value)) for token, value in pairs)
            own = None if top is None else float(logprob_O[i])
            tokens.append(Token(int(chosen[i]), own, best))
        return tokens

    def top_count(self, tops: Iterable[int | None]) -> int | None:
        """Return how many of the likeliest tokens a program gives for all requests: a power of two,
        so that few programs are compiled. None: no request asks for log-probabilities."""
        most = max((top for top in tops if top is not None), default=None)
        return min(self._vocab, 1 << (most - 1).bit_length()) if most else most

    def _adjusted(
        self, logits_OV: Any, settings: sampling.Settings, wanted: Sequence[LogitsRow]
    ) -> Any:
        """Return logits with biases, penalties and grammars, unchanged where no request has any."""
        count, vocab = logits_OV.shape
        rows: list[Any] = [None] * count
        for i, (sequence, position, _, target) in enumerate(wanted):
            answered = position + 1 - sequence.prompt_length
            if target is None and sampling.is_adjusted(sequence.sampling, answered):
                rows[i] = sequence.sampling, answered
        # Most steps have no such request, and a history of [O, max_length] is not sent for nothing.
        if not any(rows):
            return logits_OV
        # Full width, so that one program serves histories of any length.
        history = np.full((count, self._max_length), -1, np.int32)
        lengths = np.zeros(count, np.int32)
        # -1 has all bits set: every token is allowed.
        mask = np.full((count, -(-vocab // 32)), -1, np.int32)
        for i, (sequence, position, _, _) in enumerate(wanted):
            if rows[i]:
                history[i, : position + 1] = sequence.tokens[: position + 1]
                lengths[i] = sequence.prompt_length
                if sequence.sampling.grammar is not None:
                    mask[i] = sequence.sampling.grammar.mask()
        return self._adjust(logits_OV, history, lengths, settings, sampling.biases(rows), mask)
