"""Products with weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.layers.weight import multiply


@pytest.mark.parametrize(
    "shape", [(8, 6), (6, 8), (8, 4096), (8, 2, 4096), (4096, 8), (4096, 8192)], ids=str
)
@pytest.mark.slow
def test_gradients_of_a_product_are_those_of_einsum_whatever_the_shape(shape):
    """Gradients of weights are multiplied as they are, turned, or in pieces, by their shape."""
    x = jax.random.normal(jax.random.key(0), (2, 3, shape[0]))
    w = jax.random.normal(jax.random.key(1), shape)

    def gradients(product):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.square(product(x, w)).mean(), (0, 1)))(
            x, w
        )

    ours, expected = (
        gradients(product) for product in (multiply, lambda x, w: jnp.tensordot(x, w, 1))
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
