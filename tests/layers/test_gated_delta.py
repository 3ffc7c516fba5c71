"""The gated delta layer against its definition in numpy, and that documents stay apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from maxstack import sharding
from maxstack.layers.context import Context
from maxstack.layers.gated_delta import GatedDelta, convolve
from maxstack.layers.weight import draw
from maxstack.schema.mesh import MeshConfig
from maxstack.schema.mixers import GatedDeltaConfig

EMBED, T = 12, 29
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, T, EMBED)), jnp.float32)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 2 + [3] * 14 + [0] * 8] * 8, jnp.int32)


def build(seed=1, **switches):
    """A layer whose every weight is random, so that none can go unused."""
    given = {
        "kind": "gated_delta",
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 6,
        "value_dim": 4,
        "chunk": 4,
        "norm": {"eps": 1e-3},
    } | switches
    layer = GatedDelta(
        GatedDeltaConfig.model_validate(given), EMBED, std=1.0, out_std=1.0, dtype="float32"
    )
    rng = np.random.default_rng(seed)
    for _, param in sorted(nnx.to_flat_state(nnx.state(layer)), key=lambda pair: pair[0]):
        param.set_value(jnp.asarray(rng.normal(size=param.get_value().shape) * 0.5, jnp.float32))
    return layer


def forward(graph, state, x, segments):
    return nnx.merge(graph, state)(x, Context(jnp.arange(x.shape[1])[None], segments))


def total(graph, state, x):
    return jnp.square(forward(graph, state, x, SEGMENTS[:, : x.shape[1]])).sum()


_run = jax.jit(forward, static_argnums=0)
_gradients = jax.jit(jax.value_and_grad(total, (1, 2)), static_argnums=0)


def run(layer, x=X, segments=None):
    return np.asarray(_run(*nnx.split(layer), x, segments))


def silu(x):
    return x / (1 + np.exp(-x))


def by_loop(layer, x):
    """One sequence [T, D] through the definition, a place and a value head at a time, in
    float64."""
    w = {
        "/".join(map(str, path)): np.asarray(param.get_value(), np.float64)
        for path, param in nnx.to_flat_state(nnx.state(layer))
    }
    x, cfg = np.asarray(x, np.float64), layer.cfg
    out = np.zeros(x.shape)
    mixed = {}
    for name in ("query", "key", "value"):
        raw = np.pad(np.einsum("td,dkh->tkh", x, w[name]), ((cfg.conv - 1, 0), (0, 0), (0, 0)))
        mixed[name] = silu(
            np.stack([(raw[t : t + cfg.conv] * w[f"conv_{name}"]).sum(0) for t in range(len(x))])
        )
    for name in ("query", "key"):
        mixed[name] /= np.linalg.norm(mixed[name], axis=-1, keepdims=True)
    beta, rate = (
        1 / (1 + np.exp(-x @ w["beta"])),
        np.exp(w["a_log"]) * np.log1p(np.exp(x @ w["decay"] + w["dt_bias"])),
    )
    for n in range(cfg.value_heads):
        state, head = (
            np.zeros((cfg.key_dim, cfg.value_dim)),
            n // (cfg.value_heads // cfg.key_heads),
        )
        for t in range(len(x)):
            k = mixed["key"][t, head]
            state = np.exp(-rate[t, n]) * state
            state = state + beta[t, n] * np.outer(k, mixed["value"][t, n] - state.T @ k)
            o = state.T @ mixed["query"][t, head] / cfg.key_dim**0.5
            o = (
                o
                / np.sqrt((o * o).mean() + cfg.norm.eps)
                * w["norm/scale"]
                * silu(x[t] @ w["gate"][:, n])
            )
            out[t] += o @ w["out"][n]
    return out


@pytest.mark.parametrize(
    "switches", [{}, {"conv": 1}, {"key_heads": 4}, {"backend": "reference"}], ids=str
)
def test_the_layer_is_its_definition(switches):
    layer = build(**switches)
    np.testing.assert_allclose(run(layer)[0], by_loop(layer, X[0]), rtol=2e-4, atol=2e-4)


def test_weights_have_the_names_and_shapes_that_checkpoints_know():
    shapes = {
        "/".join(map(str, path)): param.get_value().shape
        for path, param in nnx.to_flat_state(nnx.state(build()))
    }
    assert shapes == {
        "query": (12, 2, 6),
        "key": (12, 2, 6),
        "value": (12, 4, 4),
        "gate": (12, 4, 4),
        "beta": (12, 4),
        "decay": (12, 4),
        "conv_query": (4, 2, 6),
        "conv_key": (4, 2, 6),
        "conv_value": (4, 4, 4),
        "a_log": (4,),
        "dt_bias": (4,),
        "norm/scale": (4,),
        "out": (4, 4, 12),
    }


def test_a_packed_row_equals_its_documents_alone():
    layer = build()
    packed = run(layer, segments=SEGMENTS)
    for begin, end in ((0, 5), (5, 7), (7, 21)):
        alone = run(layer, X[:, np.arange(T) % (end - begin) + begin])[:, : end - begin]
        np.testing.assert_allclose(packed[:, begin:end], alone, rtol=1e-4, atol=2e-5)


def test_changing_one_document_never_changes_its_neighbours():
    layer = build()
    before, after = run(layer, segments=SEGMENTS), run(layer, X.at[:, 5:7].add(1.0), SEGMENTS)
    for places in (slice(0, 5), slice(7, T)):
        np.testing.assert_array_equal(before[:, places], after[:, places])
    assert not np.array_equal(before[:, 5:7], after[:, 5:7])


def test_the_convolution_stops_at_the_start_of_a_document():
    x, taps = jnp.ones((1, 5, 1, 1)), jnp.asarray([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    np.testing.assert_array_equal(
        convolve(x, taps, jnp.asarray([[1, 1, 2, 2, 2]]))[0, :, 0, 0], [100, 110, 100, 110, 111]
    )
    np.testing.assert_array_equal(convolve(x, taps, None)[0, :, 0, 0], [100, 110, 111, 111, 111])


def test_bfloat16_stays_near_float32():
    layer = build()
    short = run(layer, X.astype(jnp.bfloat16))
    assert short.dtype == jnp.bfloat16
    exact = run(layer)
    assert np.abs(short.astype(np.float32) - exact).mean() < 0.03 * exact.std()


@pytest.mark.slow
def test_gradients_are_finite_where_heads_forget_everything_or_nothing():
    layer = build()
    layer.a_log.set_value(jnp.asarray([-80.0, 20.0, 80.0, 0.0]))
    layer.dt_bias.set_value(jnp.asarray([-90.0, 90.0, 0.0, 0.0]))
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(_gradients(*nnx.split(layer), X))
    )


def test_fresh_heads_forget_at_many_rates():
    layer = build(key_heads=64, value_heads=64)
    rates = np.exp(draw(layer.a_log, ("a_log",), 0)) * np.log1p(
        np.exp(draw(layer.dt_bias, ("dt_bias",), 0))
    )
    assert 0.02 < np.median(rates) < 0.2 and rates.min() < 0.01 and rates.max() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 2, "context": 2, "tensor": 2, "context_kind": "ulysses"},
    ],
    ids=str,
)
def test_eight_devices_agree_with_one(sizes):
    graph, state = nnx.split(build())
    mesh_cfg, x = MeshConfig(**sizes), X[:, :28]
    mesh = sharding.make_mesh(mesh_cfg, jax.devices())

    def place(value, axes):
        return jax.device_put(value, NamedSharding(mesh, sharding.spec(axes, mesh_cfg.rules)))

    wanted = _gradients(graph, state, x)
    state = nnx.map_state(
        lambda path, param: param.replace(place(param.get_value(), param.get_metadata()["axes"])),
        state,
    )
    with sharding.use(mesh, mesh_cfg):
        step = jax.jit(jax.value_and_grad(lambda state, x: total(graph, state, x), (0, 1)))
        got = step(state, place(x, ["batch", "seq"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, wanted)
