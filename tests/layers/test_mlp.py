"""The gated and the dense MLP against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from maxstack.layers.context import Context
from maxstack.layers.mlp import ACTIVATIONS, DenseMLP, GatedMLP
from maxstack.schema.mlps import DenseMLPConfig, GatedMLPConfig

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
CONTEXT = Context(jnp.arange(4)[None])


def drawn(module):
    """The module with random weights, and the weights by name."""
    rng, graph, state = np.random.default_rng(0), *nnx.split(module)
    state = nnx.map_state(
        lambda path, p: p.replace(jnp.asarray(rng.normal(size=p.shape), p.dtype)), state
    )
    return nnx.merge(graph, state), {
        path[-1]: np.asarray(p.get_value(), np.float64) for path, p in nnx.to_flat_state(state)
    }


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name):
    x = np.linspace(-4, 4, 41)
    np.testing.assert_allclose(
        ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), FORMULAS[name](x), atol=3e-6
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["gated", "dense"])
def test_an_mlp_is_its_formula(kind, bias):
    configs, modules = (
        {"gated": GatedMLPConfig, "dense": DenseMLPConfig},
        {"gated": GatedMLP, "dense": DenseMLP},
    )
    module, w = drawn(
        modules[kind](
            configs[kind](kind=kind, hidden=6, activation="relu2", bias=bias),
            5,
            std=1.0,
            out_std=1.0,
            dtype="float32",
        )
    )
    names = ("gate", "up", "down") if kind == "gated" else ("up", "down")
    assert w.keys() == {*names, *(f"{name}_bias" for name in names if bias)}
    x = np.random.default_rng(1).normal(size=(2, 4, 5))

    def line(x, name):
        return x @ w[name] + w.get(f"{name}_bias", 0.0)

    act = FORMULAS["relu2"]
    hidden = act(line(x, "gate")) * line(x, "up") if kind == "gated" else act(line(x, "up"))
    out, report = module(jnp.asarray(x, jnp.float32), jnp.zeros((2, 4, 5)), CONTEXT)
    np.testing.assert_allclose(out, line(hidden, "down"), rtol=1e-4, atol=1e-4)
    assert report == {}


@pytest.mark.parametrize("kind", ["gated", "dense"])
def test_the_gradients_of_an_mlp_are_those_of_its_formula(kind):
    """Wide and narrow: the gradient of a matrix with more rows than columns is multiplied another
    way."""
    configs, modules = (
        {"gated": GatedMLPConfig, "dense": DenseMLPConfig},
        {"gated": GatedMLP, "dense": DenseMLP},
    )
    module, _ = drawn(
        modules[kind](
            configs[kind](kind=kind, hidden=12, activation="silu"),
            5,
            std=1.0,
            out_std=1.0,
            dtype="float32",
        )
    )
    graph, state = nnx.split(module)
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 5)), jnp.float32)

    def formula(state, x):
        w = {path[-1]: p.get_value() for path, p in nnx.to_flat_state(state)}
        inner = x @ w["gate"] if kind == "gated" else x @ w["up"]
        return jnp.sin(
            (inner * jax.nn.sigmoid(inner) * (x @ w["up"] if kind == "gated" else 1)) @ w["down"]
        ).sum()

    def ours(state, x):
        return jnp.sin(nnx.merge(graph, state)(x, x, CONTEXT)[0]).sum()

    got, wanted = (jax.tree.leaves(jax.grad(f, (0, 1))(state, x_BTD)) for f in (ours, formula))
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
