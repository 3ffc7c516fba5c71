"""The gated and the dense MLP against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from maxstack.layers import mlp
from maxstack.layers.mlp import ACTIVATIONS

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name):
    x = np.linspace(-4, 4, 41)
    np.testing.assert_allclose(
        ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), FORMULAS[name](x), atol=3e-6
    )


def test_a_gate_has_the_gradients_of_its_formula():
    gate, up = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)

    def total(f):
        return jax.grad(lambda gate, up: jnp.sin(f(gate, up)).sum(), (0, 1))(gate, up)

    ours = total(lambda gate, up: mlp.gate(jax.nn.silu, gate, up))
    wanted = total(lambda gate, up: gate * jax.nn.sigmoid(gate) * up)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)
