"""The table of chips in chips.yml: peaks, memory and bandwidths, each with its source, for MFU and
`maxstack plan`."""

import functools
import os
from pathlib import Path
from typing import Any, Literal

import pydantic

from maxstack.config import Items, Section
from maxstack.config.compose import plain
from maxstack.config.reader import read_yaml
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError
from maxstack.hardware.devices import GPU_SHARE

PEAK_OF = {
    **dict.fromkeys(("int8", "uint8", "int4", "uint4", "s8", "u8", "s4", "u4"), "int8"),
    **dict.fromkeys(("float32", "f32"), "tf32"),
}
"""dtype in jax or XLA -> key in `peak` of its matrix products; bf16 for all others."""


class Torus(Section):
    """A TPU slice's network: bytes/s of a link in one direction, and the slices on offer."""

    dims: int
    link: float
    wrap: int
    max_chips: int
    shapes: Items[Items[int]]
    between_cores: float | None = None


class NVLink(Section):
    """The switch between the GPUs of a domain: bytes/s of one GPU, one way."""

    bandwidth: float
    domain: int
    host_sizes: Items[int]
    in_switch: bool


class Chip(Section):
    """One row of chips.yml, in FLOP/s, bytes and bytes/s: per chip, dense, one way, unless the name
    says `per device`."""

    name: str
    kinds: Items[str] = pydantic.Field(min_length=1)
    platform: Literal["tpu", "cuda"]
    devices: int = 1
    peak: dict[str, float]
    memory: int
    usable: int
    """Bytes that a program may use on one device: the compiler's limit on a TPU, the driver's total
    on a GPU."""
    memory_bandwidth: float
    network: float
    chips_per_host: int
    host_memory: float | None = None
    torus: Torus | None = None
    nvlink: NVLink | None = None
    compiler: dict[str, Any] = {}
    sources: dict[str, str]

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOP/s of one device, the reference for MFU."""
        return self.flops("bfloat16")

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of one device for matmuls of a dtype by jax's or XLA's name;
        formats without hardware support run as bfloat16."""
        # float8_e4m3fn in jax, f8e4m3fn in XLA.
        unit = "fp8" if dtype.startswith(("float8", "f8")) else PEAK_OF.get(dtype, "bf16")
        # A TPU computes float32 by passes of bfloat16 and has no tf32; a chip without fp8 converts
        # it first.
        return self.peak.get(unit, self.peak["bf16"]) / self.devices

    @property
    def for_programs(self) -> int:
        """Bytes of one device that jax gives to programs: on a GPU the share that
        `devices.environment` sets."""
        if not self.nvlink:
            return self.usable
        return round(
            self.usable * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_SHARE))
        )

    @property
    def memory_bandwidth_per_device(self) -> float:
        """HBM bytes/s of one device."""
        return self.memory_bandwidth / self.devices

    @property
    def network_per_device(self) -> float:
        """One device's share of the network between slices or NVLink domains, bytes/s one way."""
        return self.network / self.devices


def chip(name: str) -> Chip:
    """Return the chip of a name; ConfigError with the nearest name if there is none."""
    table = chips()
    if name not in table:
        raise ConfigError(
            f"chip {name}: is not in the table{did_you_mean(name, table)}; there are "
            f"{', '.join(table)}"
        )
    return table[name]


def by_kind(device_kind: str) -> Chip | None:
    """Return the chip that jax calls `device_kind`; None if the table does not have it."""
    # jax may call one chip by several names.
    return next((chip for chip in chips().values() if device_kind in chip.kinds), None)


# The file is read when the first chip is asked for: most commands need none.
@functools.cache
def chips() -> dict[str, Chip]:
    """Return all chips by name, in the order of chips.yml."""
    path = Path(__file__).with_suffix(".yml")
    rows = plain(read_yaml(path.read_text(encoding="utf-8"), path.name))["chips"]
    return {name: Chip.model_validate({"name": name, **row}) for name, row in rows.items()}


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device; None if chips.yml does not have it."""
    chip = by_kind(device_kind)
    return chip.peak_flops if chip else None
