"""Norms against their formulas in float64, and the switches of their configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.layers.norm import Norm
from maxstack.schema.mixers import NormConfig

X = np.random.default_rng(0).normal(1.0, 3.0, (2, 5, 8))
SCALE, BIAS = np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)


SWITCHES = [
    {},
    {"zero_centered": True},
    {"scale": False},
    {"bias": True},
    {"kind": "layer", "bias": True},
    {"kind": "layer", "scale": False},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_norm_and_its_gradients_are_those_of_its_formula(switches):
    cfg = NormConfig(**switches)

    def formula(x, scale):
        x = x - x.mean(-1, keepdims=True) if cfg.kind == "layer" else x
        y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + cfg.eps)
        y = y * (scale + cfg.zero_centered) if cfg.scale else y
        return jnp.sin(y + BIAS if cfg.bias else y).sum()

    def ours(x, scale):
        layer = Norm(cfg, 8, dtype="float32")
        if cfg.scale:
            layer.scale.set_value(scale)
        if cfg.bias:
            layer.bias.set_value(jnp.asarray(BIAS, jnp.float32))
        return jnp.sin(layer(x)).sum()

    x, scale = jnp.asarray(X, jnp.float32), jnp.asarray(SCALE, jnp.float32)
    got, wanted = (
        jax.tree.leaves(jax.value_and_grad(f, (0, 1))(x, scale)) for f in (ours, formula)
    )
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_sums_are_taken_in_float32_and_the_result_has_the_inputs_dtype():
    x = jnp.asarray(X * 100, jnp.bfloat16)
    norm = Norm(NormConfig(), 8, dtype="float32")
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), norm(x.astype(jnp.float32)).astype(jnp.bfloat16))
