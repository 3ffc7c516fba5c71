"""The Hopper kernels: values, gradients and races in jax's GPU interpreter, machine code from the
real assembler, and what they refuse."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from topologies import needs

from maxstack.kernels.attention import hopper, reference
from maxstack.kernels.attention.hopper_tiles import BLOCK, Call
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, visibility_mask
from maxstack.kernels.backends import Device
from maxstack.plan.topology import parse

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
CASE = AttentionCase(Request(0.1), 1000, 1000, 4, 2, 128, 128, "bfloat16", True, True, H100)
REQUESTS = [
    Request(1, window=window, causal=causal, offset=offset)
    for causal in (True, False)
    for window in (None, 1, 70, 500)
    for offset in (0, 90, -90)
]
GPU = importlib.import_module("jax.experimental.pallas.mosaic_gpu")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"request": Request(0.1, window=100, soft_cap=30.0, causal=False, offset=7)}, None),
        ({"device": dataclasses.replace(H100, capability=(10, 0))}, "has 10.0"),
        ({"dtype": "float32"}, "not bfloat16"),
        ({"head_dim": 192}, "head_dim 192 with value head dim 128"),
        ({"request": Request(-0.1)}, "not positive"),
    ],
)
def test_reasons_name_what_the_kernels_do_not_do(changes, reason):
    found = hopper.supports(dataclasses.replace(CASE, **changes))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@pytest.mark.parametrize("queries, keys, real", [(256, 256, 256), (256, 384, 300)])
def test_tiles_without_a_mask_are_seen_whole_and_tiles_left_out_not_at_all(
    request_, queries, keys, real
):
    call = Call(
        1,
        queries,
        keys,
        real,
        1,
        1,
        64,
        jnp.bfloat16,
        request_,
        0,
        64,
        2,
    )
    seen = np.array(visibility_mask(request_, jnp.arange(queries), jnp.arange(keys), ())[0]) & (
        np.arange(keys) < real
    )
    for spans, size, seen_by in ((call.keys_of, queries, seen), (call.queries_of, keys, seen.T)):
        for start in range(0, size, BLOCK):
            lo, whole, cut, end = (int(x) for x in spans(start, BLOCK, 64))
            rows = seen_by[start : start + BLOCK]
            assert rows[:, whole * 64 : cut * 64].all()
            assert not rows[:, : lo * 64].any() and not rows[:, end * 64 :].any()
            assert 0 <= lo <= whole <= cut <= end


def inputs(t, s, heads, kv_heads, dim):
    """Arguments, the output's gradient, and two pairs of numbers: documents that come again, and
    falling ones."""
    keys, shapes = (
        jax.random.split(jax.random.key(0), 5),
        ((t, heads), (s, kv_heads), (s, kv_heads), (t, heads)),
    )
    q, k, v, do = (
        jax.random.normal(key, (1, *shape, dim), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    )
    places = [jnp.arange(length, dtype=jnp.int32)[None] for length in (t, s)]
    return (
        (q, k, v, jax.random.normal(keys[4], (heads,))),
        do,
        (tuple(x // 37 % 3 for x in places), tuple(5 - x // 50 for x in places)),
    )


def with_gradients(run, arguments, do, same, request, **options):
    def of(q, k, v, sinks=None):
        return run(Inputs(q, k, v, sinks, same), request, **options).astype(jnp.float32)

    o, pull = jax.vjp(of, *arguments)
    return o, *pull(do.astype(jnp.float32))


VALUES = {
    "packed, with sinks": (150, 150, {}, 1, 4, {}),
    "window and soft cap": (150, 150, {"window": 40, "soft_cap": 5.0}, 2, 3, {"keys": 64}),
    "both directions, other lengths": (
        70,
        200,
        {"causal": False, "offset": 100, "window": 90},
        0,
        4,
        {"keys": 64, "stages": 3},
    ),
    "all keys, whole blocks": (128, 128, {"causal": False}, 0, 3, {}),
}


INTERPRETED = pytest.mark.skipif(
    not hasattr(GPU, "InterpretGPUParams"),
    reason="the GPU interpreter of this jax is not public, and takes minutes",
)


@INTERPRETED
@pytest.mark.parametrize("t, s, features, numbered, arguments, blocks", VALUES.values(), ids=VALUES)
def test_values_and_gradients_are_the_reference_s_and_nothing_races(
    t, s, features, numbered, arguments, blocks
):
    given, do, same = inputs(t, s, 2, 1, 64)
    given, request = given[:arguments], Request(0.125, **features)
    expected = with_gradients(
        reference.run, [x.astype(jnp.float32) for x in given], do, same[:numbered], request
    )
    interpret = GPU.InterpretGPUParams(detect_races=True)
    found = with_gradients(
        hopper.run, given, do, same[:numbered], request, blocks=blocks, interpret=interpret
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), theirs, atol=0.01 * float(jnp.abs(theirs).max())
        )


@needs("h100:1x1")
@pytest.mark.parametrize("dim, features", [(128, {}), (64, {"window": 200, "soft_cap": 30.0})])
def test_kernels_are_assembled_for_hopper(dim, features):
    given, do, same = inputs(300, 300, 4, 2, dim)
    mesh, whole = (
        jax.sharding.Mesh(np.array(parse("h100:1x1").devices()), ("x",)),
        jax.sharding.PartitionSpec(),
    )
    blocks = hopper.candidates(dataclasses.replace(CASE, head_dim=dim, value_dim=dim))[-1]

    def step(*arguments):
        return with_gradients(
            hopper.run, arguments, do, same[:1], Request(0.1, **features), blocks=blocks
        )

    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, whole))
        for x in given
    ]
    compiled = (
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
        .lower(*arguments)
        .compile()
    )
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 3
