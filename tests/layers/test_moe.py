"""Capacity and reports of the mixture of experts.

Its values and gradients are shown by the golden families (tests/models/test_parity.py), by the
kernels of the grouped matmul and, on meshes, by test_dispatch.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxstack.layers.context import Context
from maxstack.layers.moe import MoE
from maxstack.schema.mlps import MoEConfig

EMBED, EXPERTS, HIDDEN, TIME = 8, 8, 4, 7


def config(**fields):
    return MoEConfig(**{"kind": "moe", "experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, **fields})


def drawn(cfg):
    """The module's graph and random weights."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(MoE(cfg, EMBED, dtype="float32"))
    return graph, nnx.map_state(
        lambda path, p: p.replace(jnp.asarray(rng.normal(size=p.shape), p.dtype)), state
    )


def streams(batch=2, time=TIME, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(batch, time, EMBED)), jnp.float32) for _ in range(2))


def context(segments=None):
    return Context(
        jnp.arange(TIME)[None], segments, real_BT=None if segments is None else segments > 0
    )


@functools.partial(jax.jit, static_argnums=0)
def run(graph, state, x, residual, segments=None):
    return nnx.merge(graph, state)(x, residual, context(segments))


def test_dropped_choices_give_nothing_and_the_first_stay():
    cfg, (x, residual) = config(top_k=1, capacity=2.0, router={"bias": True}), streams()
    graph, state = drawn(cfg)
    state["router_bias"] = state["router_bias"].replace(jnp.zeros(EXPERTS).at[5].set(100.0))
    out, report = run(graph, state, x, residual, np.int32([[1] * TIME, [0, 1, 1, 1, 1, 1, 1]]))
    free = run(*drawn(config(top_k=1, router={"bias": True}))[:1], state, x, residual)[0]
    kept = np.zeros((2, TIME), bool)
    kept[0, :2] = kept[1, 1:3] = True  # 2.0 x 7 tokens / 8 experts: two of a row
    np.testing.assert_allclose(out, jnp.where(kept[:, :, None], free, 0.0), rtol=1e-6)
    assert (report["load"][5], report["dropped"]) == (13, 9)


LOSSES = {"balance_loss": 0.1, "z_loss": 0.01}
SEGMENTS = np.int32(
    [[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]]
)


def test_the_report_of_a_batch_is_the_sum_of_its_halves():
    graph, state = drawn(config(router=LOSSES))
    x, residual = streams(batch=4)
    whole, *halves = (
        run(graph, state, x[part], residual[part], SEGMENTS[part])[1]
        for part in (slice(4), slice(2), slice(2, 4))
    )
    assert whole.keys() == {"load", "router_loss"}
    jax.tree.map(
        lambda a, *parts: np.testing.assert_allclose(a, sum(parts), rtol=1e-6), whole, *halves
    )


def test_padding_counts_in_no_report():
    graph, state = drawn(config(router=LOSSES))
    x, residual = streams(batch=4)
    padding = (SEGMENTS == 0)[:, :, None]
    before, after = (
        run(graph, state, x, residual, SEGMENTS)[1],
        run(graph, state, jnp.where(padding, -3.0, x), residual, SEGMENTS)[1],
    )
    assert before["load"].sum() == 2 * (~padding).sum()
    jax.tree.map(np.testing.assert_array_equal, before, after)
