"""Updates of bfloat16 weights. A bfloat16 weight has 8 significant bits, so an update of less than
about a thousandth of it is rounded away; stochastic rounding keeps it on average."""

import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from maxstack.optim.wrappers import tree_paths

Rounding = Literal["nearest", "stochastic"]
STILL = "weights_still"
"""Metric: the share of trained weights of fewer bits than float32 that a step did not change."""


def apply_updates(params: Any, updates: Any, rounding: Rounding, key: jax.Array) -> Any:
    """The weights after their updates. `stochastic` rounds those of bfloat16 up or down with the
    probability of the other's distance (Gupta et al. 2015, arXiv:1502.02551), drawn for each weight
    from `key` and its path, the same on any mesh."""

    def one(path: str, param: jax.Array, update: jax.Array) -> jax.Array:
        if rounding == "stochastic" and param.dtype == jnp.bfloat16:
            # Added in float32, since a sum in bfloat16 has rounded already.
            wide = param.astype(jnp.float32) + update
            # crc32, since Python's own hash of a string differs between processes.
            return to_bfloat16(wide, jax.random.fold_in(key, zlib.crc32(path.encode())))
        return (param + update).astype(param.dtype)

    return jax.tree.map(one, tree_paths(params), params, updates)


def to_bfloat16(wide: jax.Array, key: jax.Array) -> jax.Array:
    """float32 rounded at random: its lower 16 bits are the probability, of 65,536, that it goes
    away from zero."""
    drawn = jax.random.bits(key, wide.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(wide, jnp.uint32) + drawn) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    # Added to the bits of infinity, a draw would make them NaN.
    return jnp.where(jnp.isfinite(wide), rounded, wide).astype(jnp.bfloat16)


def unchanged_share(old: Any, new: Any) -> dict[str, jax.Array]:
    """STILL, of weights before a step and after it; nothing where all are float32."""
    pairs = [
        (before, after)
        for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if before.dtype.itemsize < 4
    ]
    if not pairs:
        return {}
    same = sum(jnp.sum(before == after, dtype=jnp.float32) for before, after in pairs)
    return {STILL: same / sum(before.size for before, _ in pairs)}
