"""Attention backends against the dense reference, and the reference against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from maxstack.kernels.attention import OP, attention, blockwise
from maxstack.kernels.attention.request import Inputs, Request, visibility_mask

BACKENDS = ["reference", "blockwise"]
compiled = jax.jit(attention, static_argnums=(4, 5))


def inputs(t, heads=4, kv=2, size=8, packed=True, seed=0, value_size=None):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, t, n, h)), jnp.float32)
        for n, h in ((heads, size), (kv, size), (kv, value_size or size))
    )
    segments = np.sort(rng.integers(1, 4, (2, t)), axis=1) if packed else None
    return q, k, v, segments if segments is None else jnp.asarray(segments, jnp.int32)


def places(segments, t):
    """Positions within the documents, by counting."""
    if segments is None:
        return jnp.arange(t)[None]
    return jnp.asarray(
        [[int((row[:i] == row[i]).sum()) for i in range(t)] for row in np.asarray(segments)]
    )


def by_loop(q, k, v, segments, request, sinks=None):
    """The definition again, one query and one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    at = np.broadcast_to(places(segments, q.shape[1]), q.shape[:2])
    for b, i, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        seen = [
            j
            for j in range(i + 1 if request.causal else q.shape[1])
            if (request.window is None or abs(i - j) < request.window)
            and (request.chunk is None or at[b, i] // request.chunk == at[b, j] // request.chunk)
            and (segments is None or segments[b, i] == segments[b, j])
        ]
        s = k[b, seen, head] @ q[b, i, n] * request.scale
        s = request.soft_cap * np.tanh(s / request.soft_cap) if request.soft_cap else s
        p = np.exp(s)
        out[b, i, n] = p / (p.sum() + (0 if sinks is None else np.exp(sinks[n]))) @ v[b, seen, head]
    return out


SINKS = jnp.asarray([0.5, -2.0, 3.0, 0.0])
ASKED = {
    "plain": (Request(0.35), None),
    "window": (Request(0.35, window=5), None),
    "cap": (Request(1.5, soft_cap=2.0), None),
    "chunk": (Request(0.35, chunk=4), None),
    "sinks": (Request(0.35, window=5, soft_cap=2.0), SINKS),
    "both ways": (Request(0.35, causal=False), SINKS),
    "window both ways": (Request(0.35, window=5, causal=False), None),
    "chunk both ways": (Request(0.35, chunk=4, causal=False), None),
}


@pytest.mark.parametrize(("name", "packed"), [*((name, True) for name in ASKED), ("chunk", False)])
def test_the_reference_is_the_definition(name, packed):
    asked, sinks = ASKED[name]
    q, k, v, segments = inputs(13, packed=packed, value_size=6)
    got = compiled(q, k, v, segments, asked, "reference", sinks)
    np.testing.assert_allclose(got, by_loop(q, k, v, segments, asked, sinks), atol=2e-6)


ELSEWHERE = {
    "all keys": (40, 70, Request(0.4, causal=False), None),
    "after the keys": (20, 90, Request(0.4, offset=70), SINKS),
    "more queries than keys, both sides": (
        70,
        33,
        Request(0.4, window=9, causal=False, offset=-5),
        None,
    ),
    "a wide window on both sides": (
        60,
        85,
        Request(0.4, window=40, causal=False, offset=20),
        SINKS,
    ),
    "some before every key": (50, 45, Request(0.4, window=30, soft_cap=2.0, offset=-20), None),
    "some beyond every window": (70, 20, Request(0.4, window=8), None),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.slow
def test_blockwise_serves_queries_anywhere_among_other_keys(name):
    """Documents lie in no order, and some queries' hold no key. A query that sees none gives
    exactly nothing, and adds to no gradient of theirs."""
    t, s, asked, sinks = ELSEWHERE[name]
    rng = np.random.default_rng(3)
    q, k, v, do = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, t, 4, 8), (2, s, 2, 8), (2, s, 2, 5), (2, t, 4, 5))
    )
    same = tuple(
        (
            jnp.asarray(rng.integers(0, 4, (rows, t)), jnp.int32),
            jnp.asarray(rng.integers(0, 3, (rows, s)), jnp.int32),
        )
        for rows in (1, 2)
    )
    blind = ~np.asarray(visibility_mask(asked, jnp.arange(t), jnp.arange(s), same)).any(axis=2)

    @functools.partial(jax.jit, static_argnums=0)
    def both(backend, do):
        more = {"blocks": {"rows": 16, "keys": 8}} if backend == "blockwise" else {}
        floats = (q, k, v) if sinks is None else (q, k, v, sinks)
        out, pull = jax.vjp(
            lambda q, k, v, sinks=None: OP[backend].run(
                Inputs(q, k, v, sinks, same), asked, **more
            ),
            *floats,
        )
        return out, *pull(do)

    for got, want in zip(both("blockwise", do), both("reference", do), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=4e-5)
    out, dq, dk, dv, *_ = map(np.asarray, both("blockwise", do * blind[:, :, None, None]))
    assert blind.any() and not blind.all()
    assert not out[blind].any() and not any(x.any() for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_are_counted_by_the_positions_that_are_given(backend):
    arrays = inputs(20)
    at = places(arrays[3], 20)
    found, given, later = (
        compiled(*arrays, Request(0.35, chunk=4), backend, positions_BT=positions)
        for positions in (None, at, at + 2)
    )
    np.testing.assert_array_equal(found, given)
    assert not np.allclose(given, later)


def largest(function, q):
    """Numbers in the largest array of the gradient by q, whether inside a loop or not."""
    program = jax.make_jaxpr(jax.grad(function))(q).jaxpr
    return max(var.aval.size for each in trees.equations(program) for var in each.outvars)


def test_what_layers_have_in_common_is_not_kept_for_each_tile(monkeypatch):
    """Differentiating a scan over layers takes out of it what is the same for all layers: numbers
    of positions, but not the masks made of them."""
    monkeypatch.setitem(blockwise.SIZES, "cpu", (16, 16))
    q, k, v, segments = inputs(512)

    def layers(q):
        def layer(q, _):
            return jax.checkpoint(lambda q: attention(q, k, v, segments, Request(0.35)))(q), None

        return jax.lax.scan(layer, q, None, length=2)[0].sum()

    assert largest(layers, q) <= 2 * q.size


@pytest.mark.parametrize("window", [None, 20])
def test_blockwise_memory_grows_with_the_sequence_and_not_with_its_square(window, monkeypatch):
    monkeypatch.setitem(blockwise.SIZES, "cpu", (16, 16))

    def needed(t):
        q, k, v, _ = inputs(t, packed=False)
        return largest(
            lambda q: attention(q, k, v, None, Request(0.35, window), "blockwise").sum(), q
        )

    assert needed(1024) <= 2 * needed(512) < 2 * 4 * 512 * 512 / 10
