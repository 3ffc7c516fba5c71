"""Multi-head latent attention against its definition in numpy, and that documents stay apart."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from maxstack import sharding
from maxstack.layers.context import Context
from maxstack.layers.mla import MLA, request
from maxstack.layers.rope import rope_table
from maxstack.schema.mesh import MeshConfig
from maxstack.schema.mixers import MLAConfig

EMBED, T = 12, 14
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, T, EMBED)), jnp.float32)
POSITIONS, SEGMENTS = (
    jnp.asarray([[*range(5), *range(2), *range(7)]] * 8),
    jnp.asarray([[1] * 5 + [2] * 2 + [3] * 7] * 8, jnp.int32),
)
YARN = {
    "scaling": {
        "kind": "yarn",
        "factor": 40.0,
        "original_length": 8,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    }
}


def build(seed=1, **switches):
    """A layer whose every weight is random, so that none can go unused."""
    given = {
        "kind": "mla",
        "heads": 4,
        "kv_lora": 10,
        "nope_dim": 3,
        "rope_dim": 4,
        "value_dim": 5,
        "norm": {"eps": 1e-3},
    } | switches
    layer = MLA(MLAConfig.model_validate(given), EMBED, std=1.0, out_std=1.0, dtype="float32")
    rng = np.random.default_rng(seed)
    for _, param in sorted(nnx.to_flat_state(nnx.state(layer)), key=lambda pair: pair[0]):
        param.set_value(jnp.asarray(rng.normal(size=param.get_value().shape) * 0.5, jnp.float32))
    return layer


def forward(graph, state, x, positions, segments):
    layer = nnx.merge(graph, state)
    cfg = layer.cfg
    return layer(
        x,
        Context(
            positions,
            segments,
            {(cfg.rope, cfg.rope_dim): rope_table(cfg.rope, positions, segments, cfg.rope_dim)},
        ),
    )


_run = jax.jit(forward, static_argnums=0)


def run(layer, x=X, positions=None, segments=None):
    return np.asarray(
        _run(
            *nnx.split(layer),
            x,
            jnp.arange(x.shape[1])[None] if positions is None else positions,
            segments,
        )
    )


def by_loop(layer, x):
    """One sequence [T, D] through the definition, a head and a query at a time, in float64; cosines
    and sines are the table's."""
    w = {
        "/".join(map(str, path)): np.asarray(param.get_value(), np.float64)
        for path, param in nnx.to_flat_state(nnx.state(layer))
    }
    x, cfg = np.asarray(x, np.float64), layer.cfg
    cos, sin = (
        np.asarray(part[0, :, 0], np.float64)
        for part in rope_table(cfg.rope, jnp.arange(len(x))[None], None, cfg.rope_dim)
    )

    def norm(y, name):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + cfg.norm.eps) * w[f"{name}/scale"]

    def turned(y, t):
        z = (y[0::2] + 1j * y[1::2] if cfg.rope.interleaved else y[:2] + 1j * y[2:]) * (
            cos[t] + 1j * sin[t]
        )
        return (
            np.stack([z.real, z.imag], -1).ravel()
            if cfg.rope.interleaved
            else np.concatenate([z.real, z.imag])
        )

    def biased(y, name):
        return y + w.get(name, 0.0)

    q = (
        np.einsum(
            "tq,qnh->tnh",
            norm(biased(x @ w["query_down"], "query_down_bias"), "query_norm"),
            w["query_up"],
        )
        if cfg.q_lora
        else np.einsum("td,dnh->tnh", x, w["query"])
    )
    latent, rope = (
        norm(biased(x @ w["kv_down"], "kv_down_bias"), "kv_norm"),
        biased(x @ w["key_rope"], "key_rope_bias"),
    )
    scale, scaling = 1 / math.sqrt(cfg.nope_dim + cfg.rope_dim), cfg.rope.scaling
    scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2 if scaling else 1
    out = np.zeros(x.shape)
    for n, t in np.ndindex(cfg.heads, len(x)):
        seen = t + 1 if cfg.causal else len(x)
        keys = np.stack(
            [
                np.concatenate([latent[s] @ w["key_up"][:, n], turned(rope[s], s)])
                for s in range(seen)
            ]
        )
        score = (
            keys
            @ np.concatenate([q[t, n, : cfg.nope_dim], turned(q[t, n, cfg.nope_dim :], t)])
            * scale
        )
        p = np.exp(score - score.max())
        out[t] += p / p.sum() @ (latent[:seen] @ w["value_up"][:, n]) @ w["out"][n]
    return biased(out, "out_bias")


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"q_lora": 6},
        {"q_lora": 6, "bias": True, "backend": "reference"},
        {"bias": True, "rope": YARN | {"interleaved": True}},
        {"causal": False},
    ],
    ids=str,
)
def test_the_layer_is_its_definition(switches):
    layer = build(**switches)
    np.testing.assert_allclose(run(layer)[0], by_loop(layer, X[0]), rtol=1e-4, atol=3e-5)


def test_weights_have_the_names_and_shapes_that_checkpoints_know():
    def shapes(**switches):
        return {
            "/".join(map(str, path)): param.get_value().shape
            for path, param in nnx.to_flat_state(nnx.state(build(**switches)))
        }

    rest = {
        "kv_down": (12, 10),
        "key_rope": (12, 4),
        "kv_norm/scale": (10,),
        "key_up": (10, 4, 3),
        "value_up": (10, 4, 5),
        "out": (4, 5, 12),
    }
    latent = {"query_down": (12, 6), "query_norm/scale": (6,), "query_up": (6, 4, 7)}
    biases = {"kv_down_bias": (10,), "key_rope_bias": (4,), "out_bias": (12,)}
    assert shapes() == rest | {"query": (12, 4, 7)}
    assert shapes(q_lora=6) == rest | latent
    assert shapes(bias=True) == rest | biases | {"query": (12, 4, 7)}
    assert shapes(q_lora=6, bias=True) == rest | latent | biases | {"query_down_bias": (6,)}


@pytest.mark.parametrize(
    ("scaling", "sharper"),
    [
        ({}, 1),
        ({"mscale_all_dim": None}, 1),
        ({"factor": 1.0}, 1),
        ({"mscale_all_dim": 1.0}, 1.3688879454**2),
        ({"mscale_all_dim": 0.707}, 1.2608037774**2),
    ],
)
def test_yarn_sharpens_the_scores_by_its_factor_for_all_dimensions(scaling, sharper):
    rope = {"scaling": YARN["scaling"] | scaling} if scaling else {}
    assert request(build(rope=rope).cfg).scale == pytest.approx(7**-0.5 * sharper)


def test_a_packed_row_equals_its_documents_alone():
    layer = build(q_lora=6)
    packed = run(layer, X, POSITIONS, SEGMENTS)
    for begin, end in ((0, 5), (5, 7), (7, 14)):
        alone = run(layer, X[:, np.arange(T) % (end - begin) + begin])[:, : end - begin]
        np.testing.assert_allclose(packed[:, begin:end], alone, rtol=1e-4, atol=2e-5)


def test_changing_one_document_never_changes_its_neighbours():
    layer = build(q_lora=6)
    before, after = (
        run(layer, X, POSITIONS, SEGMENTS),
        run(layer, X.at[:, 5:7].add(1.0), POSITIONS, SEGMENTS),
    )
    for places in (slice(0, 5), slice(7, T)):
        np.testing.assert_array_equal(before[:, places], after[:, places])
    assert not np.array_equal(before[:, 5:7], after[:, 5:7])


def test_bfloat16_stays_near_float32():
    layer = build(q_lora=6)
    short, exact = run(layer, X.astype(jnp.bfloat16)), run(layer)
    assert short.dtype == jnp.bfloat16
    assert np.abs(short.astype(np.float32) - exact).mean() < 0.03 * exact.std()


@pytest.mark.slow
def test_eight_devices_agree_with_one():
    graph, state = nnx.split(build(q_lora=6, bias=True, rope=YARN))
    mesh_cfg = MeshConfig(data=2, fsdp=2, tensor=2)
    mesh = sharding.make_mesh(mesh_cfg, jax.devices())

    def total(state, x):
        return jnp.square(forward(graph, state, x, POSITIONS, SEGMENTS)).sum()

    def place(value, axes):
        return jax.device_put(value, NamedSharding(mesh, sharding.spec(axes, mesh_cfg.rules)))

    wanted = jax.jit(jax.value_and_grad(total))(state, X)
    state = nnx.map_state(
        lambda path, param: param.replace(place(param.get_value(), param.get_metadata()["axes"])),
        state,
    )
    with sharding.use(mesh, mesh_cfg):
        got = jax.jit(jax.value_and_grad(total))(state, place(X, ["batch"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, wanted)
