"""Backends of the grouped matmul against its definition in float64: values and both gradients; and
whom `auto` takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.errors import ConfigError
from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul import OP, GroupedMatmulCase, grouped_matmul, megablox

RUNS = {
    "reference": {},
    "ragged_dot": {},
    "blocks": {},
    "megablox": {"blocks": {"rows": 16, "contracted": 16, "columns": 16}, "interpret": True},
}
SIZES = {
    "odd": (3, 1, 9, 0, 30, 27),
    "one group has all": (0, 0, 70, 0, 0, 0),
    "several blocks": (30, 0, 5, 17, 16, 2),
    "rows of no group": (3, 0, 4, 0, 0, 20),
    "no row of a group": (0, 0, 0, 0, 0, 0),
    "whole blocks": (16, 32, 16, 0, 0, 0),
}
"""Sizes of the groups of 70 rows."""


def inputs(sizes, rows=70, k=37, n=21):
    """x, w and the gradient of the result; rows of no group hold NaN."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape) for shape in ((rows, k), (len(sizes), k, n), (rows, n)))
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    return x, w, dy


def wanted(sizes, x, w, dy):
    """The result and both gradients, in float64."""
    y, dx, dw, start = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape), 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        y[mine], dx[mine], dw[group] = (
            x[mine] @ w[group],
            dy[mine] @ w[group].T,
            x[mine].T @ dy[mine],
        )
        start += size
    return y, dx, dw


@functools.cache
def compiled(backend):
    @jax.jit
    def both(x, w, dy, sizes_E):
        y, pull = jax.vjp(lambda x, w: OP[backend].run(x, w, sizes_E, **RUNS[backend]), x, w)
        return y, *pull(dy)

    return both


def computed(backend, sizes, x, w, dy, dtype=jnp.float32):
    """The result and both gradients."""
    return compiled(backend)(
        *(jnp.asarray(one, dtype) for one in (x, w, dy)), jnp.asarray(sizes, jnp.int32)
    )


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_backends_equal_the_definition_in_values_and_gradients(sizes, backend):
    given = inputs(sizes)
    for got, want in zip(computed(backend, sizes, *given), wanted(sizes, *given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_bfloat16_is_summed_in_float32():
    sizes = (300, 0, 40)
    given = [
        np.asarray(jnp.asarray(one, jnp.bfloat16), np.float64) for one in inputs(sizes, 350, 16, 16)
    ]
    for got, want in zip(
        computed("blocks", sizes, *given, dtype=jnp.bfloat16), wanted(sizes, *given), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            got.astype(jnp.float32), want, rtol=2**-8, atol=1e-4
        )  # one rounding, of the result


def case(platform, **other):
    given = {
        "rows": 4096,
        "groups": 8,
        "contracted": 512,
        "columns": 256,
        "dtype": "bfloat16",
    } | other
    return GroupedMatmulCase(**given, device=Device(platform, platform))


@pytest.mark.parametrize(
    "given, backend, reason",
    [
        (case("tpu", rows=1 << 20), "megablox", "1048576 rows are more than the 524288"),
        (case("tpu", dtype="float16"), "megablox", "takes bfloat16 and float32, not float16"),
        (case("tpu", rows=0), "megablox", "rows is 0"),
        (case("cpu", dtype="float64"), "blocks", "cannot hold float64"),
    ],
)
def test_a_backend_says_why_it_cannot_serve(given, backend, reason):
    with pytest.raises(ConfigError, match=reason):
        OP.choose(given, backend)


def test_megablox_never_has_more_tiles_than_it_counts_right():
    tuned = megablox.Blocks(rows=128)
    for rows in (1, 1024 * 128, 1024 * 128 + 1, 1024 * 512):
        assert -(-rows // megablox.limit_tiles(tuned, rows).rows) <= megablox.MOST_TILES
    assert megablox.limit_tiles(tuned, 1024 * 128) == tuned


def test_a_call_takes_the_backend_that_is_asked_for():
    x, w, sizes_E = (
        jnp.ones((4, 2), jnp.bfloat16),
        jnp.ones((2, 2, 3), jnp.bfloat16),
        jnp.asarray([1, 2], jnp.int16),
    )
    assert grouped_matmul(x, w, sizes_E)[:, 0].tolist() == [2, 2, 2, 0]
    assert "ragged_dot" in str(
        jax.make_jaxpr(lambda: grouped_matmul(x, w, sizes_E, "ragged_dot"))()
    )
    with pytest.raises(ConfigError, match="no backend megablocks; did you mean megablox"):
        grouped_matmul(x, w, sizes_E, "megablocks")
