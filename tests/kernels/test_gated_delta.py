"""The gated delta rule by chunks against the recurrence, and the recurrence against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.gated_delta import OP, gated_delta

T, SEGMENTS = 50, jnp.asarray([[1] * 13 + [2] * 24 + [3] * 13, [7] * 50], jnp.int32)


def inputs(t=T, heads=4, keys=2, rate=0.3, seed=0):
    """Queries, keys, values, decays of about `rate` a position, and write strengths, as a layer
    makes them."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 2, t, keys, 8))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(2, t, heads, 6))
    decay = -rate * np.exp(rng.normal(size=(2, t, heads)))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, rng.uniform(size=(2, t, heads)))]


def by_loop(q, k, v, decay, beta, segments):
    """The definition again, one head and one place at a time, in float64."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta))
    out = np.zeros(v.shape)
    for b, n in np.ndindex(v.shape[0], v.shape[2]):
        head = n // (v.shape[2] // k.shape[2])
        state = np.zeros((k.shape[-1], v.shape[-1]))
        for i in range(v.shape[1]):
            if i and segments is not None and segments[b, i] != segments[b, i - 1]:
                state[:] = 0
            state = np.exp(decay[b, i, n]) * state
            state = state + beta[b, i, n] * np.outer(
                k[b, i, head], v[b, i, n] - state.T @ k[b, i, head]
            )
            out[b, i, n] = state.T @ q[b, i, head]
    return out


run = jax.jit(gated_delta, static_argnums=(6, 7))


@functools.partial(jax.jit, static_argnames=("chunk", "backend"))
def gradients(x, segments, weight, chunk, backend):
    def total(*x):
        return (gated_delta(*x, segments, chunk, backend) * weight).sum()

    return jax.value_and_grad(total, (0, 1, 2, 3, 4))(*x)


def assert_same(x, chunk):
    """Values and gradients of both backends, to a share of the largest of each."""
    weight = jnp.asarray(np.random.default_rng(1).normal(size=x[2].shape), jnp.float32)
    ours, wanted = (
        gradients(x, SEGMENTS, weight, chunk, backend) for backend in ("chunked", "reference")
    )
    np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-5, atol=1e-4)
    for got, want in zip(ours[1], wanted[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("backend", OP.names)
@pytest.mark.parametrize(("t", "chunk"), [(1, 64), (21, 1), (T, 16), (130, 64)])
def test_every_backend_is_the_definition(t, chunk, backend):
    x, segments = (
        inputs(t),
        jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (2, t)), axis=1), jnp.int32),
    )
    np.testing.assert_allclose(run(*x, segments, chunk, backend), by_loop(*x, segments), atol=3e-6)


@pytest.mark.parametrize("rate", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_equal_the_recurrence_in_values_and_gradients(chunk, rate):
    assert_same(inputs(rate=rate), chunk)


@pytest.mark.parametrize("rate", [1e-8, 50.0, 1e6, 1e20, np.inf])
def test_extreme_decays_give_right_and_finite_gradients(rate):
    x = inputs(rate=1.0)
    x[3] = jnp.where(jnp.arange(T)[:, None] % 3 == 0, -rate, x[3])
    assert_same(x, 16)


def test_repeated_keys_that_never_fade_keep_their_digits():
    x = inputs(rate=1e-4)
    x[1] = jnp.broadcast_to(x[1][:, :1], x[1].shape)
    x[4] = jnp.full_like(x[4], 0.99)
    np.testing.assert_allclose(run(*x, None, 64, "chunked"), by_loop(*x, None), atol=1e-5)


@pytest.mark.parametrize("backend", OP.names)
def test_changing_one_document_never_changes_its_neighbours(backend):
    x = inputs()
    changed = [part.at[0, 13:37].multiply(1.7) for part in x]
    before, after = run(*x, SEGMENTS, 16, backend)[0], run(*changed, SEGMENTS, 16, backend)[0]
    np.testing.assert_array_equal(before[:13], after[:13])
    np.testing.assert_array_equal(before[37:], after[37:])
    assert not np.array_equal(before[13:37], after[13:37])


@pytest.mark.parametrize("backend", OP.names)
def test_bfloat16_inputs_are_only_rounded(backend):
    x = inputs()
    short = [part.astype(jnp.bfloat16) for part in x[:3]] + x[3:]
    out = run(*short, SEGMENTS, 16, backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), by_loop(*short, SEGMENTS), atol=1e-5, rtol=0.005
    )
