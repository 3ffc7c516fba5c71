"""Small parameter trees for the tests of the optimizer."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxstack.optim import build, trained_mask
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.optimizer.paths import ParamInfo
from maxstack.step import combine, select

LAYERS, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 2, 6, 2, 4, 5, 7


def info(*axes):
    """ParamInfo of a weight with these logical axes."""
    sizes = {
        "layers": LAYERS,
        "embed": EMBED,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "mlp": MLP,
        "vocab": VOCAB,
        "norm": EMBED,
        "expert": 3,
    }
    return ParamInfo(tuple(sizes[axis] for axis in axes), jnp.dtype("float32"), axes)


INFO = {
    "blocks": {
        "block": {
            "mixer": {
                "query": info("layers", "embed", "heads", "head_dim"),
                "query_bias": info("layers", "heads", "head_dim"),
                "out": info("layers", "heads", "head_dim", "embed"),
            },
            "mlp": {"gate": info("layers", "embed", "mlp"), "down": info("layers", "mlp", "embed")},
            "mixer_norm": {"scale": info("layers", "norm")},
        }
    },
    "embed": info("vocab", "embed"),
    "head": info("embed", "vocab"),
    "norm": {"scale": info("norm")},
}
SMALL = {"w": info("embed", "mlp"), "stack": info("layers", "embed", "mlp"), "norm": info("norm")}


def tree(of, seed=0):
    """Normal random arrays of the shapes in a tree of ParamInfo."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), of)


def train(tx, of, steps=3, params=None):
    """Parameters, last updates and state after some updates with random gradients, the same for
    every transformation."""
    params = tree(of) if params is None else params
    state, updates = jax.jit(tx.init)(params), None
    update = jax.jit(tx.update)
    for step in range(steps):
        grads = tree(of, seed=100 + step)
        updates, state = update(grads, state, params, value=jnp.float32(1.0), grad=grads)
        params = jax.tree.map(jnp.add, params, updates)
    return params, updates, state


def first(tx, grads, params):
    """The first updates that a transformation makes of these gradients."""
    return jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])(
        grads, params
    )


def built(of=INFO, steps=100, **optimizer):
    """The transformation of a configuration with a constant learning rate, unless it says
    otherwise, on whole trees, as a step uses it."""
    return of_whole(OptimizerConfig(**{"schedule": None, **optimizer}), steps, of)


def of_whole(cfg, steps, of):
    """A configuration's transformation, given all parameters: those that are not trained have no
    state, and their updates are zero."""
    chosen = trained_mask(cfg, of)
    tx = build(cfg, steps, of)

    def update(grads, state, params, **extra):
        updates, state = tx.update(select(chosen, grads), state, select(chosen, params), **extra)
        return combine(
            updates,
            jax.tree.map(jnp.zeros_like, select(jax.tree.map(operator.not_, chosen), params)),
        ), state

    return optax.GradientTransformationExtraArgs(
        lambda params: tx.init(select(chosen, params)), update
    )
