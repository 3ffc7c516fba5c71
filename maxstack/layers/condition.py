"""A time and a class as a vector. Shapes: B batch  D embed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxstack.layers.layer import Layer
from maxstack.layers.weight import lookup, project
from maxstack.schema.dit import FREQUENCIES, ConditionConfig
from maxstack.sharding import constrain

LONGEST = 10000.0
"""The longest wave, in steps."""


class Condition(Layer):
    """SiLU(MLP(waves of the time) + a row of the table of classes), which every adaptive norm
    reads (Peebles & Xie 2023, arXiv:2212.09748)."""

    cfg: ConditionConfig

    def __call__(self, time_B: Array, label_B: Array, dtype: str) -> Array:
        """`time_B` float32, from 0 to 1000; `label_B` int32, `classes` for none -> [B, D]."""
        # Sines in float32: at 1,000 turns bfloat16 would not tell neighbouring times apart.
        waves = time_waves(time_B).astype(dtype)
        hidden = constrain(project(waves, self.time_in, self.time_in_bias), "batch embed")
        hidden = jax.nn.silu(hidden)
        time_BD = project(hidden, self.time_out, self.time_out_bias)
        summed_BD = time_BD + lookup(self.table, label_B, dtype)
        return jax.nn.silu(constrain(summed_BD, "batch embed"))


def time_waves(time_B: Array) -> Array:
    """Cosines, then sines, with rates from 1 to 1 / 10000, as diffusers' DiT has them: float32
    [B, FREQUENCIES]."""
    half = FREQUENCIES // 2
    rates = (LONGEST ** -(np.arange(half) / (half - 1))).astype(np.float32)
    turns = time_B.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.cos(turns), jnp.sin(turns)], axis=-1)
