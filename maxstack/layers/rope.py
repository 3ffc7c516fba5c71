"""Rotary position embedding over the two halves of a head (Su et al. 2021, arXiv:2104.09864)."""

import jax
import jax.numpy as jnp

from maxstack.layers.config import RopeConfig


def rope_table(cfg: RopeConfig, positions_BT: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, head_dim / 2], of position * theta^(-2i / head_dim)."""
    wavelength = cfg.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * wavelength
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (i, i + H/2) by its angle, in float32, and cast back."""
    cos, sin = table
    left, right = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BTNH.dtype)
