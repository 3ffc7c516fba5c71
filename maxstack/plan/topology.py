"""Topologies: hardware by a name such as `v5p:8x8x16`, with the shapes on offer, devices for the
ahead-of-time compiler, and the links between them.

A bound on the speed of collectives needs the links that a mesh axis runs on. `groups` lays the mesh
over the devices as training does (hardware/devices.arrange), takes the group of devices that differ
along some axes, and counts the links that such groups can use at the same time; see `links`."""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxstack.errors import ConfigError, installing
from maxstack.hardware.chips import Chip, by_kind
from maxstack.hardware.chips import chip as find_chip
from maxstack.hardware.devices import arrange, box, slice_of
from maxstack.schema.mesh import AXES

CUBE = 4
"""Sides of three-dimensional slices larger than a 4x4x4 rack are multiples of this."""
_NAME = re.compile(r"([a-z0-9-]+):([0-9]{1,5}(?:x[0-9]{1,5})*)(?:\*([1-9][0-9]{0,3}))?")
# Lets libtpu compile on a machine without a TPU: it must neither look for the metadata server and
# other workers, nor insist on being the only process that has loaded it.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
_PLUGINS = {
    "tpu": (("libtpu",), "plan-tpu"),
    "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "plan-cuda"),
}
# XLA's GPU compiler asks for these too; they are equal on all GPUs of chips.yml.
_CUDA_LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one program. `sides`: a TPU slice in chips, or (hosts, GPUs per host)."""

    name: str
    # compare=False: a chip holds dicts, which have no hash, and the name decides it anyway.
    chip: Chip | None = dataclasses.field(compare=False)
    """None if chips.yml does not have it, as for a CPU."""
    sides: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of devices as jax counts them."""
        return self.slices * math.prod(self.sides) * (self.chip.devices if self.chip else 1)

    @property
    def platform(self) -> str:
        """tpu, cuda, or cpu if the chip is unknown."""
        return self.chip.platform if self.chip else "cpu"

    @property
    def hosts(self) -> int:
        """Number of hosts, which is jax's number of processes."""
        chip = self.chip
        # A rack whose 72 GPUs share one NVLink domain is several hosts.
        if chip is None or (chip.platform == "cuda" and self.sides[-1] <= chip.chips_per_host):
            return self.sides[0]
        return self.slices * -(-math.prod(self.sides) // chip.chips_per_host)

    def devices(self) -> tuple[Any, ...]:
        """Return this process's devices for `here`, otherwise descriptions to compile for, which
        restricts jax to the CPU platform. ConfigError if the compiler's plugin is missing, or does
        not fit this jax."""
        return _here() if self.name == "here" else _ahead_of_time(self)


@dataclasses.dataclass(frozen=True)
class Link:
    """The link that a collective over a mesh axis runs on."""

    kind: str
    """ICI, DCN, NVLink or network; D2D between the devices of one chip; memory between devices that
    are not accelerators."""
    bandwidth: float | None
    """Bytes/s that one device can receive, or send, in a ring; None if unknown."""
    in_switch: bool = False
    """The switch adds, so that an all-reduce may move half of what a ring moves (NVLink SHARP)."""


def links(topology: Topology, mesh_shape: Sequence[int]) -> dict[str, Link]:
    """Return for each mesh axis of more than one device a bound on the bandwidth of a ring over it.
    Needs no compiler.

    A device cannot receive more bytes a second than this in an all-gather over the axis (or send
    them in a reduce-scatter), when all groups of the axis run at once and nothing else does. It
    follows from counting links (Austin et al. 2025, How To Scale Your Model):

    - Network and DCN: of n devices in a group, g are in one domain. (n-g)/(n-1) of the bytes come
      from outside the domain, through ports of b bytes/s per device that all its groups share: at
      most b * g * (n-1)/(n-g). No device receives more than b and what the links inside its domain
      give.
    - NVLink: the bandwidth of one GPU into its switch.
    - ICI: along a side of the torus a chip has two links if the side wraps around, otherwise one
      (the chip at the end has no other). Groups that step over t-1 chips share links t to one. A
      group of n chips in a row, out of more, has n-1 pairs of links for n chips. Sides add.
    - The devices of one chip share its links like the GPUs of a domain.

    Twisted tori count as plain ones. Sides of 16 wrap around in two dimensions; in three, all sides
    of slices of whole 4x4x4 cubes."""
    link = groups(topology, mesh_shape)
    return {axis: link((axis,)) for axis, n in zip(AXES, mesh_shape, strict=True) if n > 1}


def groups(topology: Topology, mesh_shape: Sequence[int]) -> Callable[[tuple[str, ...]], Link]:
    """Return a function from mesh axes to the link of the devices that differ along them; see
    `links`."""
    # As training lays the mesh out: another order of devices would put an axis on other links.
    mesh = arrange(_placeholders(topology), mesh_shape)

    @functools.cache
    def link(axes: tuple[str, ...]) -> Link:
        # The first group stands for all: the mesh is regular, so the groups of an axis are alike.
        group = tuple(slice(None) if axis in axes else 0 for axis in AXES)
        return _link(topology, mesh[group].reshape(-1).tolist())

    return link


def parse(text: str, what: str = "--topology") -> Topology:
    """Parse `v5p:8x8x16`, `v5e:16x16*4` (4 slices), `h100:32x8` (32 hosts of 8), or `here`.
    ConfigError, which begins with `what`, for hardware that does not exist, with the nearest that
    does."""
    if text == "here":
        return _describe(_here())
    if text.startswith("here"):
        raise ConfigError(
            f"{what} {text}: here takes no size; for eight CPU devices, set run.virtual_devices=8"
        )
    name = _NAME.fullmatch(text)
    if not name:
        raise ConfigError(
            f"{what} {text}: is not a topology; write a chip and its shape, such as v5p:8x8x16, "
            "v5e:16x16*4 for 4 slices, h100:32x8 for 32 hosts of 8 GPUs, or here"
        )
    chip = find_chip(name[1])
    sides = tuple(map(int, name[2].split("x")))
    slices = int(name[3] or 1)
    if chip.nvlink and name[3]:
        raise ConfigError(
            f"{what} {text}: GPUs have no slices; write hosts x GPUs per host, such as "
            f"{chip.name}:{slices * sides[0]}x{sides[-1]}"
        )
    nearest = _nearest(chip, sides)
    if sides != nearest[0]:
        times = f"*{slices}" if slices > 1 else ""
        near = ", ".join(f"{chip.name}:{_words(shape)}{times}" for shape in nearest)
        raise ConfigError(
            f"{what} {text}: there is no such {chip.name}; {_rule(chip)}; nearest: {near}"
        )
    return Topology(text, chip, sides, slices)


def _words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _rule(chip: Chip) -> str:
    """Describe the shapes on offer."""
    if chip.nvlink:
        sizes = ", ".join(map(str, chip.nvlink.host_sizes))
        return f"GPUs come as hosts x GPUs per host, which are {sizes}"
    assert chip.torus
    small = f"slices are {', '.join(map(_words, chip.torus.shapes))}"
    if chip.torus.dims == 2:
        return small
    return (
        f"{small}, and AxBxC with A <= B <= C, multiples of {CUBE}, "
        f"up to {chip.torus.max_chips} chips"
    )


def _nearest(chip: Chip, sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the four possible shapes nearest to `sides`: itself, then by number of chips and
    closeness to a cube; for GPUs, large hosts first."""
    asked = max(1, math.prod(sides))

    # Logarithms: twice as many and half as many chips are equally far.
    def distance(shape: tuple[int, ...]) -> tuple[float, ...]:
        size = abs(math.log(math.prod(shape) / asked))
        if chip.nvlink:
            return shape != sides, -min(shape[-1], chip.chips_per_host), size
        return shape != sides, size, sum(shape)

    return sorted(_shapes(chip, asked), key=distance)[:4]


def _shapes(chip: Chip, asked: int) -> Iterator[tuple[int, ...]]:
    """Yield possible shapes: all slices of a TPU; for GPUs, about as many as asked for, for every
    host size."""
    if chip.nvlink:
        for size in chip.nvlink.host_sizes:
            for hosts in {max(1, asked // size), -(-asked // size)}:
                yield hosts, size
        return
    assert chip.torus
    yield from chip.torus.shapes
    if chip.torus.dims == 3:
        cubes = chip.torus.max_chips // CUBE**3
        # a <= b <= c, so a ends at the cube root and b at the square root of the rest.
        for a in range(1, round(cubes ** (1 / 3)) + 1):
            for b in range(a, math.isqrt(cubes // a) + 1):
                for c in range(b, cubes // (a * b) + 1):
                    yield CUBE * a, CUBE * b, CUBE * c


def _here() -> tuple[Any, ...]:
    import jax

    return tuple(jax.devices())


def _describe(devices: Sequence[Any]) -> Topology:
    """Return the topology of existing devices."""
    chip = by_kind(devices[0].device_kind)
    if chip is None or chip.torus is None:
        hosts = len({device.process_index for device in devices})
        return Topology("here", chip, (hosts, len(devices) // hosts))
    sides = box(device.coords for device in devices)
    slices = len({slice_of(device) for device in devices})
    return Topology("here", chip, sides[: chip.torus.dims], slices)


# One command asks for its topology again for each candidate that it compiles.
@functools.lru_cache(maxsize=4)
def _ahead_of_time(topology: Topology) -> tuple[Any, ...]:
    chip = topology.chip
    assert chip
    modules, extra = _PLUGINS[chip.platform]
    install = installing(extra)
    if not any(map(_importable, modules)):
        raise ConfigError(
            f"--topology {topology.name}: the compiler for {chip.name} is not installed; {install}"
        )
    # Without this jax would look for accelerators of this machine first. setdefault: what the user
    # has set wins.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if chip.platform == "tpu":
        for name, value in _LIBTPU.items():
            os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    # Where jax is imported already, the variable comes too late.
    jax.config.update("jax_platforms", "cpu")
    try:
        return tuple(
            topologies.get_topology_desc(platform=chip.platform, **_options(topology, chip)).devices
        )
    except (RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"--topology {topology.name}: the installed compiler for {chip.name} refuses it: "
            f"{first}; "
            f"install the one for jax {jax.__version__}: {install}"
        ) from None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _options(topology: Topology, chip: Chip) -> dict[str, Any]:
    """Return the arguments of jax's get_topology_desc for these devices."""
    if chip.platform == "cuda":
        return {
            "topology_name": "",
            "target_config": _target(chip),
            "topology": f"1x{topology.hosts}x{topology.size // topology.hosts}",
        }
    options: dict[str, Any] = {
        "topology_name": f"{chip.name}:{_words(topology.sides)}",
        **chip.compiler,
    }
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if math.prod(topology.sides) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return options


def _target(chip: Chip) -> str:
    """Return XLA's GpuTargetConfigProto of a GPU as text."""
    own = dict(chip.compiler)
    major, minor = own.pop("capability")
    # Since Hopper, instructions of one architecture alone (wgmma) need the feature set "a".
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    numbers = " ".join(f"{name}: {value}" for name, value in own.items())
    return f"""gpu_device_info {{ {_CUDA_LIMITS}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  memory_bandwidth: {round(chip.memory_bandwidth)} device_memory_size: {chip.usable} {numbers} }}
platform_name: "CUDA" device_description_str: "{chip.kinds[0]}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
"""


@dataclasses.dataclass(slots=True)
class _Placeholder:
    """The attributes of a device that `arrange` reads."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    slice_index: int = 0


def _placeholders(topology: Topology) -> Sequence[Any]:
    """Return the devices, or placeholders for devices that are not here."""
    chip = topology.chip
    # Placeholders elsewhere: --search needs the links of thousands of meshes, and no compiler for
    # them.
    if topology.name == "here" or chip is None:
        return topology.devices()
    if chip.nvlink:
        return [_Placeholder(i, "gpu", chip.kinds[0]) for i in range(topology.size)]
    x, y, z = (*topology.sides, 1)[:3]
    ranges = map(range, (topology.slices, z, y, x, chip.devices))
    return [
        _Placeholder(i, "tpu", chip.kinds[0], (x, y, z), core, slice_index)
        for i, (slice_index, z, y, x, core) in enumerate(itertools.product(*ranges))
    ]


def _link(topology: Topology, group: Sequence[Any]) -> Link:
    """Return the link of mesh axes whose first group of devices is `group`."""
    chip = topology.chip
    n = len(group)
    if chip is None:
        return Link("memory", None)
    if chip.nvlink:
        full = 1 if topology.name == "here" else chip.chips_per_host
        # Hosts with fewer GPUs than usual make the domain smaller in proportion.
        size = chip.nvlink.domain * min(topology.sides[-1], full) // full
        domains = collections.Counter(device.id // size for device in group)
        if len(domains) == 1:
            return Link("NVLink", chip.nvlink.bandwidth, chip.nvlink.in_switch)
        # The domain with the fewest members has the fewest ports, and a ring is as fast as its
        # slowest part.
        least = min(domains.values())
        return Link("network", _from_outside(chip.network, n, least, chip.nvlink.bandwidth))
    inside = [device for device in group if slice_of(device) == slice_of(group[0])]
    ici = _ici(topology, chip, inside)
    if len(inside) < n:
        return Link("DCN", _from_outside(chip.network_per_device, n, len(inside), ici))
    return Link("ICI" if len({tuple(device.coords) for device in group}) > 1 else "D2D", ici)


def _from_outside(bandwidth: float, n: int, g: int, within: float) -> float:
    """Return the bytes/s of each of n devices if g of them share a domain, with a port of
    `bandwidth` to the outside and links of `within` to each other."""
    return min(bandwidth * g * (n - 1) / (n - g), bandwidth + (within if g > 1 else 0))


def _ici(topology: Topology, chip: Chip, inside: Sequence[Any]) -> float:
    """Return the bytes/s that a ring over these devices of one slice gets from the torus, and
    between the cores of a chip."""
    torus = chip.torus
    assert torus
    chips = {tuple(device.coords) for device in inside}
    n = len(inside)
    on_chip = n // len(chips)
    if len(chips) == 1:
        return torus.between_cores or math.inf
    axes = [sorted(set(values)) for values in zip(*chips, strict=True)][: torus.dims]
    # A regular group is a full grid over its coordinates; only there a single step between
    # neighbours exists.
    regular = math.prod(map(len, axes)) == len(chips)
    whole_cubes = all(side % torus.wrap == 0 for side in topology.sides)
    total = 0.0
    for side, values in zip(topology.sides, axes, strict=True):
        if len(values) == 1:
            continue
        step = min(b - a for a, b in itertools.pairwise(values)) if regular else 1
        wraps = whole_cubes if torus.dims == 3 else side % torus.wrap == 0
        links = 2.0 if wraps else 1.0
        # A part of a side cannot use the link that closes the ring, so n chips have n - 1 pairs of
        # links.
        if wraps and regular and step == 1 and len(values) < side:
            links *= (len(values) - 1) / len(values)
        total += torus.link / step * links
    # The devices of a chip share its links, and what comes from the same chip needs none of them.
    return total * on_chip / chip.devices * (n - 1) / (n - on_chip)
