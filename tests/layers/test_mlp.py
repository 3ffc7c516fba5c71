"""The gated and the dense MLP against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from maxstack.layers.context import Context
from maxstack.layers.layer import layer_of
from maxstack.layers.mlp import ACTIVATIONS
from maxstack.schema.mlps import DenseMLPConfig, GatedMLPConfig

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "section", [GatedMLPConfig(kind="gated", hidden=12), DenseMLPConfig(kind="dense", hidden=12)]
)
def test_an_mlp_and_its_gradients_are_those_of_its_formula(section, bias):
    """Wide and narrow: the gradient of a matrix with more rows than columns is multiplied another
    way."""
    cfg = section.model_copy(update={"bias": bias, "activation": "silu"})
    rng, (graph, state) = (
        np.random.default_rng(0),
        nnx.split(layer_of(cfg)(cfg, 5, dtype="float32")),
    )
    w = {
        name: jnp.asarray(rng.normal(size=weight.shape), jnp.float32)
        for name, weight in nnx.to_pure_dict(state).items()
    }
    names = ("gate", "up", "down") if cfg.kind == "gated" else ("up", "down")
    assert w.keys() == {*names, *(f"{name}_bias" for name in names if bias)}
    x_BTD = jnp.asarray(rng.normal(size=(2, 4, 5)), jnp.float32)

    def formula(w, x):
        def line(x, name):
            return x @ w[name] + w.get(f"{name}_bias", 0.0)

        hidden = line(x, "up")
        if cfg.kind == "gated":
            hidden = jax.nn.silu(line(x, "gate")) * hidden
        else:
            hidden = jax.nn.silu(hidden)
        return jnp.sin(line(hidden, "down")).sum()

    def ours(w, x):
        out, report = nnx.merge(graph, nnx.State(w))(x, x, Context(jnp.arange(4)[None]))
        assert report == {}
        return jnp.sin(out).sum()

    got, wanted = (jax.value_and_grad(f, (0, 1))(w, x_BTD) for f in (ours, formula))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
