"""The decoder against an independent numpy model, its pattern, and what each remat policy keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxstack.models.model import abstract, initial
from maxstack.schema.decoder import DecoderConfig


def build(**changes):
    cfg = DecoderConfig.model_validate(tiny.model(**changes))
    return nnx.merge(
        abstract(cfg)[0], nnx.State(initial(cfg, 0))
    )  # not jitted: one compilation a shape instead of one a weight


def perturbed(model):
    """Noise on every parameter: norms at one and biases at zero hide mistakes."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph,
        jax.tree.unflatten(
            tree, [leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
        ),
    )


FULL = {
    "kind": "attention",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "qk_norm": {"eps": 1e-5},
    "qkv_bias": True,
    "out_bias": True,
    "soft_cap": 5.0,
    "scale": 0.3,
    "rope": {"theta": 500.0},
}
REST = {
    "mlp": {"kind": "gated", "hidden": 48, "activation": "gelu_tanh", "bias": True},
    "norm": {"zero_centered": True},
}
RICH = {
    "blocks": {
        "local": {"mixer": FULL | {"window": 5}} | REST,
        "global": {"mixer": FULL | {"rope": None}} | REST,
    },
    "head": {"tied": True, "bias": True, "soft_cap": 3.0},
    "embed_scale": 5.0,
    "prefix": ["global"],
    "layers": 4,
}


def in_numpy(model, tokens, positions, segments):
    """The whole forward pass in float64, layer by layer, from the definitions."""
    cfg, get = model.cfg, lambda v: np.asarray(v[...], np.float64)

    def norm(x, module, spec):
        return (
            x
            / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps)
            * (get(module.scale) + spec.zero_centered)
        )

    def rotate(x, theta):
        half = x.shape[-1] // 2
        angle = positions[..., None, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def layer(x, block, spec):
        mix, m, h = spec.mixer, block.mixer, norm(x, block.mixer_norm, spec.norm)
        q, k, v = (
            np.einsum("btd,dnh->btnh", h, get(getattr(m, n))) + get(getattr(m, n + "_bias"))
            for n in ("query", "key", "value")
        )
        q, k = norm(q, m.query_norm, mix.qk_norm), norm(k, m.key_norm, mix.qk_norm)
        if mix.rope:
            q, k = rotate(q, mix.rope.theta), rotate(k, mix.rope.theta)
        k, v = (np.repeat(y, mix.heads // mix.kv, axis=2) for y in (k, v))
        s = np.einsum("btnh,bsnh->bnts", q, k) * mix.scale
        s = mix.soft_cap * np.tanh(s / mix.soft_cap)
        gap = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
        seen = (
            (gap >= 0)
            & (gap < (mix.window or 10**9))
            & (segments[:, :, None] == segments[:, None, :])
        )
        p = np.exp(np.where(seen[:, None], s, -np.inf))
        o = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("btnh,nhd->btd", o, get(m.out)) + get(m.out_bias)
        h = norm(x, block.mlp_norm, spec.norm)
        gate, up = (
            h @ get(getattr(block.mlp, n)) + get(getattr(block.mlp, n + "_bias"))
            for n in ("gate", "up")
        )
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return x + (gate * up) @ get(block.mlp.down) + get(block.mlp.down_bias)

    x = get(model.embed)[tokens] * cfg.embed_scale
    x = layer(x, model.prefix["0"], cfg.blocks["global"])
    for name in ("local", "global"):
        graph, state = nnx.split(model.blocks[name])
        x = layer(x, nnx.merge(graph, jax.tree.map(lambda a: a[0], state)), cfg.blocks[name])
    x = norm(layer(x, model.rest["0"], cfg.blocks["local"]), model.norm, cfg.norm)
    logits = x @ get(model.embed).T + get(model.head_bias)
    return cfg.head.soft_cap * np.tanh(logits / cfg.head.soft_cap)


def test_every_switch_agrees_with_an_independent_numpy_model():
    model, data = perturbed(build(**RICH)), tiny.batch(tiny.config())
    logits = nnx.jit(lambda model, data: model.logits(model.hidden(data)))(model, data)
    want = in_numpy(model, data["tokens"], data["positions"], data["segments"])
    np.testing.assert_allclose(logits, want, atol=2e-5)


def test_the_pattern_repeats_after_the_prefix_until_the_layers_are_used_up():
    cfg = DecoderConfig.model_validate(
        tiny.model(layers=8, pattern=["local", "local", "global"], prefix=["global"])
    )
    assert cfg.order == ("global", *("local", "local", "global") * 2, "local")


@pytest.mark.slow
def test_unrolling_the_scan_changes_no_value():
    data = {name: jnp.asarray(x) for name, x in tiny.batch(tiny.config()).items()}
    outs = [
        nnx.jit(lambda model, data: model.hidden(data))(build(layers=6, unroll=n), data)
        for n in (1, 3)
    ]
    np.testing.assert_allclose(*outs, atol=1e-5)


@functools.cache
def kept(policy, names=()):
    """How many matmuls the forward and backward pass hold together, and the text of their jaxpr."""
    cfg = DecoderConfig.model_validate(
        tiny.model(layers=2, remat={"policy": policy, "names": list(names)})
    )
    graph, state = abstract(cfg)
    data = {name: jnp.asarray(x) for name, x in tiny.batch(tiny.config()).items()}
    text = str(jax.make_jaxpr(jax.grad(lambda s: nnx.merge(graph, s).hidden(data).sum()))(state))
    return text.count("dot_general["), text


@pytest.mark.slow
def test_remat_none_recomputes_nothing_and_full_recomputes_every_matmul():
    none, text = kept("none")
    full, full_text = kept("full")
    assert "remat" not in text and "checkpoint" not in text
    assert "remat" in full_text or "checkpoint" in full_text
    assert full > none


@pytest.mark.slow
def test_dots_recompute_no_matmul_that_full_does():
    assert kept("none")[0] <= kept("dots")[0] <= kept("dots_no_batch")[0] <= kept("full")[0]
    assert kept("dots")[0] < kept("full")[0]


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "context", "mixer_out", "mlp_gate", "mlp_up", "mlp_out"]
)
def test_saving_a_tensor_by_name_recomputes_less_than_full(name):
    count, text = kept("save", (name,))
    assert f"name={name}" in text
    assert count <= kept("full")[0]
    if name not in ("mlp_out", "context"):
        assert count < kept("full")[0]


def test_offload_moves_the_named_tensor_to_host_memory():
    _, text = kept("offload", ("mlp_gate",))
    assert "pinned_host" in text or "<host>" in text
