"""The attention layer: what each switch of its configuration does, its weights, and that documents
stay apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxstack.layers.attention import Attention, temperature
from maxstack.layers.context import Context
from maxstack.layers.rope import rope_table
from maxstack.schema.mixers import AttentionConfig, TemperatureConfig

EMBED, T = 12, 10
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, EMBED)), jnp.float32)
DIVISORS = {"short_factor": [1, 2], "long_factor": [3, 5], "original_length": 6}


def build(seed=1, **switches):
    """A layer whose every weight is random, so that none can go unused."""
    cfg = AttentionConfig.model_validate(
        {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 4, "backend": "reference"}
        | switches
    )
    layer = Attention(cfg, EMBED, std=1.0, out_std=1.0, dtype="float32")
    rng = np.random.default_rng(seed)
    for _, param in sorted(nnx.to_flat_state(nnx.state(layer)), key=lambda pair: pair[0]):
        param.set_value(jnp.asarray(rng.normal(size=param.get_value().shape) * 0.5, jnp.float32))
    return layer


def change(layer, name, f):
    """The same layer with one weight changed."""
    graph, state = nnx.split(layer)
    copy = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    param = functools.reduce(getattr, name.split("."), copy)
    param.set_value(f(param.get_value()))
    return copy


def copied(layer, source, **names):
    """`layer` with weights of `source`, by name here and there."""
    for ours, theirs in names.items():
        layer = change(layer, ours, lambda _, theirs=theirs: getattr(source, theirs).get_value())
    return layer


def context(cfg, positions, segments, kept=None):
    tables = (
        {(cfg.rope, cfg.head_dim): rope_table(cfg.rope, positions, segments, cfg.head_dim)}
        if cfg.rope
        else {}
    )
    return Context(positions, segments, tables, kept or {})


@functools.partial(jax.jit, static_argnums=0)
def _run(graph, state, x, positions, segments, kept):
    layer = nnx.merge(graph, state)
    return layer(x, context(layer.cfg, positions, segments, kept))


def run(layer, x=X, positions=None, segments=None, kept=None):
    positions = jnp.arange(x.shape[1])[None] if positions is None else positions
    return np.asarray(_run(*nnx.split(layer), x, positions, segments, kept))


def close(a, b, atol=2e-5):
    np.testing.assert_allclose(a, b, atol=atol)


def differ(a, b):
    assert np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-2


WEIGHTS = [
    ({}, "query key value out"),
    (
        {"gate": True, "sinks": True, "qkv_bias": True, "out_bias": True},
        "query key value out gate sinks query_bias key_bias value_bias out_bias",
    ),
    (
        {"qk_norm": {}, "value_norm": {"scale": False}},
        "query key value out query_norm/scale key_norm/scale",
    ),
    (
        {"values_are_keys": True, "qkv_bias": True, "value_norm": {"bias": True}},
        "query key out query_bias key_bias value_norm/scale value_norm/bias",
    ),
    (
        {"share_kv": "other", "qkv_bias": True, "qk_norm": {}, "value_norm": {}},
        "query out query_bias query_norm/scale",
    ),
]


@pytest.mark.parametrize(("switches", "names"), WEIGHTS)
def test_a_layer_holds_the_weights_that_it_needs(switches, names):
    assert {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(build(**switches)))} == {
        *names.split()
    }


def test_a_norm_over_all_heads_has_a_scale_for_each_of_their_channels():
    layer = build(qk_norm={}, qk_norm_over="all")
    assert (layer.query_norm.scale.shape, layer.key_norm.scale.shape) == ((16,), (8,))


EVERYTHING = {
    "gate": True,
    "sinks": True,
    "qkv_bias": True,
    "out_bias": True,
    "qk_norm": {},
    "value_norm": {},
    "soft_cap": 2.0,
}
APART = [
    {},
    {**EVERYTHING, "window": 3},
    {
        "chunk": 3,
        "qk_norm": {"scale": False},
        "qk_norm_after_rope": True,
        "rope": {"interleaved": True},
    },
    {"rope": None, "temperature": {"scale": 0.5, "length": 2}},
    {"causal": False, "sinks": True},
    {"rope": {"scaling": {"kind": "longrope", **DIVISORS}}},
]


@pytest.mark.parametrize("switches", APART)
def test_a_packed_document_is_as_if_it_were_alone(switches):
    layer = build(**switches, backend="blockwise")
    packed = run(
        layer,
        positions=jnp.asarray([[*range(5), *range(5)]] * 2),
        segments=jnp.asarray([[1] * 5 + [2] * 5] * 2),
    )
    close(packed, np.concatenate([run(layer, X[:, :5]), run(layer, X[:, 5:])], axis=1))


@pytest.mark.parametrize(
    ("switches", "reached"), [({}, range(10)), ({"window": 4}, range(4)), ({"chunk": 4}, range(4))]
)
def test_the_first_token_reaches_as_far_as_window_and_chunk_let_it(switches, reached):
    layer = build(**switches)
    moved = np.abs(run(layer, X.at[:, 0].add(1.0)) - run(layer)).max(axis=(0, 2)) > 1e-4
    np.testing.assert_array_equal(moved, [i in reached for i in range(T)])


@pytest.mark.parametrize(
    ("switches", "reached"),
    [({}, range(10)), ({"window": 3}, range(3, 8)), ({"chunk": 4}, [4, 5, 6, 7])],
)
def test_without_a_causal_mask_a_token_reaches_those_before_it_too(switches, reached):
    for causal, first in ((True, 5), (False, 0)):
        layer = build(causal=causal, **switches)
        moved = np.abs(run(layer, X.at[:, 5].add(1.0)) - run(layer)).max(axis=(0, 2)) > 1e-4
        np.testing.assert_array_equal(moved, [i in reached and i >= first for i in range(T)])


def test_a_window_slides_where_a_chunk_starts_anew():
    moved = [
        np.abs(run(layer, X.at[:, 3].add(1.0)) - run(layer)).max(axis=(0, 2)) > 1e-4
        for layer in (build(window=4), build(chunk=4))
    ]
    np.testing.assert_array_equal(
        moved, [[i in range(3, 7) for i in range(T)], [i == 3 for i in range(T)]]
    )


def test_a_closed_gate_lets_nothing_through_and_a_gate_of_zero_half():
    plain, gated = build(), build(gate=True)
    gated = copied(gated, plain, query="query", key="key", value="value", out="out")
    close(run(change(gated, "gate", jnp.zeros_like)), run(plain) / 2)
    channel = change(gated, "gate", lambda w: w.at[:, 0, 1].set(0))
    differ(run(channel), run(gated))
    close(
        run(change(channel, "out", lambda w: w.at[0, 1].set(0))),
        run(change(gated, "out", lambda w: w.at[0, 1].set(0))),
    )


def test_a_sink_takes_from_its_own_head_alone():
    layer = build(sinks=True)
    no_head = change(change(layer, "sinks", jnp.zeros_like), "out", lambda w: w.at[2].set(0))
    close(
        run(change(change(layer, "sinks", jnp.zeros_like), "sinks", lambda s: s.at[2].set(80.0))),
        run(no_head),
    )


def test_values_that_are_keys_are_the_projection_before_norm_and_rotation():
    switches = {"qk_norm": {}, "qkv_bias": True, "value_norm": {"scale": False}}
    both, one = build(**switches), build(**switches, values_are_keys=True)
    names = {name: name for name in ("query", "key", "out", "query_bias", "key_bias")}
    both = copied(both, one, **names, value="key", value_bias="key_bias")
    for norm in ("query_norm.scale", "key_norm.scale"):
        both, one = (change(layer, norm, jnp.ones_like) for layer in (both, one))
    close(run(both), run(one))


def test_shared_keys_and_values_are_those_of_the_layer_that_was_kept():
    switches = {"qk_norm": {}, "value_norm": {}}
    own, shares = build(**switches), build(**switches, share_kv="early")
    shares = copied(shares, own, query="query", out="out")
    shares = change(shares, "query_norm.scale", lambda _: own.query_norm.scale.get_value())
    keys_values = jax.jit(
        lambda x: own.keys_values(x, context(own.cfg, jnp.arange(T)[None], None))
    )(X)
    close(run(shares, kept={"early": keys_values}), run(own))
    differ(run(shares, kept={"early": (keys_values[0], 2 * keys_values[1])}), run(own))


def test_the_value_norm_makes_the_size_of_the_values_irrelevant():
    layer = build(value_norm={"eps": 1e-12})
    close(run(change(layer, "value", lambda w: w * 10)), run(layer), 1e-4)


@pytest.mark.parametrize("over", ["head", "all"])
def test_a_qk_norm_makes_the_size_of_queries_irrelevant_and_over_a_head_that_of_each_head(over):
    layer = build(qk_norm={"eps": 1e-12}, qk_norm_over=over)
    close(run(change(layer, "query", lambda w: w * 10)), run(layer), 1e-4)
    one_head = run(change(layer, "query", lambda w: w.at[:, 0].multiply(10)))
    (close if over == "head" else differ)(one_head, run(layer))


@pytest.mark.parametrize(("scale", "same"), [(False, True), (True, False)])
def test_the_order_of_norm_and_rotation_matters_to_a_learned_scale_alone(scale, same):
    outs = [
        run(build(qk_norm={"scale": scale}, qk_norm_after_rope=after)) for after in (False, True)
    ]
    (close if same else differ)(*outs)


def test_a_bias_on_the_values_adds_its_projection_and_one_on_the_output_itself():
    layer = build(qkv_bias=True, out_bias=True)
    bare = change(change(layer, "value_bias", jnp.zeros_like), "out_bias", jnp.zeros_like)
    added = (
        np.einsum("NH,NHD->D", np.repeat(layer.value_bias[...], 2, axis=0), layer.out[...])
        + layer.out_bias[...]
    )
    close(run(layer), run(bare) + added)


@pytest.mark.parametrize("name", ["query_bias", "key_bias"])
def test_biases_on_queries_and_keys_count_in_the_scores(name):
    layer = build(qkv_bias=True)
    differ(run(change(layer, name, lambda b: b + 1)), run(layer))


def test_the_temperature_rises_in_steps_of_its_length():
    got = temperature(TemperatureConfig(scale=0.5, length=4), jnp.arange(12)[None])
    np.testing.assert_allclose(
        got[0], 1 + 0.5 * np.log([1] * 3 + [2] * 4 + [3] * 4 + [4]), rtol=1e-6
    )


def test_the_temperature_multiplies_the_queries():
    layer = build(rope=None, temperature={"scale": 2.0, "length": 4})
    plain = copied(build(rope=None), layer, query="query", key="key", value="value", out="out")
    hotter = change(plain, "query", lambda w: w * float(1 + 2 * np.log(2)))
    close(run(layer)[:, :3], run(plain)[:, :3])
    close(run(layer)[:, 3:7], run(hotter)[:, 3:7])


def test_scale_replaces_the_root_of_the_head_dim():
    close(run(build(scale=0.5)), run(build()))
    differ(run(build(scale=1.0)), run(build()))
    differ(run(build(soft_cap=0.5)), run(build()))


def test_bfloat16_goes_in_and_comes_out():
    layer = build(**EVERYTHING, window=3)
    out = _run(*nnx.split(layer), X.astype(jnp.bfloat16), jnp.arange(T)[None], None, None)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), run(layer), atol=0.25)
