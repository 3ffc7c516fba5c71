"""Matmul of rows that are sorted by group, each group with a matrix of its own; the matmul of a
mixture of experts.

Shapes: M rows  E groups  K contracted  N columns.
"""

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import ALL, Backend, Device, Op
from maxstack.kernels.grouped_matmul.case import Case
from maxstack.schema import kernels as names

OP = Op(
    "grouped_matmul",
    tuple(
        Backend(name, f"{__name__}.{name}", platforms)
        for name, platforms in {
            "pallas_gpu": ("gpu",),
            "megablox": ("tpu",),
            "tokamax": ("gpu", "tpu"),
            "blocks": ("cpu",),
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
    no group: whatever numbers they hold, NaN included, they give zeros and have no gradient. Runs
    on the devices of the mesh around it, else on jax's default. ConfigError for a backend that
    there is not, or that cannot serve these shapes.
    """
    assert x_MK.dtype == w_EKN.dtype, f"rows are {x_MK.dtype} and matrices {w_EKN.dtype}"
    choice = OP.choose(Case.of(x_MK, w_EKN, Device.here()), backend)
    return OP[choice.backend].run(
        x_MK,
        w_EKN,
        sizes_E.astype(jnp.int32),
        **({"blocks": choice.blocks} if choice.blocks else {}),
    )
