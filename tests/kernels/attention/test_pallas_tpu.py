"""The TPU kernel for attention: values and gradients over many tiles, which tiles it computes and
fetches, and its compiled programs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import SingleDeviceSharding
from topologies import needs

from maxstack.kernels.attention import pallas_tpu, reference
from maxstack.kernels.attention.pallas_tpu_tiles import HIDDEN, WHOLE, Tiling
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, visible
from maxstack.kernels.backends import Device
from maxstack.plan import program, topology, work

SMALL = dict(block_q=128, block_k=128, block_q_dkv=128, block_k_dkv=128)


def arrays(t, s, heads, kv, h, v, dtype=jnp.float32):
    """Queries, keys, values, and weights of the result."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((2, t, heads, h), (2, s, kv, h), (2, s, kv, v), (2, t, heads, v))
    ]


def numbers(t, s, rows=2, packed=False):
    """Segments of queries and keys: three documents, one after another or in any order."""
    rng = np.random.default_rng(t + rows)
    drawn = [rng.integers(0, 3, (rows, length)) for length in (t, s)]
    return tuple(jnp.asarray(np.sort(x) if packed else x, jnp.int32) for x in drawn)


def results(run, q, k, v, weights, sinks, same, request):
    """The attention's output and all gradients."""
    floats = (q, k, v) if sinks is None else (q, k, v, sinks)

    def loss(*floats):
        o = run(Inputs(*floats[:3], sinks if sinks is None else floats[3], same), request)
        return jnp.vdot(o.astype(jnp.float32), weights.astype(jnp.float32)), o

    (_, o), grads = jax.jit(
        jax.value_and_grad(loss, argnums=tuple(range(len(floats))), has_aux=True)
    )(*floats)
    return [np.asarray(x, np.float64) for x in (o, *grads)]


def compare(run, arguments, tolerance):
    exact = [x.astype(jnp.float32) for x in arguments[:4]]
    for got, wanted in zip(
        results(run, *arguments), results(reference.run, *exact, *arguments[4:]), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


CASES = {
    "packed documents": (260, 260, 2, 2, Request(0.2), [(2, True)], False),
    "shares of heads": (
        140,
        300,
        4,
        1,
        Request(0.2, soft_cap=2.0, offset=160),
        [(1, False), (2, True)],
        True,
    ),
    "window": (260, 390, 3, 1, Request(0.2, window=140, offset=100), [], True),
    "both ways": (
        260,
        390,
        2,
        1,
        Request(0.2, window=140, causal=False, offset=-200),
        [(1, False)],
        False,
    ),
    "all keys, documents": (140, 200, 2, 1, Request(0.2, causal=False), [(2, True)], True),
}


@pytest.mark.parametrize("name", CASES)
def test_many_tiles_are_the_reference(name, monkeypatch):
    t, s, heads, kv, request, kinds, sinks = CASES[name]
    monkeypatch.setattr(pallas_tpu, "ROWS", 256)
    run = functools.partial(pallas_tpu.run, blocks=SMALL, interpret=True)
    same = tuple(numbers(t, s, *kind) for kind in kinds)
    compare(
        run,
        (
            *arrays(t, s, heads, kv, 40, 24),
            jnp.linspace(-1, 2, heads) if sinks else None,
            same,
            request,
        ),
        1e-5,
    )


def test_bfloat16_with_the_head_dims_of_latent_attention_is_the_reference():
    compare(
        functools.partial(pallas_tpu.run, interpret=True),
        (*arrays(200, 200, 2, 2, 192, 128, jnp.bfloat16), None, (), Request(0.07)),
        1e-2,
    )


BOUNDS = [
    Request(1.0),
    Request(1.0, window=100),
    Request(1.0, window=300, causal=False, offset=77),
    Request(1.0, offset=-400),
    Request(1.0, causal=False),
]


@pytest.mark.parametrize("request_", BOUNDS, ids=str)
@pytest.mark.parametrize("by_keys", [False, True])
def test_the_grid_has_the_tiles_where_some_query_sees_some_key_and_no_other(request_, by_keys):
    t, s = 700, 1000
    tiling = Tiling(request_, t, s, 1, 1, 128, 256, by_keys)
    tiles = tiling.tiles()
    dense = np.zeros((6 * 128, 4 * 256), bool)
    dense[:t, :s] = visible(request_, jnp.arange(t), jnp.arange(s), ())[0]
    some = dense.reshape(6, 128, 4, 256).any(axis=(1, 3))
    rows = np.minimum(128, t - np.arange(6) * 128)
    every = dense.reshape(6, 128, 4, 256).sum(axis=(1, 3)) == rows[:, None] * 256
    places = {(tile >> 18, tile >> 4 & 8191): tile for tile in tiles.tolist()}
    assert len(places) == len(tiles)
    assert {place for place, tile in places.items() if not tile & HIDDEN} == set(
        zip(*np.nonzero(some), strict=True)
    )
    assert {place for place, tile in places.items() if tile & WHOLE} == set(
        zip(*np.nonzero(every), strict=True)
    )
    assert {place[by_keys] for place in places} == set(range(some.shape[by_keys]))


@pytest.mark.parametrize("by_keys", [False, True])
def test_no_block_is_fetched_whose_documents_cannot_meet(by_keys):
    documents = jnp.asarray(np.repeat([2, 5, 9], [300, 500, 224])[None], jnp.int32)
    tiling = Tiling(Request(1.0), 1024, 1024, 1, 1, 128, 128, by_keys, pairs=1)
    ranges, fetched, computed = np.asarray(tiling.ranges(((documents, documents),))), set(), set()
    for tile in tiling.tiles():
        i, j, _ = map(int, tiling.clipped(tile, ranges, np.int32(0)))
        fetched.add((i, j))
        if tiling.state(tile, ranges, np.int32(0))[0]:
            computed.add((i, j))
    number = np.asarray(documents).reshape(8, 128)
    meeting = {
        (i, j)
        for i in range(8)
        for j in range(i + 1)
        if number[i].min() <= number[j].max() and number[j].min() <= number[i].max()
    }
    assert fetched == computed == meeting and len(meeting) < 36


def test_no_array_has_a_place_for_each_query_and_key():
    t = 4096
    q, k, v = (jax.ShapeDtypeStruct((1, t, 1, 64), jnp.bfloat16),) * 3
    number = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def loss(q, k, v, number):
        return (
            pallas_tpu.run(Inputs(q, k, v, None, ((number, number),)), Request(0.1, window=3000))
            .astype(jnp.float32)
            .sum()
        )

    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, number)
    assert max(sizes(closed.jaxpr)) <= t * 512 < t * t


def sizes(jaxpr):
    """Elements of every array of a program, kernels' own included."""
    yield from (
        math.prod(getattr(var.aval, "shape", ())) for var in (*jaxpr.constvars, *jaxpr.invars)
    )
    for equation in jaxpr.eqns:
        yield from (math.prod(getattr(var.aval, "shape", ())) for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"head_dim": 320}, "head_dim 320"),
        ({"dtype": "float16"}, "float16"),
        ({"keys": 1 << 23}, "tiles"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason):
    case = dict(
        request=Request(1.0),
        queries=4096,
        keys=4096,
        heads=8,
        kv_heads=2,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        packed=True,
        sinks=False,
        device=Device("tpu", "TPU v5p"),
    )
    assert pallas_tpu.supports(AttentionCase(**case)) is None
    assert reason in pallas_tpu.supports(AttentionCase(**{**case, **change}))


COMPILED = {
    "v5e:2x2": ((1024, 8, 2, 128, 128), "bfloat16", Request(0.1), 1, False),
    "v5p:2x2x1": (
        (1024, 4, 1, 128, 128),
        "bfloat16",
        Request(0.1, window=300, soft_cap=30.0),
        2,
        True,
    ),
    "v6e:2x2": ((1024, 2, 2, 192, 128), "bfloat16", Request(0.1), 1, False),
    "tpu7x:2x2x1": ((1024, 2, 1, 128, 128), "float32", Request(0.1, causal=False), 0, False),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in COMPILED])
def test_both_passes_compile_for_tpus_and_declare_their_products(name):
    (t, heads, kv, h, v), dtype, request, pairs, sinks = COMPILED[name]
    device = SingleDeviceSharding(topology.parse(name).devices()[0])
    shapes = (1, t, heads, h), (1, t, kv, h), (1, t, kv, v)
    floats = [jax.ShapeDtypeStruct(shape, dtype, sharding=device) for shape in shapes]
    floats += [jax.ShapeDtypeStruct((heads,), "float32", sharding=device)] * sinks
    number = jax.ShapeDtypeStruct((1, t), "int32", sharding=device)

    def loss(floats, same):
        return (
            pallas_tpu.run(Inputs(*floats[:3], floats[3] if sinks else None, same), request)
            .astype(jnp.float32)
            .sum()
        )

    compiled = jax.jit(jax.grad(loss)).lower(floats, ((number, number),) * pairs).compile()
    flops = sum(
        one.flops
        for one in work.operations(program.parse(compiled.as_text()))
        if one.kernel == "tpu_custom_call"
    )
    case = AttentionCase(
        request, t, t, heads, kv, h, v, dtype, pairs > 0, sinks, Device("tpu", name)
    )
    tilings = pallas_tpu._tilings(case, pallas_tpu._default(case))
    tile = [2 * tiling.computed() * tiling.block_q * tiling.block_k * heads for tiling in tilings]
    h, v = (-(-size // 128) * 128 for size in (h, v))
    assert flops == tile[0] * (3 * h + 2 * v) + tile[1] * (2 * h + 2 * v)
