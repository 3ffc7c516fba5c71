"""tokamax's kernels, an optional package, each asked for by name so that nothing else can take its
place. Shapes as in the package."""

import jax
import jax.numpy as jnp

from maxstack.kernels import tokamax
from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import Case, grouped

STEP = 512
"""Its Hopper kernel steps over what is contracted by 128, 256 or 512, as its table of tuned sizes
says, and leaves out what is left over."""
PADDED = 1024
"""Its TPU kernel wants whole tiles of rows, of 1,024 or a power of two below."""
MOST_ROWS = 1 << 17
"""It counts its tiles, of 128 rows at least, as megablox does."""


def supports(case: Case) -> str | None:
    """What its kernels surely compute right, forward and backward, where the program runs on the
    devices of this process."""
    return (
        tokamax.absent()
        or tokamax.elsewhere(case.device)
        or case.unusual
        or (_gpu(case) if case.device.platform == "gpu" else _tpu(case))
    )


def _gpu(case: Case) -> str | None:
    if case.device.capability[0] != 9 or case.dtype != "bfloat16":
        return (
            f"has gradients for bfloat16 on Hopper (9.0) alone, not for {case.dtype} on "
            f"{'.'.join(map(str, case.device.capability))}"
        )
    odd = [
        f"{name} {value}"
        for name, value in (("contracted", case.contracted), ("columns", case.columns))
        if value % STEP
    ]
    return (
        f"{' and '.join(odd)}: not a multiple of {STEP}, and it may leave out what is beyond"
        if odd
        else None
    )


def _tpu(case: Case) -> str | None:
    small = [
        f"{name} {value}"
        for name, value in (("contracted", case.contracted), ("columns", case.columns))
        if value < 128
    ]
    if small:
        return f"{' and '.join(small)}: less than 128"
    return (
        f"{case.rows} rows are more than the {MOST_ROWS} that it surely counts right"
        if case.rows > MOST_ROWS
        else None
    )


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N]. Rows of no group are masked on both sides: what the kernels leave there is
    anything."""
    tpu = Device.here().platform == "tpu"
    x_MK, rows = jnp.where(grouped(x_MK.shape[0], sizes_E), x_MK, 0), x_MK.shape[0]
    padded = jnp.pad(x_MK, ((0, -rows % PADDED if tpu else 0), (0, 0)))
    out_MN = tokamax.package().ragged_dot(
        padded, w_EKN, sizes_E, implementation="mosaic_tpu" if tpu else "mosaic_gpu"
    )
    return jnp.where(grouped(rows, sizes_E), out_MN[:rows], 0)
