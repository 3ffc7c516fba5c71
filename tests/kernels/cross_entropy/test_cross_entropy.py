"""Cross-entropy of given logits against jax's log-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.cross_entropy import cross_entropy

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 11)) * 30, jnp.float32)
TARGETS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 5)), jnp.int32)


def plain(logits):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0], jax.nn.logsumexp(
        logits, axis=-1
    )


def weighted(f):
    return lambda logits: sum(
        (part * jnp.arange(10.0).reshape(2, 5) * w).sum()
        for part, w in zip(f(logits), (1.0, 0.3), strict=True)
    )


def test_values_are_log_softmax():
    for ours, theirs in zip(cross_entropy(LOGITS, TARGETS), plain(LOGITS), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_log_softmax():
    ours = jax.grad(weighted(lambda x: cross_entropy(x, TARGETS)))(LOGITS)
    np.testing.assert_allclose(ours, jax.grad(weighted(plain))(LOGITS), rtol=1e-5, atol=1e-6)
