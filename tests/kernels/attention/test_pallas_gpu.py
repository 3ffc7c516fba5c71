"""The Triton-style GPU kernels: values and gradients against the reference, interpreted on a CPU,
and compilation for GPUs that are not here."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from topologies import needs

from maxstack import sharding
from maxstack.kernels.attention import pallas_gpu, reference
from maxstack.kernels.attention import pallas_gpu_tiles as tiles
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, visible
from maxstack.kernels.backends import Device
from maxstack.plan.topology import parse
from maxstack.schema.mesh import MeshConfig

H100 = Device("gpu", "NVIDIA H100", (9, 0))
LLAMA = AttentionCase(Request(0.1), 4096, 4096, 32, 8, 128, 128, "bfloat16", False, False, H100)
SMALL = {
    prefix + name: size
    for prefix in pallas_gpu.PREFIXES
    for name, size in (("q", 16), ("k", 16), ("warps", 4), ("stages", 2))
}


def inputs(t, s, heads, kv, h, v, dtype=jnp.float32, numbered=0, sinks=False):
    rng = np.random.default_rng(0)
    q, k, values = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((2, t, heads, h), (2, s, kv, h), (2, s, kv, v))
    )
    same = tuple(
        (
            jnp.asarray(rng.integers(0, 3, (2, t)), jnp.int32),
            jnp.asarray(rng.integers(0, 3, (1, s)), jnp.int32),
        )
        for _ in range(numbered)
    )
    return q, k, values, jnp.asarray(rng.normal(size=heads), jnp.float32) if sinks else None, same


def gradients(run, given, request, **options):
    *floats, same = given
    weight = jnp.asarray(
        np.random.default_rng(1).normal(size=(*floats[0].shape[:3], floats[2].shape[3])),
        jnp.float32,
    )

    def total(*floats):
        o = run(Inputs(*floats, same), request, **options)
        return (o.astype(jnp.float32) * weight).sum(), o

    wanted = tuple(n for n, x in enumerate(floats) if x is not None)
    (_, o), grads = jax.jit(jax.value_and_grad(total, wanted, has_aux=True))(*floats)
    return o, *grads


CASES = {
    "groups, a head dim that is no power of two, an odd length": (
        Request(0.4),
        (37, 37, 4, 2, 40, 16),
        {},
    ),
    "window, cap, sinks, documents in any order, wide values": (
        Request(0.4, 9, 2.0),
        (35, 35, 2, 1, 16, 24),
        {"numbered": 1, "sinks": True},
    ),
    "more keys than queries, from a place among them": (
        Request(0.4, offset=30),
        (20, 50, 2, 2, 16, 16),
        {},
    ),
    "queries before all keys, chunks": (
        Request(0.4, chunk=20, offset=-7),
        (33, 20, 2, 1, 16, 16),
        {"numbered": 2},
    ),
    "a window to both sides": (
        Request(0.4, 7, causal=False, offset=-4),
        (36, 50, 2, 2, 16, 16),
        {"numbered": 1},
    ),
    "all keys, bfloat16": (
        Request(0.4, causal=False),
        (33, 32, 2, 2, 16, 16),
        {"dtype": jnp.bfloat16},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_reference(name):
    request, shape, features = CASES[name]
    given = inputs(*shape, **features)
    ours, theirs = (
        gradients(pallas_gpu.run, given, request, blocks=SMALL, interpret=True),
        gradients(reference.run, given, request.narrowed),
    )
    tolerance = 0.04 if given[0].dtype == jnp.bfloat16 else 1e-5
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), atol=tolerance, rtol=tolerance
        )


def sized(t, s, size, request):
    """A call whose three kernels have tiles of one size."""
    case = AttentionCase(request, t, s, 1, 1, 16, 16, "float32", False, False, H100)
    return tiles.Call(**vars(case), forward=size, dq=size, dkv=size)


def test_changing_one_document_never_changes_its_neighbour():
    q, k, v, _, _ = inputs(48, 48, 2, 1, 16, 16)
    numbers = jnp.asarray([[1] * 20 + [2] * 28], jnp.int32)
    run = jax.jit(
        lambda k, v: pallas_gpu.run(
            Inputs(q, k, v, None, ((numbers, numbers),)), Request(0.4), SMALL, interpret=True
        )
    )
    before, after = run(k, v), run(k.at[:, :20].add(1), v.at[:, :20].add(1))
    np.testing.assert_array_equal(before[:, 20:], after[:, 20:])
    assert not np.array_equal(before[:, :20], after[:, :20])


@pytest.mark.parametrize(
    "request_",
    [
        Request(1.0),
        Request(1.0, 37),
        Request(1.0, 60, causal=False, offset=5),
        Request(1.0, offset=-30),
    ],
)
def test_the_tiles_that_are_visited_are_those_that_are_seen_and_whole_ones_need_no_mask(request_):
    t, s, size = 100, 90, tiles.Sizes(16, 32, 4, 1)
    call = sized(t, s, size, request_)
    seen = np.asarray(visible(request_, jnp.arange(t), jnp.arange(s), ()))[0]
    for spans, of, row, column in (
        (tiles.of_queries(call, size, ()), seen, 16, 32),
        (tiles.of_keys(call, size, ()), seen.T, 32, 16),
    ):
        table = np.asarray(spans.table)[0]
        for i, j in np.ndindex(len(table), -(-of.shape[1] // column)):
            part, (first, whole, broken, last) = (
                of[i * row : (i + 1) * row, j * column : (j + 1) * column],
                table[i],
            )
            assert (first <= j < last) == part.any()
            assert (whole <= j < broken) == (part.all() and part.shape[1] == column)
        assert spans.visits == (table[:, 3] - table[:, 0]).sum()


def test_blocks_of_other_documents_are_skipped_and_blocks_of_one_need_no_mask():
    size = tiles.Sizes(16, 16, 4, 1)
    call = sized(64, 64, size, Request(1.0))
    numbers = jnp.asarray([[0] * 16 + [1] * 40 + [2] * 8], jnp.int32)
    spans = tiles.of_queries(call, size, ((numbers, numbers),))
    assert spans.table[0].tolist() == [[0, 1, 1, 1], [1, 2, 2, 2], [1, 1, 2, 3], [1, 4, 4, 4]]


REFUSED = {
    "cpu has 0.0": {"device": Device("cpu", "cpu")},
    "8.0": {"device": Device("gpu", "Tesla V100", (7, 0))},
    "float16": {"dtype": "float16"},
    "head_dim 512": {"head_dim": 512},
    "value_dim 300": {"value_dim": 300},
    "scale": {"request": Request(-1.0)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(reason):
    assert reason in pallas_gpu.supports(dataclasses.replace(LLAMA, **REFUSED[reason]))


def test_the_candidates_begin_with_the_default_and_each_can_be_run():
    found = pallas_gpu.candidates(LLAMA)
    assert len(found) > 3 and len({tuple(one.items()) for one in found}) == len(found)
    assert all(
        one[prefix + name] & (one[prefix + name] - 1) == 0
        for one in found
        for prefix in pallas_gpu.PREFIXES
        for name in ("q", "k", "warps")
    )


def compiled(name, dtype, h, v, request, numbered=0, sinks=False, t=1000):
    mesh = Mesh(np.array(parse(name).devices()[:1]), ("x",))
    of = NamedSharding(mesh, PartitionSpec())
    shapes = [((1, t, 4, h), dtype), ((1, t, 2, h), dtype), ((1, t, 2, v), dtype)]
    given = [jax.ShapeDtypeStruct(*shape, sharding=of) for shape in shapes]
    same = ((jax.ShapeDtypeStruct((1, t), jnp.int32, sharding=of),) * 2,) * numbered

    def step(q, k, v, sinks, same):
        o, back = jax.vjp(
            lambda *floats: pallas_gpu.run(Inputs(*floats, same), request), q, k, v, sinks
        )
        return o, back(o)

    with sharding.use(mesh, MeshConfig()):
        return (
            jax.jit(step)
            .lower(
                *given,
                jax.ShapeDtypeStruct((4,), jnp.float32, sharding=of) if sinks else None,
                same,
            )
            .compile()
            .as_text()
        )


TARGETS = [
    ("h100:1x1", "bfloat16", 192, 128, Request(0.1), {}),
    ("b200:1x1", "float32", 64, 64, Request(0.1, causal=False), {}),
    ("a100-80:1x1", "bfloat16", 64, 64, Request(0.1, 300, 20.0), {"numbered": 1, "sinks": True}),
]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "name, dtype, h, v, request_, features",
    [pytest.param(*row, marks=needs(row[0])) for row in TARGETS],
)
def test_it_compiles_for_gpus_that_are_not_here_and_says_its_flops(
    name, dtype, h, v, request_, features
):
    t = 1000
    text = compiled(name, dtype, h, v, request_, t=t, **features)
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    declared = sorted(
        int(flops)
        for flops in re.findall(r'serialized_metadata = "\{\\22flops\\22: \\22(\d+)', text)
    )
    seen = np.asarray(visible(request_, jnp.arange(t), jnp.arange(t), ())).sum()
    for found, products in zip(declared, (h + v, 2 * h + v, 2 * h + 2 * v), strict=True):
        assert (
            1 <= found / (2 * 4 * seen * products) < 2
        )  # 4 heads; tiles that the mask cuts are computed whole
