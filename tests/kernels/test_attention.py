"""Attention backends against the dense reference, and the reference against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.attention import BACKENDS, Request, attention, reference


def inputs(t, heads=4, kv=2, size=8, packed=True, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(2, t, n, size)), jnp.float32) for n in (heads, kv, kv))
    segments = np.sort(rng.integers(1, 4, (2, t)), axis=1) if packed else None
    return q, k, v, segments if segments is None else jnp.asarray(segments, jnp.int32)


def by_loop(q, k, v, segments, request):
    """The definition again, one query and one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, i, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        seen = [j for j in range(i + 1) if (request.window is None or i - j < request.window)
                and (segments is None or segments[b, i] == segments[b, j])]
        s = k[b, seen, head] @ q[b, i, n] * request.scale
        s = request.soft_cap * np.tanh(s / request.soft_cap) if request.soft_cap else s
        p = np.exp(s - s.max())
        out[b, i, n] = p / p.sum() @ v[b, seen, head]
    return out


@pytest.mark.parametrize("request_", [Request(0.35), Request(0.35, window=5), Request(1.5, soft_cap=2.0)], ids=["plain", "window", "cap"])
def test_the_reference_is_the_definition(request_):
    q, k, v, segments = inputs(13)
    np.testing.assert_allclose(reference(q, k, v, segments, request_), by_loop(q, k, v, segments, request_), atol=2e-6)


CASES = [(1, 2, None, None, False), (7, 1, 1, None, True), (128, 4, 50, 3.0, True), (300, 2, None, 3.0, True), (300, 1, 50, None, False),
         (300, 2, 500, None, True), (2100, 2, 130, None, True)]


@pytest.mark.parametrize(("t", "kv", "window", "cap", "packed"), CASES)
def test_blockwise_equals_the_reference_in_values_and_gradients(t, kv, window, cap, packed):
    q, k, v, segments = inputs(t, kv=kv, packed=packed)
    asked = Request(0.4, window, cap)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def run(backend):
        return jax.jit(jax.value_and_grad(lambda q, k, v: (BACKENDS[backend](q, k, v, segments, asked) * weight).sum(), (0, 1, 2)))(q, k, v)

    (ours, grads), (theirs, wanted) = run("blockwise"), run("reference")
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-3)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_changing_one_document_never_changes_its_neighbour(backend):
    q, k, v, _ = inputs(260)
    segments = jnp.asarray([[1] * 150 + [2] * 110] * 2, jnp.int32)
    before = attention(q, k, v, segments, Request(0.35), backend)
    after = attention(q, k.at[:, :150].add(1.0), v.at[:, :150].add(1.0), segments, Request(0.35), backend)
    np.testing.assert_array_equal(before[:, 150:], after[:, 150:])
    assert not np.array_equal(before[:, :150], after[:, :150])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_near_float32(backend):
    q, k, v, segments = inputs(140)
    exact = attention(q, k, v, segments, Request(0.35), "reference")
    short = attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), segments, Request(0.35), backend)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_allclose(short.astype(jnp.float32), exact, atol=0.04)


def test_blockwise_keeps_no_square_score_matrix():
    q, k, v, _ = inputs(2048, packed=False)
    grad = jax.grad(lambda q: attention(q, k, v, None, Request(0.35), "blockwise").sum())
    sizes = [var.aval.size for eqn in jax.make_jaxpr(grad)(q).jaxpr.eqns for var in eqn.outvars]
    assert max(sizes) < 2 * 4 * 2048 * 2048 / 4
