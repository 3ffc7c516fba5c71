"""tokamax, an optional package with kernels for several ops."""

import importlib.util
from typing import Any

import jax

from maxstack.kernels.backends import Device


def absent() -> str | None:
    """Why tokamax cannot be imported; None if it is installed."""
    if importlib.util.find_spec("tokamax"):
        return None
    return "tokamax is not installed; pip install tokamax"


def elsewhere(device: Device) -> str | None:
    """Why tokamax cannot serve a program for `device`: it selects its kernels for jax's default
    device. None if that is of the same kind."""
    own = Device.of(jax.devices()[0])
    if own.kind == device.kind:
        return None
    return (
        f"it looks at the {own.platform} of this process ({own.kind}), so nothing can be "
        f"compiled for {device.kind} ahead of time"
    )


def package() -> Any:
    """Import tokamax, without letting it parse the arguments of this process."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    import tokamax

    return tokamax
