"""Arranges devices in a mesh so that neighbors along the inner axes have the fastest links. The
same rule holds for real devices and for those of a topology that `maxstack plan` compiles for."""

import glob
import itertools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

GPU_SHARE = 0.92
"""Share of a GPU's memory for jax's programs unless XLA_PYTHON_CLIENT_MEM_FRACTION is set; jax's
own default is 0.75."""

GPUS = "/dev/nvidia[0-9]*"
ACCELERATORS = (GPUS, "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/dxg", "/dev/kfd")
"""Device files of GPUs and TPUs on Linux."""


def environment(virtual_devices: int | None) -> None:
    """Set the environment variables that jax reads at import. `virtual_devices`: number of devices
    to split the CPU into; None: use the real ones."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    # setdefault throughout: what the user has set wins.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
    if virtual_devices:
        os.environ |= cpu_devices(virtual_devices)
    elif sys.platform == "linux" and not any(map(glob.glob, ACCELERATORS)):
        # Otherwise jax warns of every compiler plugin of plan that is installed.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def cpu_devices(count: int) -> dict[str, str]:
    """Return environment variables that split the CPU into `count` devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}


def visible_gpus() -> list[str]:
    """Return the GPUs visible to this process, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(glob.glob(GPUS)))]
    names = map(str.strip, visible.split(","))
    # CUDA also ends the list at the first invalid name.
    return [*itertools.takewhile(lambda name: name and not name.startswith("-"), names)]


def host_memory() -> int | None:
    """Return the bytes of this machine's memory; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def arrange(devices: Sequence[Any], shape: Sequence[int]) -> "np.ndarray":
    """Arrange `devices` in an array of `shape`, whose axes go from the slowest links to the
    fastest.

    TPU: slices are laid over the outermost axes that can hold them (`over_slices`); inside each
    slice, mesh axes are assigned to axes of the torus, innermost first: by jax if the slice's sides
    are powers of two, otherwise by prime factors, since jax fails on some of those. Devices that do
    not fill a cuboid of each slice are taken by slice, coordinates and core. GPU: by id, which
    numbers the GPUs of a host consecutively. CPU: as given."""
    import numpy as np

    assert math.prod(shape) == len(devices), (
        f"{len(devices)} devices do not fill a mesh of {tuple(shape)}"
    )
    platform = devices[0].platform
    if platform != "tpu":
        ordered = sorted(devices, key=lambda device: device.id) if platform == "gpu" else devices
        return _array(ordered).reshape(shape)
    # z, y, x, core: row-major in the torus, as the code below cuts it.
    ordered = sorted(devices, key=_position)
    slices = len({slice_of(device) for device in devices})
    sides = _sides(ordered, slices)
    # No cuboid, so no sides to give to mesh axes; by position is the nearest there is.
    if sides is None:
        return _array(ordered).reshape(shape)
    # Each mesh axis is a part over slices times a part within a slice; the transpose below joins
    # the two.
    outer = over_slices(shape, slices)
    inner = [size // part for size, part in zip(shape, outer, strict=True)]
    size = len(devices) // slices
    each = [_within(ordered[i * size : (i + 1) * size], sides, inner) for i in range(slices)]
    axes = [axis + side * len(shape) for axis in range(len(shape)) for side in (0, 1)]
    return np.stack(each).reshape(*outer, *inner).transpose(axes).reshape(shape)


def over_slices(shape: Sequence[int], slices: int) -> list[int]:
    """Return the number of slices that each mesh axis spans, outermost axes first; ConfigError if
    the axes cannot divide them."""
    left = slices
    outer = []
    for size in shape:
        # Outermost first: the network between slices is the slowest link.
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if left > 1:
        from maxstack.errors import ConfigError

        raise ConfigError(
            f"mesh: sizes {'x'.join(map(str, shape))} cannot be laid over {slices} "
            f"slices; set mesh.slices={slices}"
        )
    return outer


def slice_of(device: Any) -> int:
    """Return the slice of a device; 0 if jax knows none."""
    return getattr(device, "slice_index", None) or 0


def box(coords: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sides of the smallest cuboid around coordinates."""
    return tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))


def _position(device: Any) -> tuple[int, ...]:
    return (slice_of(device), *reversed(device.coords), device.core_on_chip)


def _sides(ordered: Sequence[Any], slices: int) -> tuple[int, ...] | None:
    """Return the sides z, y, x and cores of the cuboid that each slice is; None if a slice is not a
    cuboid, or if they differ."""
    by_slice: dict[int, list[tuple[int, ...]]] = {}
    for device in ordered:
        by_slice.setdefault(slice_of(device), []).append(_position(device)[1:])
    boxes = {box(positions) for positions in by_slice.values()}
    sizes = {len(positions) for positions in by_slice.values()}
    sides = boxes.pop()
    alike = not boxes and sizes == {math.prod(sides)} == {len(ordered) // slices}
    return sides if alike else None


def _within(ordered: Sequence[Any], sides: Sequence[int], shape: Sequence[int]) -> "np.ndarray":
    """Arrange the devices of one slice, given row by row, in an array of `shape`."""
    if all(side & (side - 1) == 0 for side in sides):
        from jax.experimental import mesh_utils

        return mesh_utils.create_device_mesh(shape, ordered, allow_split_physical_axes=True)
    parts = _shares(sides, shape)
    cut = _array(ordered).reshape([part for row in parts for part in row])
    axes = [side * len(shape) + axis for axis in range(len(shape)) for side in range(len(sides))]
    return cut.transpose(axes).reshape(shape)


def _shares(sides: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """Return the part of each side that each mesh axis takes, [side][axis]: innermost axes first,
    one prime factor after the other, from a side that the axis already has a part of, otherwise
    from the last untouched side, otherwise from any."""
    left = list(sides)
    parts = [[1] * len(shape) for _ in sides]
    # Innermost first, since these axes talk most and should get whole sides of the torus.
    for axis in reversed(range(len(shape))):
        for prime in _primes(shape[axis]):
            # A side that the axis already has a part of comes first, so that a mesh axis stays on
            # one side of the torus, whose links form a ring.
            having = [side for side, size in enumerate(left) if size % prime == 0]
            side = max(
                having, key=lambda side: (parts[side][axis] > 1, left[side] == sides[side], side)
            )
            left[side] //= prime
            parts[side][axis] *= prime
    return parts


def _primes(number: int) -> list[int]:
    """Return the prime factors, largest first."""
    factors = []
    prime = 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors[::-1]


def _array(devices: Sequence[Any]) -> "np.ndarray":
    """Make a one-dimensional array of objects."""
    import numpy as np

    # np.array(devices) would look into objects that have a length.
    out = np.empty(len(devices), dtype=object)
    out[:] = devices
    return out
