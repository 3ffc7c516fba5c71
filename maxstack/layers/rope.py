"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the scalings of its frequencies
for long contexts. A table of cosines and sines is made once a step and shared by all layers; each
layer turns pairs of dimensions of queries and keys by it.

Shapes: B batch  T time  N heads  H head dim  R rotated pairs of a head.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxstack.schema.mixers import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


def rope_table(
    cfg: RopeConfig,
    positions_BT: Array,
    segments_BT: Array | None,
    head_dim: int,
    length: int | None = None,
) -> tuple[Array, Array]:
    """Cosines and sines of position * frequency, times the attention factor: float32 [B, T, 1, R].

    `segments_BT` numbers the documents of a row, None: one a row. It counts where a document's
    length chooses its frequencies (LongRoPE); `length` is then the length of all documents, None:
    found from the positions.
    """
    short_R, long_R = (jnp.asarray(rates, jnp.float32) for rates in frequencies(cfg, head_dim))
    rate = short_R
    if isinstance(cfg.scaling, LongRopeScaling):
        lengths_BT = (
            jnp.full((1, 1), length) if length else _document_length(positions_BT, segments_BT)
        )
        long_BT = lengths_BT > cfg.scaling.original_length
        rate = jnp.where(long_BT[:, :, None, None], long_R, short_R)
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * rate
    # On both cosines and sines, so on queries and on keys: scores grow by its square.
    factor = attention_factor(cfg)
    return _once(jnp.cos(angle)) * factor, _once(jnp.sin(angle)) * factor


def _once(x: Array) -> Array:
    """x, whose values are at most 1, behind a remainder. XLA computes a cosine again in every
    fusion that reads it (on a CPU, most of the fusion's time), but not a remainder: the reference
    step takes 544 ms and not 562. An `optimization_barrier` does not help, since XLA removes it
    before it fuses."""
    return jax.lax.rem(x, jnp.full_like(x, 2))


def rotate(x_BTNH: Array, table: tuple[Array, Array], cfg: RopeConfig) -> Array:
    """Turn the first 2R dimensions of each head by their angles, in float32, and cast back; the
    other dimensions pass.

    The pairs are (i, i + R), or (2i, 2i + 1) where `cfg` interleaves them.
    """
    cos, sin = table
    size = 2 * cos.shape[-1]
    x, rest = x_BTNH[..., :size].astype(jnp.float32), x_BTNH[..., size:]
    # Interleaved pairs are the paper's; halves are those of GPT-NeoX and transformers.
    first, second = (x[..., 0::2], x[..., 1::2]) if cfg.interleaved else jnp.split(x, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if cfg.interleaved:
        joined = jnp.stack(turned, axis=-1).reshape(x.shape)
    else:
        joined = jnp.concatenate(turned, axis=-1)
    joined = joined.astype(x_BTNH.dtype)
    return jnp.concatenate([joined, rest], axis=-1) if rest.shape[-1] else joined


def frequencies(cfg: RopeConfig, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Radians a position for each rotated pair, float64 [R]: of documents within the original
    length, and of longer ones."""
    scaling = cfg.scaling
    # Proportional scaling keeps the rates of the whole head and stops some; others spread them over
    # the rotated part.
    size = head_dim if isinstance(scaling, ProportionalScaling) else int(head_dim * cfg.fraction)
    rates = cfg.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if isinstance(scaling, LongRopeScaling):
        return rates / np.asarray(scaling.short_factor), rates / np.asarray(scaling.long_factor)
    scaled = SCALINGS[type(scaling)](scaling, cfg, rates) if scaling else rates
    return scaled, scaled


def attention_factor(cfg: RopeConfig) -> float:
    """Factor of cosines and sines, so that scores grow by its square; 1 but for YaRN
    and LongRoPE."""
    scaling = cfg.scaling
    if not isinstance(scaling, YarnScaling | LongRopeScaling):
        return 1.0
    # A model's own number comes before the formula.
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1, and 1 where the context is not extended (Peng et al. 2023,
    arXiv:2309.00071, eq. 22; the weight is DeepSeek's)."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _linear(scaling: LinearScaling, cfg: RopeConfig, rates: np.ndarray) -> np.ndarray:
    return rates / scaling.factor


def _proportional(scaling: ProportionalScaling, cfg: RopeConfig, rates: np.ndarray) -> np.ndarray:
    # Pairs that do not turn have rate 0: they pass as they are.
    turning = np.arange(len(rates)) < int(cfg.fraction * len(rates))
    return np.where(turning, rates / scaling.factor, 0.0)


def _llama3(scaling: Llama3Scaling, cfg: RopeConfig, rates: np.ndarray) -> np.ndarray:
    # Turns within the original length decide, so that a long wave, never seen whole, is stretched.
    turns = scaling.original_length * rates / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 Scout has high = low: no ramp in between.
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low
    return rates * (kept + (1 - kept) / scaling.factor)


def _yarn(scaling: YarnScaling, cfg: RopeConfig, rates: np.ndarray) -> np.ndarray:
    """Section 3.2 of the paper: `kept` falls from 1 to 0 between the pairs that turn beta_fast and
    beta_slow times in the original length."""

    def pair(turns: float) -> float:
        around = math.log(scaling.original_length / (turns * 2 * math.pi))
        return len(rates) * around / math.log(cfg.theta)

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Clipped as transformers does, at 2R - 1 and not at the last pair.
    low, high = max(low, 0), min(high, 2 * len(rates) - 1)
    kept = 1 - np.clip((np.arange(len(rates)) - low) / ((high - low) or 0.001), 0, 1)
    return rates * (kept + (1 - kept) / scaling.factor)


SCALINGS: dict[type, Callable[[Any, RopeConfig, np.ndarray], np.ndarray]] = {
    LinearScaling: _linear,
    ProportionalScaling: _proportional,
    Llama3Scaling: _llama3,
    YarnScaling: _yarn,
}


def _document_length(positions_BT: Array, segments_BT: Array | None) -> Array:
    """[B, T or 1]: positions up to the end of each token's document."""
    if segments_BT is None:
        return positions_BT.max(axis=1, keepdims=True) + 1
    b, t = segments_BT.shape
    # The row's end ends a document as well.
    last_BT = jnp.concatenate(
        [segments_BT[:, 1:] != segments_BT[:, :-1], jnp.ones((b, 1), bool)], axis=1
    )
    # The nearest last position from each one on.
    end_BT = jax.lax.cummin(jnp.where(last_BT, jnp.arange(t), t), axis=1, reverse=True)
    return jnp.take_along_axis(jnp.broadcast_to(positions_BT, (b, t)), end_BT, axis=1) + 1
