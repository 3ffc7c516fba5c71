"""The mixture of experts against a dense one; its report; and eight devices against one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxstack.layers import router
from maxstack.layers.context import Context
from maxstack.layers.mlp import ACTIVATIONS
from maxstack.layers.moe import MoE
from maxstack.schema.mlps import MoEConfig

EMBED, EXPERTS, HIDDEN, TIME = 8, 8, 4, 7
KINDS = {  # test_router.py has all kinds of routing
    "groups": {
        "top_k": 3,
        "router": {
            "score": "sigmoid",
            "selection_bias": True,
            "groups": 4,
            "top_groups": 2,
            "scale": 2.5,
        },
    },
    "clamped with biases": {"clamp": 1.0, "bias": True, "router": {"bias": True}},
    "scaled input, shared expert": {
        "top_k": 1,
        "router": {"score": "sigmoid", "normalize": False, "scale_input": True},
        "shared": {"hidden": 3},
    },
    "normed, gated shared expert": {
        "top_k": EXPERTS,
        "activation": "gelu_tanh",
        "router": {"normed": True},
        "shared": {"hidden": 5, "gate": True},
    },
}


def config(**fields):
    return MoEConfig(**{"kind": "moe", "experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, **fields})


def drawn(cfg, kind=MoE):
    """The module's graph and random weights."""
    rng, (graph, state) = (
        np.random.default_rng(0),
        nnx.split(kind(cfg, EMBED, std=1.0, out_std=1.0, dtype="float32")),
    )
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


def dense(cfg, w, x, residual, experts):
    """Every expert of every token, and a mask from the choices `experts` [B, T, C]; weights from
    the scores."""
    read = x
    if cfg.router.normed:
        read = (
            residual
            / jnp.sqrt((residual**2).mean(-1, keepdims=True) + cfg.router.norm_eps)
            * w["router_scale"]
            / EMBED**0.5
        )
    logits = read @ w["router"] + w.get("router_bias", 0.0)
    mask = jnp.zeros(logits.shape).at[*jnp.indices(experts.shape)[:2], experts].set(1.0)
    share = mask * (
        jax.nn.sigmoid(logits)
        if cfg.router.score == "sigmoid"
        else jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    )
    if cfg.router.normalize:
        share = share / share.sum(-1, keepdims=True)
    share = share * cfg.router.scale * w.get("expert_scale", 1.0)
    into = x[:, :, None] * (share if cfg.router.scale_input else jnp.ones_like(share))[..., None]
    gate, up = (
        jnp.einsum("BTED,EDF->BTEF", into, w[name]) + w.get(f"{name}_bias", 0.0)
        for name in ("gate", "up")
    )
    if cfg.clamp:
        hidden = (
            (jnp.clip(up, -cfg.clamp, cfg.clamp) + 1)
            * (g := jnp.minimum(gate, cfg.clamp))
            / (1 + jnp.exp(-1.702 * g))
        )
    else:
        hidden = ACTIVATIONS[cfg.activation](gate) * up
    each = jnp.einsum("BTEF,EFD->BTED", hidden, w["down"]) + w.get("down_bias", 0.0)
    out = (each * (mask if cfg.router.scale_input else share)[..., None]).sum(axis=2)
    if cfg.shared:
        both = (
            ACTIVATIONS[cfg.activation](x @ w["shared"]["gate"])
            * (x @ w["shared"]["up"])
            @ w["shared"]["down"]
        )
        out = out + (
            both * jax.nn.sigmoid(x @ w["shared_gate"])[..., None] if cfg.shared.gate else both
        )
    return out


def choices(cfg, state, x, residual):
    """The experts that the layer's own router takes; test_router.py compares them with a loop."""
    w = nnx.to_pure_dict(state)
    read = (
        router.normalize_input(residual, w["router_scale"], cfg.router.norm_eps)
        if cfg.router.normed
        else x
    )
    return router.route(
        cfg.router,
        cfg.top_k,
        router.logits(read, w["router"], w.get("router_bias")),
        w.get("selection_bias"),
    )[0]


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
@pytest.mark.slow
def test_the_mixture_equals_the_dense_one_in_values_and_gradients(fields):
    cfg, (x, residual) = config(**fields), streams()
    graph, state = drawn(cfg)
    probe = streams(seed=2)[0]

    def ours(state, x, residual):
        out, _ = run(graph, state, x, residual)
        return (out * probe).sum(), out

    def theirs(state, x, residual):
        out = dense(
            cfg,
            nnx.to_pure_dict(state),
            x,
            residual,
            jax.lax.stop_gradient(choices(cfg, state, x, residual)),
        )
        return (out * probe).sum(), out

    got, want = jax.jit(
        lambda *given: [jax.grad(f, (0, 1, 2), has_aux=True)(*given) for f in (ours, theirs)]
    )(state, x, residual)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), got, want)


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
