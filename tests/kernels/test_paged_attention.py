"""Attention over pages by each backend against its definition, and a row's bits in company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.attention import attention
from maxstack.kernels.attention.request import Request
from maxstack.kernels.paged_attention import BITS, OP, Quantized, paged_attention, quantized

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
    return paged_attention(
        q,
        new,
        pages,
        tables,
        slots,
        positions,
        request,
        backend,
        sinks_N=sinks,
        value_dim=value_dim,
    )


def inputs(arrays=2 * KV):
    """Queries, new arrays, pages and tables; unwritten places hold large numbers."""
    rng, rows = np.random.default_rng(0), len(SLOTS)
    tables = np.zeros((4, WIDTH), np.int32)
    tables[1:] = 1 + rng.permutation(3 * WIDTH).reshape(3, WIDTH)
    pages = rng.normal(size=(1 + 3 * WIDTH, PAGE, arrays, SIZE)) * 3
    q, new = rng.normal(size=(rows, HEADS, SIZE)), rng.normal(size=(rows, arrays, SIZE))
    return [jnp.asarray(x, jnp.float32) for x in (q, new, pages)] + [jnp.asarray(tables)]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("backend", [name for name in OP.names if name != "reference"])
def test_a_backend_computes_the_definition_and_writes_the_same_pages(backend, name, sinks):
    biases = jnp.linspace(-1, 2, HEADS) if sinks else None
    ours, wanted = (
        run(*inputs(), SLOTS, POSITIONS, REQUESTS[name], each, biases)
        for each in (backend, "reference")
    )
    assert np.abs(ours[0] - wanted[0]).max() < 2e-6
    assert (ours[0][POSITIONS < 0] == 0).all()
    assert (ours[1] == wanted[1]).all()


def in_low_precision(pages, dtype):
    """Pages as the cache keeps them, and the numbers that they stand for."""
    numbers, scales = quantized(pages, jnp.dtype(dtype))
    kept = numbers.view(BITS[dtype]) if dtype in BITS else numbers
    return Quantized(kept, scales), numbers.astype(jnp.float32) * scales[..., None]


@pytest.mark.parametrize("dtype, step", [("int8", 1 / 254), ("float8_e4m3fn", 1 / 28)])
def test_low_precision_is_within_half_a_step_of_the_largest_number(dtype, step):
    # int8: 127 steps; e4m3: the largest numbers, 256 to 448, lie 32 apart
    x = inputs()[2]
    error = np.abs(in_low_precision(x, dtype)[1] - x)
    assert (error <= np.abs(x).max(-1, keepdims=True) * step * 1.0001).all()
    assert (error > 0).any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
@pytest.mark.parametrize("backend", OP.names)
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


@pytest.mark.parametrize("backend", OP.names)
def test_bits_of_small_floats_are_those_floats(backend):
    q, new, pages, tables = (x.astype(jnp.bfloat16) for x in inputs())
    tables, pages = inputs()[3], pages.astype(jnp.bfloat16)
    rest = tables, SLOTS, POSITIONS, Request(0.3), backend
    wanted, after = run(q, new, pages, *rest)
    o, bits = run(q, new, pages.view(BITS["bfloat16"]), *rest)
    assert (o == wanted).all() and (bits.view("bfloat16") == after).all()


@pytest.mark.parametrize("backend", OP.names)
def test_a_latent_is_the_key_of_all_heads_and_its_first_numbers_the_value(backend):
    q, new, pages, tables = inputs(1)
    o, pages = run(
        q, new, pages, tables, SLOTS, POSITIONS, Request(0.3), backend, value_dim=SIZE - 3
    )
    kept = np.asarray(pages[tables[3]]).reshape(-1, SIZE)[:301]
    scores = np.asarray(q[6]) @ kept.T * 0.3
    share = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = share @ kept[:, : SIZE - 3] / share.sum(-1, keepdims=True)
    assert np.abs(o[6] - wanted).max() < 2e-6


def test_the_definition_is_attention_over_the_whole_text():
    q, new, pages, tables = inputs()
    o, pages = run(q, new, pages, tables, SLOTS, POSITIONS, REQUESTS["window"], "reference")
    both = pages[tables[1]].reshape(1, -1, KV, 2, SIZE)[:, :156]
    q_all = jnp.zeros((1, 156, HEADS, SIZE)).at[0, 150:].set(q[:6])
    wanted = attention(q_all, both[..., 0, :], both[..., 1, :], None, REQUESTS["window"])
    assert np.abs(o[:6] - wanted[0, 150:]).max() < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", OP.names)
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
