"""The matmul of a mixture of experts: rows are sorted by group, and each group has its own matrix.

Shapes: M rows  E groups  K contracted  N columns.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import ALL, Backend, Device, Op
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase
from maxstack.schema import kernels as names

OP = Op(
    "grouped_matmul",
    tuple(
        Backend(name, f"{__name__}.{name}", platforms)
        for name, platforms in {
            "megablox": ("tpu",),
            "tokamax": ("gpu",),
            "blocks": ("cpu", "gpu"),
            "ragged_dot": ALL,
            "reference": ALL,
        }.items()
    ),
)


def grouped_matmul(
    x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, backend: names.GroupedMatmul = "auto"
) -> jax.Array:
    """The first sizes[0] rows of x times w[0], the next sizes[1] times w[1], ... -> [M, N] in x's
    dtype, which w shares.

    `sizes_E` are integers that add up to M at most; zeros are fine. Rows past their sum belong to
    no group: they give zeros and have no gradient, even where they hold NaN. Runs on the devices
    of the current mesh, else on jax's default. ConfigError for a backend that does not exist or
    cannot serve these shapes.
    """
    assert x_MK.dtype == w_EKN.dtype, f"rows are {x_MK.dtype} and matrices {w_EKN.dtype}"
    choice = OP.choose(GroupedMatmulCase.of(x_MK, w_EKN, Device.here()), backend)
    # Backends without block sizes do not take the argument.
    blocks = {"blocks": choice.blocks} if choice.blocks else {}
    return OP[choice.backend].run(x_MK, w_EKN, sizes_E.astype(jnp.int32), **blocks)
