"""Norms against their formulas in float64, and the switches of their configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.layers.norm import Norm
from maxstack.schema.mixers import NormConfig

X = np.random.default_rng(0).normal(1.0, 3.0, (2, 5, 8))
SCALE, BIAS = np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)


def run(x=X, **switches):
    norm = Norm(NormConfig(**switches), 8, dtype="float32")
    if norm.cfg.scale:
        norm.scale.set_value(jnp.asarray(SCALE, jnp.float32))
    if norm.cfg.bias:
        norm.bias.set_value(jnp.asarray(BIAS, jnp.float32))
    return norm(jnp.asarray(x, jnp.float32))


RMS = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6)
LAYER = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-6)
CASES = [
    ({}, RMS * SCALE),
    ({"zero_centered": True}, RMS * (1 + SCALE)),
    ({"scale": False}, RMS),
    ({"bias": True}, RMS * SCALE + BIAS),
    ({"kind": "layer", "bias": True}, LAYER * SCALE + BIAS),
    ({"kind": "layer", "scale": False}, LAYER),
]


@pytest.mark.parametrize(
    ("switches", "expected"), CASES, ids=[str(switches) for switches, _ in CASES]
)
def test_a_norm_is_its_formula(switches, expected):
    np.testing.assert_allclose(run(**switches), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("switches", [switches for switches, _ in CASES], ids=str)
def test_a_norms_gradient_is_that_of_its_formula(switches):
    norm = NormConfig(**switches)

    def formula(x, scale):
        x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
        y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return jnp.sin(y * (scale + norm.zero_centered) if norm.scale else y).sum()

    def ours(x, scale):
        layer = Norm(norm.model_copy(update={"bias": False}), 8, dtype="float32")
        if norm.scale:
            layer.scale.set_value(scale)
        return jnp.sin(layer(x)).sum()

    x, scale = jnp.asarray(X, jnp.float32), jnp.asarray(SCALE, jnp.float32)
    for got, want in zip(
        jax.grad(ours, (0, 1))(x, scale), jax.grad(formula, (0, 1))(x, scale), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_sums_are_taken_in_float32_and_the_result_has_the_inputs_dtype():
    x = jnp.asarray(X * 100, jnp.bfloat16)
    norm = Norm(NormConfig(), 8, dtype="float32")
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), norm(x.astype(jnp.float32)).astype(jnp.bfloat16))
