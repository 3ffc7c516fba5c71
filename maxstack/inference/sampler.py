"""Choice of the tokens of a step: `sampling` on the device, for tasks on the host. Shapes: O rows
V vocab."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxstack.inference import sampling
from maxstack.inference.request import Token
from maxstack.inference.scheduler import Task
from maxstack.layers.by_rows import in_groups

GROUP = 4
"""Rows that are computed together: sums over the vocabulary round otherwise for other numbers."""


class Wanted(NamedTuple):
    """A row whose logits are wanted."""

    task: Task
    position: int
    """Position of the row's token; the next token stands after it."""
    piece: int
    """Index of the row's piece in the step."""
    target: int | None
    """The token of the prompt after it; None: it is to be chosen."""


class Sampler:
    """Compiled programs that choose tokens and give log-probabilities."""

    def __init__(self, vocab: int, max_length: int):
        self._vocab, self._max_length = vocab, max_length
        self._chosen = jax.jit(in_groups(sampling.chosen, GROUP))
        self._adjusted = jax.jit(sampling.adjusted)
        self._logprobs = jax.jit(
            lambda logits_OV, tokens_O, top: in_groups(
                functools.partial(sampling.logprobs, top=top), GROUP
            )(logits_OV, tokens_O),
            static_argnums=2,
        )

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
        most = max(top for top in tops if top is not None)
        # few values, so that few programs are compiled
        kept = min(self._vocab, 1 << max(most - 1, 0).bit_length()) if most else 0
        logprob_O, top_OT, values_OT = jax.device_get(self._logprobs(logits_OV, chosen, kept))
        tokens = []
        for i, top in enumerate(tops):
            pairs = zip(top_OT[i, : top or 0], values_OT[i, : top or 0], strict=True)
            best = tuple((int(token), float(value)) for token, value in pairs)
            own = None if top is None else float(logprob_O[i])
            tokens.append(Token(int(chosen[i]), own, best))
        return tokens

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
