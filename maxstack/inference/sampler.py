"""Choice of the tokens of a step: `sampling` on the device, for tasks on the host. Shapes: O rows
V vocab."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxstack.inference import sampling
from maxstack.inference.request import Sampling, Token
from maxstack.inference.scheduler import TokenSequence
from maxstack.layers.by_rows import in_groups

GROUP = 4
"""Rows that are computed together: sums over the vocabulary round otherwise for other numbers."""


class Wanted(NamedTuple):
    """A row whose logits are wanted."""

    task: TokenSequence
    position: int
    """Position of the row's token; the next token stands after it."""
    piece: int
    """Index of the row's piece in the step."""
    target: int | None
    """The token of the prompt after it; None: it is to be chosen."""


def logprobs(
    logits_OV: jax.Array, tokens_O: jax.Array, scale_O: jax.Array, top: int | None
) -> tuple[jax.Array, ...]:
    """Those of `sampling`; none for None."""
    if top is None:
        return ()

    def of_group(x_OV: jax.Array, tokens_O: jax.Array, scale_O: jax.Array) -> Any:
        return sampling.logprobs(x_OV, tokens_O, top, scale_O)

    return in_groups(of_group, GROUP)(logits_OV, tokens_O, scale_O)


def scale_of(rules: Sampling) -> float:
    """What a request's logits are divided by for its log-probabilities."""
    return rules.temperature if rules.scaled and rules.temperature else 1.0


class Sampler:
    """Compiled programs that choose tokens and give log-probabilities."""

    def __init__(self, vocab: int, max_length: int):
        self._vocab, self._max_length = vocab, max_length
        self._chosen = jax.jit(in_groups(sampling.chosen, GROUP))
        self._adjusted = jax.jit(sampling.adjusted)
        self._logprobs = jax.jit(logprobs, static_argnums=3)

    def tokens(self, logits_OV: Any, wanted: Sequence[Wanted]) -> list[Token]:
        """The token after each wanted row, with log-probabilities where its request asks for
        them."""
        count = logits_OV.shape[0]
        rows: list[Any] = [
            (row.task.sampling, row.position + 1) if row.target is None else None for row in wanted
        ]
        rows += [None] * (count - len(rows))
        settings = sampling.settings(rows)
        chosen = np.array(self._chosen(self._adjust(logits_OV, settings, wanted), settings))
        tops = []
        for i, (task, _, _, target) in enumerate(wanted):
            tops.append(task.sampling.logprobs if target is None else task.sampling.prompt_logprobs)
            if target is not None:
                chosen[i] = target
        if all(top is None for top in tops):
            return [Token(int(token)) for token in chosen[: len(wanted)]]
        kept = self.kept(tops)
        scale_O = np.ones(count, np.float32)
        scale_O[: len(wanted)] = [scale_of(row.task.sampling) for row in wanted]
        logprob_O, top_OT, values_OT = jax.device_get(
            self._logprobs(logits_OV, chosen, scale_O, kept)
        )
        tokens = []
        for i, top in enumerate(tops):
            pairs = zip(top_OT[i, : top or 0], values_OT[i, : top or 0], strict=True)
            best = tuple((int(token), float(value)) for token, value in pairs)
            own = None if top is None else float(logprob_O[i])
            tokens.append(Token(int(chosen[i]), own, best))
        return tokens

    def kept(self, tops: Iterable[int | None]) -> int | None:
        """Likeliest tokens that a program gives for all who ask for so many; few values, so that
        few programs are compiled. None: nobody asks."""
        asked = [top for top in tops if top is not None]
        if not asked:
            return None
        most = max(asked)
        return min(self._vocab, 1 << max(most - 1, 0).bit_length()) if most else 0

    def _adjust(self, logits_OV: Any, settings: sampling.Settings, wanted: Sequence[Wanted]) -> Any:
        """Logits with biases, penalties and grammars; as they are where no request has any."""
        count, vocab = logits_OV.shape
        made: list[Any] = [None] * count
        for i, (task, position, _, target) in enumerate(wanted):
            answered = position + 1 - task.prompt
            if target is None and sampling.is_adjusted(task.sampling, answered):
                made[i] = task.sampling, answered
        if not any(made):
            return logits_OV
        history = np.full((count, self._max_length), -1, np.int32)
        lengths = np.zeros(count, np.int32)
        mask = np.full((count, -(-vocab // 32)), -1, np.int32)
        for i, (task, position, _, _) in enumerate(wanted):
            if made[i]:
                history[i, : position + 1] = task.tokens[: position + 1]
                lengths[i] = task.prompt
                if task.sampling.grammar is not None:
                    mask[i] = task.sampling.grammar.mask()
        return self._adjusted(logits_OV, history, lengths, settings, sampling.biases(made), mask)
