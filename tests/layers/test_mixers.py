"""Mixers: the weights of attention, packed documents against documents alone, and formulas.

That attention, MLA and the gated delta rule compute what transformers computes is shown by the
golden families (tests/models/test_parity.py).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxstack.layers import mla
from maxstack.layers.attention import temperature
from maxstack.layers.context import Context
from maxstack.layers.layer import layer_of
from maxstack.layers.rope import rope_table
from maxstack.layers.weight import draw
from maxstack.schema.mixers import AttentionConfig, GatedDeltaConfig, MLAConfig, TemperatureConfig

EMBED, T = 12, 29
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, EMBED)), jnp.float32)
LENGTHS = 5, 2, 14, 8
MIXERS = {
    "attention": (AttentionConfig, {"heads": 4, "kv_heads": 2, "head_dim": 4}),
    "mla": (MLAConfig, {"heads": 4, "kv_lora": 10, "nope_dim": 3, "rope_dim": 4, "value_dim": 5}),
    "gated_delta": (
        GatedDeltaConfig,
        {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 4, "chunk": 4},
    ),
}


def build(kind="attention", **switches):
    """A layer whose weights are all random, so that none can go unused."""
    section, given = MIXERS[kind]
    cfg = section.model_validate({"kind": kind} | given | switches)
    layer = layer_of(cfg)(cfg, EMBED, dtype="float32")
    rng = np.random.default_rng(1)
    for _, param in sorted(nnx.to_flat_state(nnx.state(layer)), key=lambda pair: pair[0]):
        param.set_value(jnp.asarray(rng.normal(size=param.get_value().shape) * 0.5, jnp.float32))
    return layer


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, state, x, positions, segments):
    layer = nnx.merge(graph, state)
    tables = {
        (rope, size): rope_table(rope, positions, segments, size) for rope, size in layer.cfg.ropes
    }
    return layer(x, Context(positions, segments, tables))


@pytest.mark.parametrize(
    ("switches", "names"),
    [
        ({}, "query key value out"),
        (
            {"gate": True, "sinks": True, "qkv_bias": True, "out_bias": True},
            "query key value out gate sinks query_bias key_bias value_bias out_bias",
        ),
        (
            {"values_are_keys": True, "qkv_bias": True, "value_norm": {"bias": True}},
            "query key out query_bias key_bias value_norm/scale value_norm/bias",
        ),
        (
            {"share_kv": "other", "qkv_bias": True, "qk_norm": {}, "value_norm": {}},
            "query out query_bias query_norm/scale",
        ),
    ],
)
def test_an_attention_layer_holds_the_weights_that_it_needs(switches, names):
    weights = nnx.to_flat_state(nnx.state(build(**switches)))
    assert {"/".join(path) for path, _ in weights} == {*names.split()}


LONGROPE = {"short_factor": [1, 2], "long_factor": [3, 5], "original_length": 6}


@pytest.mark.parametrize(
    "mixer",
    [
        {"gate": True, "sinks": True, "qk_norm": {}, "value_norm": {}, "window": 3},
        {"chunk": 3, "qk_norm": {"scale": False}, "qk_norm_after_rope": True},
        {"rope": None, "temperature": {"scale": 0.5, "length": 2}},
        {"causal": False, "sinks": True, "soft_cap": 2.0},
        {"rope": {"scaling": {"kind": "longrope"} | LONGROPE}},
        {"kind": "mla", "q_lora": 6},
        {"kind": "gated_delta"},
    ],
    ids=str,
)
def test_a_packed_document_is_computed_as_if_it_were_alone(mixer):
    graph, state = nnx.split(build(**mixer))
    positions = jnp.concatenate([jnp.arange(n) for n in LENGTHS])[None]
    segments = jnp.repeat(jnp.arange(1, 5), jnp.asarray(LENGTHS), total_repeat_length=T)
    packed = forward(graph, state, X, positions, jnp.broadcast_to(segments, X.shape[:2]))
    begin = 0
    for length in LENGTHS:
        document = X[:, begin : begin + length]
        alone = forward(graph, state, document, jnp.arange(length)[None], None)
        np.testing.assert_allclose(packed[:, begin : begin + length], alone, rtol=1e-4, atol=2e-5)
        begin += length


def test_temperature_rises_in_steps_of_its_length():
    got = temperature(TemperatureConfig(scale=0.5, length=4), jnp.arange(12)[None])
    steps = [1] * 3 + [2] * 4 + [3] * 4 + [4]
    np.testing.assert_allclose(got[0], 1 + 0.5 * np.log(steps), rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "sharper"),
    [
        (None, 1),
        ({"mscale_all_dim": None}, 1),
        ({"factor": 1.0}, 1),
        ({"mscale_all_dim": 1.0}, 1.3688879454**2),
        ({"mscale_all_dim": 0.707}, 1.2608037774**2),
    ],
)
def test_yarn_multiplies_mla_scores_by_the_square_of_its_factor_for_all_dimensions(
    scaling, sharper
):
    yarn = {"kind": "yarn", "factor": 40.0, "original_length": 8, "mscale_all_dim": 0.8}
    rope = {} if scaling is None else {"scaling": yarn | {"mscale": 1.0} | scaling}
    layer = build("mla", rope=rope)
    assert mla.request(layer.cfg).scale == pytest.approx(7**-0.5 * sharper)


@pytest.mark.slow
def test_gradients_are_finite_where_heads_forget_everything_or_nothing():
    layer = build("gated_delta")
    layer.a_log.set_value(jnp.asarray([-80.0, 20.0, 80.0, 0.0]))
    layer.dt_bias.set_value(jnp.asarray([-90.0, 90.0, 0.0, 0.0]))
    graph, state = nnx.split(layer)

    def total(state, x):
        return jnp.square(forward(graph, state, x, jnp.arange(T)[None], None)).sum()

    gradients = jax.grad(total, (0, 1))(state, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_initial_heads_of_the_gated_delta_rule_forget_at_many_rates():
    layer = build("gated_delta", key_heads=64, value_heads=64)
    a_log, dt_bias = (draw(getattr(layer, name), (name,), 0) for name in ("a_log", "dt_bias"))
    rates = np.exp(a_log) * np.log1p(np.exp(dt_bias))
    assert 0.02 < np.median(rates) < 0.2 and rates.min() < 0.01 and rates.max() > 0.5
