"""The grouped matmul by the Hopper kernel of tokamax, an optional package, chosen by name so that
tokamax cannot substitute another kernel. Shapes as in the package."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device
from maxstack.kernels.grouped_matmul.case import GroupedMatmulCase, group_mask

STEP = 512
"""The kernel steps over the contracted dimension by 128, 256 or 512, as its table of tuned sizes
says, and silently ignores a remainder."""


def supports(case: GroupedMatmulCase) -> str | None:
    """Why the kernel cannot serve `case`, or may compute it wrongly, forward and backward; None if
    it can."""
    return _absent() or _elsewhere(case.device) or case.unsupported or _unsupported(case)


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
        f"selects kernels for this process's {own.platform} ({own.kind}), so it cannot be compiled "
        f"for {device.kind} ahead of time"
    )


def _package() -> Any:
    """Import tokamax, without letting it parse the arguments of this process."""
    from absl import flags

    # tokamax reads absl's flags, which fail where nothing has parsed them.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    import tokamax

    return tokamax


def _unsupported(case: GroupedMatmulCase) -> str | None:
    if case.device.capability[0] != 9 or case.dtype != "bfloat16":
        return (
            f"has gradients only for bfloat16 on Hopper (9.0), not for {case.dtype} on "
            f"{'.'.join(map(str, case.device.capability))}"
        )
    sizes = {"contracted": case.contracted, "columns": case.columns}
    # Both, since the gradient of x contracts the columns.
    odd = [f"{name} {size}" for name, size in sizes.items() if size % STEP]
    if odd:
        return f"{' and '.join(odd)}: not a multiple of {STEP}, and it may ignore the remainder"
    return None


def run(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, N]. Rows of no group are masked on both sides: the kernel leaves them undefined."""
    grouped_M1 = group_mask(x_MK.shape[0], sizes_E)
    out_MN = _package().ragged_dot(
        jnp.where(grouped_M1, x_MK, 0), w_EKN, sizes_E, implementation="mosaic_gpu"
    )
    return jnp.where(grouped_M1, out_MN, 0)
