"""Grouped matmul backends against the reference, and the reference against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.grouped_matmul import BACKENDS, choose, grouped_matmul, reference

SIZES = {"one group": (5,), "odd": (3, 1, 9), "all to the last": (0, 0, 13), "more groups than rows": (1, 0, 0, 1, 0, 0, 0, 1),
         "several blocks": (300, 0, 5, 129, 128, 1)}
REST = {"rows of no group": ((3, 0, 4), 6), "no row of a group": ((0, 0), 5), "blocks of no group": ((129, 5), 300)}
CASES = {name: (sizes, 0) for name, sizes in SIZES.items()} | REST


def inputs(sizes, rest=0, k=5, n=3, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(sum(sizes) + rest, k)), rng.normal(size=(len(sizes), k, n))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize(("sizes", "rest"), CASES.values(), ids=CASES)
def test_the_reference_is_the_definition(sizes, rest):
    x, w, sizes_E = inputs(sizes, rest)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    wanted = [row @ matrix for row, matrix in zip(np.asarray(x), np.asarray(w)[groups], strict=False)] + [np.zeros(w.shape[2])] * rest
    np.testing.assert_allclose(jax.jit(reference)(x, w, sizes_E), wanted, atol=1e-5)


@pytest.mark.parametrize("backend", ["ragged_dot", "blocks"])
@pytest.mark.parametrize(("sizes", "rest"), CASES.values(), ids=CASES)
def test_backends_equal_the_reference_in_values_and_gradients(sizes, rest, backend):
    x, w, sizes_E = inputs(sizes, rest)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(x.shape[0], w.shape[2])), jnp.float32)

    def run(backend):
        out, pull = jax.vjp(lambda x, w: BACKENDS[backend](x, w, sizes_E), x, w)
        return out, *pull(dy)

    for got, want in zip(*jax.jit(lambda: (run(backend), run("reference")))(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_bfloat16_stays_near_float32_and_sums_gradients_in_it():
    exact, (x, w, sizes_E) = inputs((300, 0, 40)), inputs((300, 0, 40), dtype=jnp.bfloat16)

    def run(x, w, backend):
        return jax.value_and_grad(lambda x, w: jnp.square(grouped_matmul(x, w, sizes_E, backend).astype(jnp.float32)).sum(), (0, 1))(x, w)

    (value, grads), (wanted, wants) = jax.jit(lambda: (run(x, w, "blocks"), run(*exact[:2], "reference")))()
    assert all(grad.dtype == jnp.bfloat16 for grad in grads)
    np.testing.assert_allclose(value, wanted, rtol=0.01)
    for got, want in zip(grads, wants, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.05, atol=0.01 * float(jnp.abs(want).max()))


def test_auto_is_a_loop_over_blocks_on_a_cpu_alone():
    assert [choose("auto", platform) for platform in ("cpu", "tpu", "gpu")] == ["blocks", "ragged_dot", "ragged_dot"]
    assert choose("reference", "cpu") == "reference"
