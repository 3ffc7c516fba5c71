"""Attention over split sequences, around a ring and by all-to-all, against the dense reference on
one device: values and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention import attention, blockwise
from maxstack.kernels.attention.request import Request
from maxstack.kernels.attention.ring import chunk_pairs, routes
from maxstack.schema.mesh import MeshConfig

T = 64


@functools.cache
def inputs(heads, kv, packed):
    """Queries, keys, values (of another size), sinks, segments of ragged length, positions, and
    weights of the outputs."""
    rng = np.random.default_rng(0)
    q, k, v, weights = (
        rng.normal(size=(2, T, n, h)).astype(np.float32)
        for n, h in ((heads, 8), (kv, 8), (kv, 6), (heads, 6))
    )
    segments, positions = None, np.arange(T)[None]
    if packed:
        segments = np.sort(rng.integers(1, 5, (2, T)), axis=1).astype(np.int32)
        positions = positions - np.stack([np.searchsorted(row, row) for row in segments])
    sinks = rng.normal(size=heads).astype(np.float32)
    return q, k, v, sinks, segments, positions.astype(np.int32), weights


def results(asked, sinks, backend, q, k, v, sinks_N, segments, positions, weights):
    """(outputs, gradients of queries, keys, values and sinks), all in natural order."""

    def total(q, k, v, sinks_N):
        given = sequences.arrange((q, k, v, segments, positions))
        o = sequences.natural(
            attention(*given[:4], asked, backend, sinks_N if sinks else None, given[4])
        )
        return (o * weights).sum(), o

    (_, o), grads = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks_N)
    return o, *grads


@functools.cache
def alone(asked, sinks, heads, kv, packed):
    return jax.jit(functools.partial(results, asked, sinks, "reference"))(
        *inputs(heads, kv, packed)
    )


PLAIN, PACKED, SINKS = {}, {"packed": True}, {"sinks": True, "packed": True}
RING, ULYSSES, NO_RULE = (
    {"context_kind": "ring"},
    {"context_kind": "ulysses"},
    {"rules": {"kv_heads": None}},
)
CASES = {
    "ring of 2, chunks, with tensor": (
        RING | {"data": 2, "context": 2, "tensor": 2},
        Request(0.4, chunk=24),
        4,
        2,
        SINKS,
    ),
    "ring of 4, keys not split over tensor": (
        RING | {"data": 1, "context": 4, "tensor": 2} | NO_RULE,
        Request(0.4),
        6,
        3,
        SINKS,
    ),
    "ring of 8, window over several parts, soft cap": (
        RING | {"data": 1, "context": 8},
        Request(1.5, 10, 2.0),
        4,
        2,
        PLAIN,
    ),
    "ulysses of 4, fewer keys than devices": (
        ULYSSES | {"data": 2, "context": 4},
        Request(1.5, 20, 2.0),
        8,
        2,
        SINKS,
    ),
    "ulysses of 8, chunks": (
        ULYSSES | {"data": 1, "context": 8},
        Request(0.4, chunk=24),
        8,
        8,
        PACKED,
    ),
    "ring of 4, both ways": (
        RING | {"data": 2, "context": 4},
        Request(0.4, causal=False),
        4,
        2,
        SINKS,
    ),
    "ring of 8, window to both sides over several parts": (
        RING | {"data": 1, "context": 8},
        Request(1.5, 10, 2.0, causal=False),
        4,
        2,
        PACKED,
    ),
    "ulysses of 4, chunks both ways": (
        ULYSSES | {"data": 2, "context": 4},
        Request(0.4, chunk=24, causal=False),
        8,
        2,
        SINKS,
    ),
    "tensor alone, keys not split": (
        {"data": 2, "tensor": 4} | NO_RULE,
        Request(0.4, 20),
        8,
        2,
        SINKS,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_split_sequences_give_what_whole_ones_do(name, monkeypatch):
    monkeypatch.setitem(blockwise.SIZES, "cpu", (8, 8))
    given, asked, heads, kv, features = CASES[name]
    sinks, packed = features.get("sinks", False), features.get("packed", False)
    cfg = MeshConfig(**given)
    mesh = sharding.make_mesh(cfg, jax.devices())

    def on_mesh(*arrays):
        with sharding.use(mesh, cfg):
            return results(asked, sinks, "auto", *arrays)

    found = jax.jit(on_mesh)(*inputs(heads, kv, packed))
    for ours, wanted in zip(found, alone(asked, sinks, heads, kv, packed), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def visits(parts, chunk, window, causal=True):
    """(query chunk, key chunk) of what each device computes, by device: its own chunks, then every
    stop of keys on their ways."""
    held = [(part, 2 * parts - 1 - part) for part in range(parts)]
    found = {
        device: [
            (mine, theirs)
            for mine in held[device]
            for theirs in held[device]
            if mine >= theirs or not causal
        ]
        for device in range(parts)
    }
    for direction, steps in routes(parts, chunk, window):
        for device in range(parts):
            for step in range(1, steps + 1):
                other = (device - direction * step) % parts
                found[device] += [
                    (held[device][mine], held[other][theirs])
                    for mine, theirs in chunk_pairs(parts, device, direction * step, causal)
                ]
    return found


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_every_device_of_a_ring_has_the_same_work_and_together_they_do_it_all_once(parts):
    found = visits(parts, 16, None)
    assert {len(pairs) for pairs in found.values()} == {2 * parts + 1}
    assert sorted(pair for pairs in found.values() for pair in pairs) == [
        (q, k) for q in range(2 * parts) for k in range(q + 1)
    ]


def test_without_a_causal_mask_every_device_meets_all_keys_once():
    found = visits(4, 16, None, causal=False)
    assert {len(pairs) for pairs in found.values()} == {2 * 8}
    assert {pair for pairs in found.values() for pair in pairs} == set(np.ndindex(8, 8))


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (2, 2), (17, 2), (18, 4), (50, 7)])
def test_keys_go_no_further_than_a_window_reaches(window, hops):
    """Chunks of 16: a window of 17 sees the neighbouring chunk alone, one of 18 a place of the one
    before it."""
    found = {pair for pairs in visits(8, 16, window).values() for pair in pairs}
    assert sum(steps for _, steps in routes(8, 16, window)) == hops
    assert {
        (q, k) for q in range(16) for k in range(q + 1) if (q - k - 1) * 16 + 1 < window or q == k
    } <= found
    both_ways = {pair for pairs in visits(8, 16, window, causal=False).values() for pair in pairs}
    assert found | {pair[::-1] for pair in found} <= both_ways


@pytest.mark.parametrize(
    ("kind", "order"), [("ring", [0, 5, 1, 4, 2, 3]), ("ulysses", [0, 1, 2, 3, 4, 5])]
)
def test_positions_are_arranged_for_the_ring_alone_and_come_back(kind, order):
    cfg = MeshConfig(data=1, context=3, tensor=2, context_kind=kind)
    x = jnp.arange(2 * 12).reshape(2, 12)
    with sharding.use(sharding.make_mesh(cfg, jax.devices()[:6]), cfg):
        arranged, back = jax.jit(
            lambda x: (sequences.arrange(x), sequences.natural(sequences.arrange(x)))
        )(x)
    np.testing.assert_array_equal(arranged, x.reshape(2, 6, 2)[:, order].reshape(2, 12))
    np.testing.assert_array_equal(back, x)
