"""tokamax, an optional package whose kernels several ops can use: whether it can be used, and the
package itself."""

import importlib.util
from typing import Any

import jax

from maxstack.kernels.backends import Device


def absent() -> str | None:
    """The reason where it is not installed."""
    return (
        "tokamax is not installed; pip install tokamax"
        if importlib.util.find_spec("tokamax") is None
        else None
    )


def elsewhere(device: Device) -> str | None:
    """The reason where a program is for another kind of device than this process has: tokamax asks
    jax's default one what it may use."""
    own = Device.of(jax.devices()[0])
    if own.kind == device.kind:
        return None
    return (
        f"it looks at the {own.platform} of this process ({own.kind}), so nothing can be "
        f"compiled for {device.kind} ahead of time"
    )


def package() -> Any:
    """The package. It would parse this process's arguments, had nobody done so."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    import tokamax

    return tokamax
