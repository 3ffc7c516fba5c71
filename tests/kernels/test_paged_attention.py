"""Attention over pages by each backend against its definition, and a row's bits in company."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.sharding import NamedSharding, PartitionSpec
from topologies import needs

from maxstack import sharding
from maxstack.kernels.attention import attention
from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import Device, record_choices
from maxstack.kernels.paged_attention import (
    BITS,
    OP,
    Inputs,
    PagedCase,
    Quantized,
    paged_attention,
    quantize,
)
from maxstack.kernels.paged_attention.runs import long_and_short_tiles
from maxstack.plan.topology import parse
from maxstack.schema.mesh import MeshConfig

ANY_PAGES = [name for name in OP.names if not name.startswith("pallas_")]
"""Backends that read pages in low precision."""
PAGE, WIDTH, HEADS, KV, SIZE = 4, 80, 6, 2, 8
SLOTS, POSITIONS = (
    np.array([1, 1, 1, 1, 1, 1, 3, 2, 2, 0, 0], np.int32),
    np.array([150, 151, 152, 153, 154, 155, 300, 0, 1, -1, -1], np.int32),
)
REQUESTS = {
    "plain": Request(0.3),
    "window": Request(0.3, window=37),
    "chunk": Request(0.3, chunk=64),
    "soft cap": Request(0.3, soft_cap=2.0),
}


@functools.partial(jax.jit, static_argnames=("request", "backend", "value_dim"))
def run(q, new, pages, tables, slots, positions, request, backend, sinks=None, value_dim=None):
    """Kernels for hardware that is not here are interpreted."""
    elsewhere = backend.startswith("pallas")
    o, pages = paged_attention(
        q,
        new,
        pages,
        tables,
        slots,
        positions,
        request,
        "reference" if elsewhere else backend,
        sinks_N=sinks,
        value_dim=value_dim,
    )
    if elsewhere:
        arrays = Inputs(q, pages, tables[slots], positions, sinks, None)
        o = interpreted(backend, arrays, request, value_dim)
    return o, pages


def interpreted(backend, arrays, request, value_dim=None):
    return importlib.import_module(OP[backend].module).run(
        arrays, request, value_dim, interpret=True
    )


def inputs(arrays=2 * KV, rows=11):
    """Queries, new arrays, pages and tables; unwritten places hold large numbers."""
    rng = np.random.default_rng(0)
    tables = np.zeros((4, WIDTH), np.int32)
    tables[1:] = 1 + rng.permutation(3 * WIDTH).reshape(3, WIDTH)
    pages = rng.normal(size=(1 + 3 * WIDTH, PAGE, arrays, SIZE)) * 3
    q, new = rng.normal(size=(rows, HEADS, SIZE)), rng.normal(size=(rows, arrays, SIZE))
    return [jnp.asarray(x, jnp.float32) for x in (q, new, pages)] + [jnp.asarray(tables)]


CASES = [
    (backend, name, (i + j) % 2 == 1)
    for i, backend in enumerate(name for name in OP.names if name != "reference")
    for j, name in enumerate(REQUESTS)
]


@pytest.mark.parametrize(
    ("backend", "name", "sinks"), tiers.of(CASES, *(c for c in CASES if c[0] != "pallas_tpu"))
)
def test_a_backend_computes_the_definition_and_writes_the_same_pages(backend, name, sinks):
    biases = jnp.linspace(-1, 2, HEADS) if sinks else None
    ours, wanted = (
        run(*inputs(), SLOTS, POSITIONS, REQUESTS[name], each, biases)
        for each in (backend, "reference")
    )
    assert np.abs(ours[0] - wanted[0]).max() < 2e-6
    assert (ours[0][POSITIONS < 0] == 0).all()
    assert (ours[1] == wanted[1]).all()


@pytest.mark.parametrize(("name", "sinks"), [(name, i % 2 == 1) for i, name in enumerate(REQUESTS)])
@pytest.mark.slow
def test_pieces_of_prompts_are_computed_in_long_tiles_and_their_rest_in_short_ones(name, sinks):
    # for 6 heads, 3 to a kv head, a long tile has 16 rows and a short one 2
    slots = np.repeat([1, 3, 2, 1, 0], [34, 1, 9, 1, 2])
    positions = np.concatenate([np.arange(113, 147), [300], np.arange(9), [150], [-1, -1]])
    biases = jnp.linspace(-1, 2, HEADS) if sinks else None
    ours, wanted = (
        run(*inputs(rows=47), slots, positions, REQUESTS[name], each, biases)[0]
        for each in ("tiles", "reference")
    )
    assert np.abs(ours - wanted).max() < 1e-6 * np.abs(wanted).max()
    long, short = long_and_short_tiles(inputs()[3][slots], jnp.asarray(positions), 16, 2)
    assert [int(long.number), int(short.number)] == [3, 3]
    assert [*long.counts_R[:3]] == [16, 16, 9] and [*short.counts_R[:3]] == [2, 1, 1]


def in_low_precision(pages, dtype):
    """Pages as the cache keeps them, and the numbers that they stand for."""
    numbers, scales = quantize(pages, jnp.dtype(dtype))
    kept = numbers.view(BITS[dtype]) if dtype in BITS else numbers
    return Quantized(kept, scales), numbers.astype(jnp.float32) * scales[..., None]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
@pytest.mark.parametrize("backend", ANY_PAGES)
def test_low_precision_is_attention_over_what_it_stands_for(backend, latent, dtype):
    q, new, pages, tables = inputs(1 if latent else 2 * KV)
    kept, pages = in_low_precision(pages, dtype)
    new = in_low_precision(new, dtype)[1]
    rest = tables, SLOTS, POSITIONS, REQUESTS["window"]
    value_dim = SIZE - 3 if latent else None
    wanted, after = run(q, new, pages, *rest, "reference", value_dim=value_dim)
    o, (numbers, scales) = run(q, new, kept, *rest, backend, value_dim=value_dim)
    assert np.abs(o - wanted).max() < 1e-5
    stood = numbers.view(dtype).astype(jnp.float32) * scales[..., None]
    assert np.allclose(stood, after, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("backend", ANY_PAGES)
@pytest.mark.slow
def test_bits_of_small_floats_are_those_floats(backend):
    q, new, pages, tables = (x.astype(jnp.bfloat16) for x in inputs())
    tables, pages = inputs()[3], pages.astype(jnp.bfloat16)
    rest = tables, SLOTS, POSITIONS, Request(0.3), backend
    wanted, after = run(q, new, pages, *rest)
    o, bits = run(q, new, pages.view(BITS["bfloat16"]), *rest)
    assert (o == wanted).all() and (bits.view("bfloat16") == after).all()


@pytest.mark.parametrize("backend", OP.names)
@pytest.mark.slow
def test_a_latent_is_the_key_of_all_heads_and_its_first_numbers_the_value(backend):
    q, new, pages, tables = inputs(1)
    o, pages = run(
        q, new, pages, tables, SLOTS, POSITIONS, Request(0.3), backend, value_dim=SIZE - 3
    )
    kept = np.asarray(pages[tables[3]], np.float64).reshape(-1, SIZE)[:301]
    scores = np.asarray(q[6], np.float64) @ kept.T * 0.3
    share = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = share @ kept[:, : SIZE - 3] / share.sum(-1, keepdims=True)
    assert np.abs(o[6] - wanted).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.slow
def test_the_definition_is_attention_over_the_whole_text():
    q, new, pages, tables = inputs()
    o, pages = run(q, new, pages, tables, SLOTS, POSITIONS, REQUESTS["window"], "reference")
    both = pages[tables[1]].reshape(1, -1, KV, 2, SIZE)[:, :156]
    q_all = jnp.zeros((1, 156, HEADS, SIZE)).at[0, 150:].set(q[:6])
    wanted = attention(q_all, both[..., 0, :], both[..., 1, :], None, REQUESTS["window"])
    assert np.abs(o[:6] - wanted[0, 150:]).max() < 2e-6


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, "float32") for name in OP.names]
    + [(name, dtype) for name in ANY_PAGES for dtype in ("int8", "float8_e4m3fn")],
)
def test_a_row_has_the_same_bits_alone_and_beside_others(backend, dtype):
    q, new, pages, tables = inputs()
    if dtype != "float32":
        pages, _ = in_low_precision(pages, dtype)
    together = run(q, new, pages, tables, SLOTS, POSITIONS, Request(0.3), backend)[0]
    alone = np.where(np.arange(len(SLOTS)) == 2, POSITIONS, -1)
    # its request's earlier rows are in the pages already
    written = run(q, new, pages, tables, SLOTS, POSITIONS, Request(0.3), backend)[1]
    order = np.roll(np.arange(len(SLOTS)), -2)
    one = run(
        q[order], new[order], written, tables, SLOTS[order], alone[order], Request(0.3), backend
    )[0]
    assert (np.asarray(one[0]) == np.asarray(together[2])).all()


def test_what_is_not_finite_is_not_left_to_the_next_owner_of_a_page():
    q, new, pages, tables = inputs()
    _, pages = run(
        q, new.at[:].set(jnp.nan), pages, tables, SLOTS, POSITIONS, Request(0.3), "tiles"
    )
    assert np.isfinite(pages).all()


@pytest.mark.slow
def test_keys_and_values_in_bfloat16_are_the_definition_in_float32():
    q, _, pages, tables = inputs()
    cut = [x.astype(jnp.bfloat16) for x in (q, pages)]
    arrays = Inputs(*cut, tables[SLOTS], jnp.asarray(POSITIONS), None, None)
    wanted = OP["reference"].run(
        arrays._replace(q_RNH=cut[0].astype(jnp.float32)), REQUESTS["window"], None
    )
    assert np.abs(interpreted("pallas_tpu", arrays, REQUESTS["window"]) - wanted).max() < 3e-2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_heads": 6, "heads": 12}, "6 kv_heads"),
        ({"numbered": True}, "some of the 8 kv_heads"),
        ({"page": 12}, "page 12"),
        ({"page": 4096}, "VMEM"),
        ({"dtype": "float16", "cache_dtype": "float16"}, "float16 is neither"),
        ({"cache_dtype": "int8"}, "pages are int8"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(change, reason):
    case = dict(
        request=Request(1.0),
        rows=64,
        keys=4096,
        page=16,
        heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        cache_dtype="bfloat16",
        latent=False,
        sinks=True,
        device=Device("tpu", "TPU v5p"),
    )
    backend = OP["pallas_tpu"]
    assert backend.supports(PagedCase(**case)) is None
    assert reason in backend.supports(PagedCase(**{**case, **change}))


FEATURES = Request(0.1, window=300, soft_cap=30.0, chunk=1000)
COMPILED = {
    "v5e:2x2": ((8, 2, 128, 128), "bfloat16", Request(0.1)),
    "v5p:2x2x1": ((8, 4, 256, 256), "bfloat16", FEATURES),
    "v6e:2x2": ((16, 1, 640, 512), "bfloat16", Request(0.1)),
    "tpu7x:2x2x1": ((6, 2, 128, 128), "float32", FEATURES),
    "h100:1x1": ((8, 2, 64, 64), "bfloat16", FEATURES),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in COMPILED])
def test_it_compiles_for_hardware_that_is_not_here_and_copies_no_cache(name):
    (heads, kv, size, value_size), dtype, request = COMPILED[name]
    rows, arrays, pages = 16, 2 * kv if size == value_size else 1, 1 << 14
    cfg = MeshConfig(fsdp=1)
    mesh = sharding.make_mesh(cfg, parse(name).devices()[:1])

    def shape(*sizes, dtype="int32"):
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    def step(q, new, pages, tables, slots, positions, sinks):
        more = {"sinks_N": sinks, "value_dim": None if size == value_size else value_size}
        return paged_attention(q, new, pages, tables, slots, positions, request, **more)

    floats = (rows, heads, size), (rows, arrays, size), (pages, 16, arrays, size)
    given = [shape(*sizes, dtype=dtype) for sizes in floats]
    given += [shape(9, 64), shape(rows), shape(rows), shape(heads, dtype="float32")]
    with sharding.use(mesh, cfg), record_choices() as choices:
        compiled = jax.jit(step, donate_argnums=2).lower(*given).compile()
    tpu = parse(name).chip.platform == "tpu"
    assert [choice.backend for choice in choices] == ["pallas_tpu" if tpu else "blockwise"]
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == tpu
    assert compiled.memory_analysis().temp_size_in_bytes < pages * 16 * arrays * size
