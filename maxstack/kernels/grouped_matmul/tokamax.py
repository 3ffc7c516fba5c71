"""The grouped matmul by kernels of tokamax, an optional package, each selected by name so that
tokamax cannot substitute another. Shapes as in the package."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase, grouped

STEP = 512
"""Its Hopper kernel steps over the contracted dimension by 128, 256 or 512, as its table of tuned
sizes says, and ignores a remainder."""
PADDED = 1024
"""Its TPU kernel needs whole tiles of rows, of 1,024 or a smaller power of two."""
MOST_ROWS = 1 << 17
"""It counts its tiles, of 128 rows at least, as megablox does."""


def supports(case: GroupedMatmulCase) -> str | None:
    """Why its kernels cannot serve `case`, or are not sure to compute it right, forward and
    backward; None if they can."""
    return (
        _absent()
        or _elsewhere(case.device)
        or case.unusual
        or (_gpu(case) if case.device.platform == "gpu" else _tpu(case))
    )


def _absent() -> str | None:
    """Why tokamax cannot be imported; None if it is installed."""
    if importlib.util.find_spec("tokamax"):
        return None
    return "tokamax is not installed; pip install tokamax"


def _elsewhere(device: Device) -> str | None:
    """Why tokamax cannot serve a program for `device`: it selects its kernels for jax's default
    device. None if that is of the same kind."""
    own = Device.of(jax.devices()[0])
    if own.kind == device.kind:
        return None
    return (
        f"it looks at the {own.platform} of this process ({own.kind}), so nothing can be "
        f"compiled for {device.kind} ahead of time"
    )


def _package() -> Any:
    """Import tokamax, without letting it parse the arguments of this process."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    import tokamax

    return tokamax


def _gpu(case: GroupedMatmulCase) -> str | None:
    if case.device.capability[0] != 9 or case.dtype != "bfloat16":
        return (
            f"has gradients for bfloat16 on Hopper (9.0) alone, not for {case.dtype} on "
            f"{'.'.join(map(str, case.device.capability))}"
        )
    if odd := _sizes(case, lambda size: size % STEP > 0):
        return f"{odd}: not a multiple of {STEP}, and it may leave out the remainder"
    return None


def _tpu(case: GroupedMatmulCase) -> str | None:
    if small := _sizes(case, lambda size: size < 128):
        return f"{small}: less than 128"
    if case.rows > MOST_ROWS:
        return f"{case.rows} rows are more than the {MOST_ROWS} that it is sure to count right"
    return None


def _sizes(case: GroupedMatmulCase, wrong: Callable[[int], bool]) -> str:
    """The sizes of a matrix that are wrong."""
    sizes = {"contracted": case.contracted, "columns": case.columns}
    return " and ".join(f"{name} {size}" for name, size in sizes.items() if wrong(size))


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N]. Rows of no group are masked on both sides: the kernels leave them undefined."""
    tpu = Device.here().platform == "tpu"
    x_MK, rows = jnp.where(grouped(x_MK.shape[0], sizes_E), x_MK, 0), x_MK.shape[0]
    padded = jnp.pad(x_MK, ((0, -rows % PADDED if tpu else 0), (0, 0)))
    out_MN = _package().ragged_dot(
        padded, w_EKN, sizes_E, implementation="mosaic_tpu" if tpu else "mosaic_gpu"
    )
    return jnp.where(grouped(rows, sizes_E), out_MN[:rows], 0)
