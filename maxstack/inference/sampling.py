"""Choice of the next tokens by logits, on the device.

A row's token depends on its own logits and settings alone. `adjust` applies biases, penalties and a
grammar's mask. `choose` takes the likeliest token, or draws: top_k and then top_p become one
threshold a row, the least logit that they keep, found among the 1,024 likeliest tokens or, where
these are too few, by a search over the bits of float32 without sorting the vocabulary; min_p, and
any other filter that is no threshold, sets weights to 0. The draw inverts cumulative weights, first
over blocks and then inside one, by two uniform numbers of the key (seed, choice, position).
Shapes: O rows  V vocab  T history  B biased tokens  W words of a mask, V / 32 rounded up
C candidates  N weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.inference.request import Sampling

CANDIDATES = 1024
"""Likeliest tokens that are sorted. A filter that keeps more takes 32 passes over the row."""
BLOCK = 128
"""Tokens of a block: a block is drawn first, then a token of it."""


class Settings(NamedTuple):
    """The fields of `Sampling` that `adjust` and `choose` read, float32 [O] unless they say
    otherwise."""

    temperature: jax.Array
    top_k: jax.Array
    """int32 [O]."""
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    """uint32 [O, 2]: the seed modulo 2**64, its high half first, as in jax.random.key."""
    choice: jax.Array
    """int32 [O]."""
    position: jax.Array
    """int32 [O]: position in the sequence of the token that is chosen; no field of `Sampling`."""


def pack_settings(rows: Sequence[tuple[Sampling, int] | None]) -> Settings:
    """Return the settings of each row's request and position as numpy arrays; a row of None is
    greedy."""
    # Greedy is the cheapest choice, for rows that pad a step.
    greedy = Sampling(temperature=0.0), 0
    samplings, positions = zip(*(row or greedy for row in rows), strict=True)
    packed: dict[str, Any] = {}
    for name in {*Settings._fields} - {"seed", "position"}:
        values = [getattr(sampling, name) for sampling in samplings]
        packed[name] = np.array(values, np.int32 if name in ("top_k", "choice") else np.float32)
    # Key data as jax.random.key(seed) makes it; without 64-bit types a jax integer holds no such
    # seed.
    halves = [divmod(sampling.seed % 2**64, 2**32) for sampling in samplings]
    seed: Any = np.array(halves, np.uint32)
    position: Any = np.array(positions, np.int32)
    return Settings(**packed, seed=seed, position=position)


def is_adjusted(sampling: Sampling, made: int) -> bool:
    """Return True if `adjust` (not a filter of `choose`) changes the logits of a request that has
    `made` tokens of its answer."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty
    if penalties or sampling.repetition_penalty != 1:
        return True
    return sampling.grammar is not None or bool(_biases(sampling, made))


def biases(rows: Sequence[tuple[Sampling, int] | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, int32 [O, B] padded with -1, and what to add to their logits, float32 [O, B],
    for each row's request and the number of tokens that its answer has: logit_bias, and -inf for
    stop tokens before min_tokens. B is a power of two, so that few shapes are compiled."""
    biased = [_biases(*row) if row else {} for row in rows]
    size = 1 << max(max(map(len, biased)) - 1, 0).bit_length()
    tokens = np.full((len(rows), size), -1, np.int32)
    values = np.zeros((len(rows), size), np.float32)
    for row, bias in enumerate(biased):
        tokens[row, : len(bias)] = list(bias)
        values[row, : len(bias)] = list(bias.values())
    return tokens, values


def _biases(sampling: Sampling, made: int) -> dict[int, float]:
    barred = sampling.stop_tokens if made < sampling.min_tokens else ()
    return {**sampling.logit_bias, **dict.fromkeys(barred, -np.inf)}


def adjust(
    logits_OV: jax.Array,
    history_OT: jax.Array,
    prompt_lengths_O: jax.Array,
    settings: Settings,
    bias: tuple[jax.Array, jax.Array],
    mask_OW: jax.Array,
) -> jax.Array:
    """Return logits, float32 [O, V], after bias, penalties and grammar. A row without any of these
    keeps its bits.

    `history_OT` has the tokens of prompt and answer, padded with -1; `bias` is of `biases`; a bit
    of `mask_OW` (int32, the lowest bit first) that is 0 bars its token. Penalties: Keskar et al.
    2019, arXiv:1909.05858, as in transformers, for repetition; presence and frequency by the
    reference of OpenAI's API.
    """
    rows, vocab = logits_OV.shape

    def added(to_OV: jax.Array, tokens_ON: jax.Array, values: jax.Array | int) -> jax.Array:
        # jax takes index -1 as the last token; one beyond the end is dropped.
        columns_ON = jnp.where(tokens_ON < 0, vocab, tokens_ON)
        return to_OV.at[jnp.arange(rows)[:, None], columns_ON].add(values, mode="drop")

    none_OV = jnp.zeros((rows, vocab), jnp.int32)
    in_answer_OT = jnp.arange(history_OT.shape[1]) >= prompt_lengths_O[:, None]
    seen_OV = added(none_OV, history_OT, 1) > 0
    counts_OV = added(none_OV, jnp.where(in_answer_OT, history_OT, -1), 1)
    # In the order of transformers: bias, penalties, grammar.
    x_OV = added(logits_OV.astype(jnp.float32), *bias)
    factor_O1 = settings.repetition_penalty[:, None]
    # Dividing a negative logit would make its token likelier.
    penalized_OV = jnp.where(x_OV < 0, x_OV * factor_O1, x_OV / factor_O1)
    # A selection, so that rows without a penalty keep their bits beside rows with one.
    x_OV = jnp.where(seen_OV & (factor_O1 != 1), penalized_OV, x_OV)
    frequency_O1 = settings.frequency_penalty[:, None]
    once_OV = settings.presence_penalty[:, None] + frequency_O1 * counts_OV
    once_OV = jnp.where(counts_OV > 0, once_OV, 0)
    x_OV = jnp.where(once_OV != 0, x_OV - once_OV, x_OV)
    # Shifts of int32 repeat the sign bit, which the mask of one bit below drops.
    bits_OV = jnp.repeat(mask_OW, 32, axis=1)[:, :vocab] >> (jnp.arange(vocab) % 32)
    return jnp.where((bits_OV & 1) == 1, x_OV, -jnp.inf)


def choose(logits_OV: jax.Array, settings: Settings) -> jax.Array:
    """Choose the next token of each row, int32 [O], by temperature, top_k, top_p and min_p.

    Temperature 0: the likeliest token, of equal ones the first. Else a draw from the tokens that
    the filters keep, by two uniform numbers of the key fold_in(fold_in(seed, choice), position).
    Tokens with equal logits are kept or dropped together: top_k may keep more than k (as in
    transformers), and top_p more than it needs (transformers drops some by their order).
    """
    logits_OV = logits_OV.astype(jnp.float32)
    samples_O = settings.temperature > 0
    # min_p has no threshold: it is a comparison, too cheap to skip.
    has_threshold_O = samples_O & ((settings.top_k > 0) | (settings.top_p < 1))

    def drawn() -> jax.Array:
        weights_OV = _weights(logits_OV, settings)
        # Skip the sort where no row filters. The condition stays a branch, since rows are grouped
        # by lax.map: under vmap both sides would be computed.
        threshold_O = jax.lax.cond(
            has_threshold_O.any(),
            lambda: _threshold(logits_OV, weights_OV, settings),
            lambda: jnp.full(len(logits_OV), -jnp.inf),
        )
        kept_OV = logits_OV >= threshold_O[:, None]
        # Weights are multiples of the likeliest token's, which is what min_p compares.
        kept_OV &= weights_OV >= settings.min_p[:, None]
        return _draw(jnp.where(kept_OV, weights_OV, 0), _uniforms(settings))

    greedy_O = likeliest(logits_OV)
    drawn_O = jax.lax.cond(samples_O.any(), drawn, lambda: greedy_O)
    return jnp.where(samples_O, drawn_O, greedy_O)


def logprobs(
    logits_OV: jax.Array, tokens_O: jax.Array, top: int, scale_O: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the log-probability of each row's token by its logits over `scale_O`, float32 [O];
    the `top` likeliest tokens, int32 [O, top], the likeliest first and equal ones in the order of
    the vocabulary; and their log-probabilities, float32 [O, top]. A token has the same bits in
    both."""
    logits_OV = logits_OV.astype(jnp.float32) / jnp.reshape(scale_O, (-1, 1))
    # `top_k` gives equal logits in the order of tokens.
    top_OC, tokens_OC = jax.lax.top_k(logits_OV, top)
    own_O1 = jnp.take_along_axis(logits_OV, tokens_O[:, None], 1)
    most_O1 = logits_OV.max(-1, keepdims=True)
    total_O1 = jnp.exp(logits_OV - most_O1).sum(-1, keepdims=True)
    # One expression for both, so that XLA cannot round a token's own value otherwise than in `top`.
    values_OC = jnp.concatenate([own_O1, top_OC], 1) - most_O1 - jnp.log(total_O1)
    return values_OC[:, 0], tokens_OC, values_OC[:, 1:]


def likeliest(logits_OV: jax.Array) -> jax.Array:
    """Return jnp.argmax of each row of float32, int32 [O], by two reductions. XLA vectorizes these
    on a CPU, but not a reduction of pairs."""
    # 152k tokens, 4 rows: argmax 2.8 ms of processor time, this 0.75.
    most_O1 = logits_OV.max(-1, keepdims=True)
    index_V = jnp.arange(logits_OV.shape[1], dtype=jnp.int32)
    return jnp.where(logits_OV < most_O1, len(index_V), index_V).min(-1)


def _weights(logits_OV: jax.Array, settings: Settings) -> jax.Array:
    """Return probabilities as multiples of the likeliest token's."""
    # Greedy rows of the same step would divide by 0.
    scale_O = jnp.where(settings.temperature > 0, settings.temperature, 1)
    # Subtract the largest first: divided by a tiny temperature, logits themselves would overflow.
    return jnp.exp((logits_OV - logits_OV.max(-1, keepdims=True)) / scale_O[:, None])


def _threshold(logits_OV: jax.Array, weights_OV: jax.Array, settings: Settings) -> jax.Array:
    """Return the least logit, [O], of the tokens that top_k and then top_p keep; -inf for a row
    without them."""
    rows, vocab = logits_OV.shape
    k_O = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)
    # Sort the likeliest tokens alone; a threshold below them is searched for.
    best_OC, tokens_OC = jax.lax.top_k(logits_OV, min(CANDIDATES, vocab))
    last = best_OC.shape[1] - 1

    # The search reads the whole row 32 times, so it runs only where some row needs it.
    def search(needed_O: jax.Array, values_OV: jax.Array, least_O: jax.Array) -> jax.Array:
        return jax.lax.cond(
            needed_O.any(),
            lambda: _search(logits_OV, values_OV, least_O),
            lambda: jnp.full(rows, -jnp.inf),
        )

    kth_O = jnp.take_along_axis(best_OC, jnp.clip(k_O - 1, 0, last)[:, None], 1)[:, 0]
    k_is_beyond_O = (k_O > last + 1) & (k_O < vocab)
    counted_O = search(k_is_beyond_O, jnp.ones_like(logits_OV), k_O.astype(jnp.float32))
    kth_O = jnp.where(k_O > last + 1, jnp.where(k_is_beyond_O, counted_O, -jnp.inf), kth_O)

    # As in transformers, top_p is a share of what top_k leaves.
    weights_OV = jnp.where(logits_OV >= kth_O[:, None], weights_OV, 0)
    mass_O = settings.top_p * weights_OV.sum(-1)
    sums_OC = jnp.cumsum(jnp.take_along_axis(weights_OV, tokens_OC, 1), 1)
    enough_OC = sums_OC >= mass_O[:, None]
    first_O = jnp.take_along_axis(best_OC, jnp.argmax(enough_OC, 1)[:, None], 1)[:, 0]
    has_p_O = settings.top_p < 1
    p_is_beyond_O = has_p_O & ~enough_OC.any(1)
    nucleus_O = jnp.where(p_is_beyond_O, search(p_is_beyond_O, weights_OV, mass_O), first_O)
    # Each filter keeps all tokens above its threshold, so both keep those above the higher one.
    return jnp.maximum(kth_O, jnp.where(has_p_O, nucleus_O, -jnp.inf))


def _search(keys_OV: jax.Array, values_OV: jax.Array, least_O: jax.Array) -> jax.Array:
    """Return the largest t, [O], such that the values of the tokens with a key >= t add up to at
    least `least_O`; -inf where none does, or where `least_O` is 0. Searches bit by bit, the highest
    first, in an order-preserving uint32."""
    # 152k tokens, 4 rows: 16 ms of processor time, on 7 of a choice that sorts candidates alone.
    top_bit = jnp.uint32(1 << 31)
    bits_OV = jax.lax.bitcast_convert_type(keys_OV, jnp.uint32)
    # Bits of negative floats fall as the number grows, so turn all of them; those of positive ones
    # rise, and get a leading 1 to stand above.
    order_OV = jnp.where(bits_OV >= top_bit, ~bits_OV, bits_OV | top_bit)

    def with_bit(index: int, found_O: jax.Array) -> jax.Array:
        tried_O = found_O | (top_bit >> index)
        sums_O = jnp.where(order_OV >= tried_O[:, None], values_OV, 0).sum(-1)
        return jnp.where(sums_O >= least_O, tried_O, found_O)

    none_O = jnp.zeros(len(keys_OV), jnp.uint32)
    found_O = jax.lax.fori_loop(0, 32, with_bit, none_O)
    bits_O = jnp.where(found_O >= top_bit, found_O ^ top_bit, ~found_O)
    values_O = jax.lax.bitcast_convert_type(bits_O, jnp.float32)
    # Where none reaches `least_O`, since sums round, no bit is found, which reads as NaN.
    return jnp.where(jnp.isnan(values_O), -jnp.inf, values_O)


def _uniforms(settings: Settings) -> jax.Array:
    """Return two uniform numbers of each row's key, float32 [O, 2] in [0, 1)."""

    def of_row(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        # Named, so that a changed default of jax does not change answers.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.uniform(key, (2,))

    return jax.vmap(of_row)(settings.seed, settings.choice, settings.position)


def _draw(weights_OV: jax.Array, uniforms_O2: jax.Array) -> jax.Array:
    """Draw a token of each row with a probability in proportion to its weight, int32 [O]."""
    rows, vocab = weights_OV.shape
    blocks_ONB = jnp.pad(weights_OV, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    block_O = _draw_index(blocks_ONB.sum(-1), uniforms_O2[:, 0])
    weights_OB = jnp.take_along_axis(blocks_ONB, block_O[:, None, None], 1)[:, 0]
    return block_O * BLOCK + _draw_index(weights_OB, uniforms_O2[:, 1])


def _draw_index(weights_ON: jax.Array, uniform_O: jax.Array) -> jax.Array:
    """Return the first index whose cumulative weight is above the uniform's share of the total;
    never an index without weight."""
    # XLA adds a cumulative sum up in pieces, so it may fall by rounding from one index to the next.
    sums_ON = jnp.where(weights_ON > 0, jnp.cumsum(weights_ON, 1), 0)
    total_O = sums_ON.max(1)
    # The product may round up to the total, above which there is no index.
    share_O = jnp.minimum(uniform_O * total_O, jnp.nextafter(total_O, 0.0))
    return jnp.argmax(sums_ON > share_O[:, None], 1).astype(jnp.int32)
