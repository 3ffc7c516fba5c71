"""Multi-step decoding: several steps in one program, with one synchronization of the host.

Each step computes one token of every request, chooses the next one on the device and moves the row
to it. A row whose answer ends becomes unused; the loop ends after `Bounds.steps`, or earlier where
so few rows are left that a smaller step would hold them, or others want a place. A token has the
bits and the random key of a single step. Requests that need the host between steps (grammars,
penalties, drafts) do not run ahead.
Shapes: R rows of all replicas  P replicas  N steps at most  O rows of the head  E tokens that end
an answer  D embed  V vocab  C likeliest tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.inference import sampling
from maxstack.inference.request import Token, TokenSequence
from maxstack.inference.sampler import GROUP, logprob_scale, logprobs
from maxstack.layers.batch_invariance import in_groups
from maxstack.layers.cache import Rows

STEPS = 16
"""Steps of a program at most."""


class Rules(NamedTuple):
    """How the tokens of each row are chosen, and when the row ends."""

    settings: sampling.Settings
    scale_R: Any
    """Divisor of logits for log-probabilities, float32."""
    stops_RE: Any
    """Tokens that end the answer, int32 padded with -1."""
    last_R: Any
    """Position of the request's last possible token, int32."""


class Bounds(NamedTuple):
    """When the program ends early."""

    steps: int
    """Steps at most."""
    fewest: int
    """It continues while some replica has more live rows than this,"""
    fewest_in_all: int
    """and all replicas together have more than this."""


class Made(NamedTuple):
    """Tokens of several steps."""

    counts_R: Any
    """Tokens of each row."""
    tokens_NR: Any
    logprobs_NR: Any = None
    """None where no request asks for log-probabilities, like the two below."""
    top_NRC: Any = None
    values_NRC: Any = None


def last_position(sequence: TokenSequence, max_length: int) -> int:
    """Return the position of the last token that a request may have."""
    return min(sequence.prompt_length + sequence.sampling.max_tokens, max_length) - 1


def can_run_ahead(sequence: TokenSequence) -> bool:
    """Return True where the next tokens of a request depend on logits and settings alone, so that
    several steps need nothing of the host."""
    rules, made = sequence.sampling, len(sequence.tokens) - sequence.prompt_length
    reports = rules.prompt_logprobs is not None and sequence.reported < sequence.prompt_length
    return not (reports or rules.embed or sampling.is_adjusted(rules, made))


def make_rules(sequences: Mapping[int, TokenSequence], rows: int, max_length: int) -> Rules:
    """Return the rules of `rows` rows; those of `sequences` by row."""
    longest = max(len(sequence.sampling.stop_tokens) for sequence in sequences.values())
    # A power of two compiles few shapes; padding of -1 is no token.
    stops = np.full((rows, 1 << max(longest - 1, 0).bit_length()), -1, np.int32)
    last, scale = np.full(rows, -1, np.int32), np.ones(rows, np.float32)
    given: list[Any] = [None] * rows
    for row, sequence in sequences.items():
        own = sequence.sampling
        # The loop puts each step's own position in place of 0.
        given[row] = own, 0
        stops[row, : len(own.stop_tokens)] = list(own.stop_tokens)
        last[row] = last_position(sequence, max_length)
        scale[row] = logprob_scale(own)
    return Rules(sampling.pack_settings(given), scale, stops, last)


def read_tokens(made: Made, row: int, top: int | None) -> list[Token]:
    """Return the tokens of a row, with log-probabilities where its request asks for them."""
    count = int(made.counts_R[row])
    tokens = made.tokens_NR[:count, row].tolist()
    if top is None:
        return [Token(token) for token in tokens]
    own = made.logprobs_NR[:count, row].tolist()
    if not top:
        return list(map(Token, tokens, own))
    best, values = (x[:count, row, :top].tolist() for x in (made.top_NRC, made.values_NRC))
    return [
        Token(token, logprob, tuple(zip(*pair, strict=True)))
        for token, logprob, *pair in zip(tokens, own, best, values, strict=True)
    ]


def run(
    forward: Callable[[Rows, Any], tuple[jax.Array, Any]],
    head: Callable[[jax.Array], jax.Array],
    rows: Rows,
    cache: Any,
    rules: Rules,
    bounds: Bounds,
    top: int | None,
    sizes: tuple[int, int],
) -> tuple[Made, Any]:
    """Compute several steps from `rows`, the last known token of each request -> the tokens and the
    cache. `forward` computes the states of rows [R, D], `head` logits of a few of them; `sizes`:
    replicas, and the most rows that `head` takes."""
    replicas, outputs = sizes

    def chosen(x_OD: jax.Array, rules: Rules) -> tuple[jax.Array, ...]:
        logits_OV = head(x_OD)
        # Without groups of 4 sampling takes 0.17 ms in place of 0.31 for 128 rows, but a row's bits
        # depend on the number of rows.
        tokens_O = in_groups(sampling.choose, GROUP)(logits_OV, rules.settings)
        return tokens_O, *logprobs(logits_OV, tokens_O, rules.scale_R, top)

    def going(carry: Any) -> jax.Array:
        step, rows = carry[:2]
        live_PR = (rows.positions_R >= 0).reshape(replicas, -1)
        enough = (live_PR.sum(1).max() > bounds.fewest) & (live_PR.sum() > bounds.fewest_in_all)
        return (step < bounds.steps) & enough

    def advanced(carry: Any) -> Any:
        step, rows, cache, counts_R, made = carry
        x_RD, cache = forward(rows, cache)
        next_R, live_R = rows.positions_R + 1, rows.positions_R >= 0
        # The position of the chosen token decides its random key, as in a single step.
        own = rules._replace(settings=rules.settings._replace(position=next_R))
        # The head takes as many rows at a time as outside the loop, for equal bits and bounded
        # logits.
        new = in_groups(chosen, min(outputs, len(next_R)))(x_RD, own)
        # Unused rows write too: `counts_R` tells how many of a row's tokens are real.
        made = jax.tree.map(lambda x_NR, x_R: x_NR.at[step].set(x_R), made, new)
        # Before `live_R` changes: the token that ends an answer belongs to it.
        counts_R += live_R
        tokens_R = new[0]
        live_R &= (tokens_R[:, None] != rules.stops_RE).all(1) & (next_R < rules.last_R)
        # An unused row has position -1 and slot 0, as `Runner.batch` makes it.
        positions_R, slots_R = jnp.where(live_R, next_R, -1), jnp.where(live_R, rows.slots_R, 0)
        rows = Rows(tokens_R, positions_R, slots_R, rows.adapters_R)
        return step + 1, rows, cache, counts_R, made

    count = rows.tokens_R.shape[0]
    # STEPS, not `bounds.steps`: one program serves any number of steps.
    begun = [jnp.zeros((STEPS, count), jnp.int32)]
    if top is not None:
        begun += [jnp.zeros((STEPS, count))]
        begun += [jnp.zeros((STEPS, count, top), dtype) for dtype in (jnp.int32, jnp.float32)]
    none_R = jnp.zeros(count, jnp.int32)
    begin = jnp.int32(0), rows, cache, none_R, tuple(begun)
    # A while loop, because a scan could not end early.
    _, _, cache, counts_R, made = jax.lax.while_loop(going, advanced, begin)
    return Made(counts_R, *made), cache
