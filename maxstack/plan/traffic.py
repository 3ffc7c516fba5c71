"""What a compiled program sends between devices: every collective, the mesh axes it spans, and its
bytes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from maxstack.plan.hlo import Computation, Instruction, Program

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
IN_SLICE = 100_000
"""libtpu names a device of a multi-slice program (slice + 1) * 100000 + its place in the slice."""
VIEWS = ("bitcast", "reshape", "copy", "convert", "get-tuple-element", "tuple")

_LISTED = re.compile(
    r"(?:replica_groups|source_target_pairs|_xla_megascale_target)=\{((?:\{[\d,]*\},?)*)\}"
)
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, "
    r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    `payload`: bytes of the whole that a device holds: the output of an all-gather, the input of the
    others. `sent`: bytes that it sends in a step. Of g devices, ring algorithms send (g-1)/g of the
    payload in an all-gather, reduce-scatter or all-to-all, twice that in an all-reduce, and all of
    it in a permute (Thakur et al. 2005, Optimization of Collective Communication Operations in
    MPICH).
    """

    kind: str
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ."""
    size: int
    """Devices in a group; 2 for a permute."""
    times: float
    payload: int
    sent: float
    op_name: str
    name: str
    overlapped: bool = False
    """Has a start and an end apart, with other work in between."""
    between_slices: bool = False
    """libtpu sends it over the data-centre network; the others of a multi-slice TPU program stay
    within a slice."""


def collectives(
    program: Program, mesh: Mapping[str, int], without: Sequence[str] = ()
) -> list[Collective]:
    """Every collective that leaves the device, but those with one of `without` in their op_name.
    `mesh`: axis -> size; devices are numbered row-major over its axes, as in `jax.sharding.Mesh`.

    An all-reduce of a TPU fusion that keeps only this device's piece is a reduce-scatter. A ragged
    all-to-all counts as if its buffers were full.
    """
    found = []
    for computation in program.computations.values():
        for instruction in (
            computation.instructions.values() if program.times[computation.name] else ()
        ):
            # A TPU's asynchronous fusions name the same collective again in each part that runs
            # beside it, loops too; -1 stands in the first.
            if (
                "async_collective_fusion_config" in instruction.attributes
                and '"flag_start":"-1"' not in instruction.attributes
            ):
                continue
            if instruction.opcode.removesuffix("-start") in KINDS:
                found.append(_within(program, computation, instruction, mesh))
            elif instruction.opcode == "send" and "_xla_megascale_target" in instruction.attributes:
                found.append(_between(program, computation, instruction, mesh))
    return [
        one
        for one in found
        if one.axes
        and one.size > 1
        and one.payload
        and not any(scope in one.op_name for scope in without)
    ]


def summary(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
    """(kind, axes) -> (collectives in a step, bytes that a device sends in a step), the most bytes
    first."""
    total: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for one in found:
        number, bytes_ = total.get((one.kind, one.axes), (0.0, 0.0))
        total[one.kind, one.axes] = number + one.times, bytes_ + one.sent
    return dict(sorted(total.items(), key=lambda row: -row[1][1]))


def sent(kind: str, payload: int, size: int) -> float:
    """Bytes that one of `size` devices sends for a collective of `payload` bytes, by the ring
    algorithm."""
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    return payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def _within(
    program: Program, computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> Collective:
    attributes, kind, times = (
        instruction.attributes,
        instruction.opcode.removesuffix("-start"),
        program.times[computation.name],
    )
    if "channel_id" in attributes or not _partitions(program):
        groups = _groups(attributes, _partitions(program) or math.prod(mesh.values()))
    else:
        groups = np.zeros((1, 1), np.int64)  # groups of replicas, and a partitioned program has one
    size = groups.shape[1]
    if (
        kind == "all-reduce"
        and program.fused(computation.name)
        and _scatters(computation, instruction, size)
    ):
        kind = "reduce-scatter"
    payload = sum(computation.instructions[name].bytes for name in instruction.operands) * (
        size if kind == "all-gather" else 1
    )
    wrapped = program.callers.get(computation.name)
    overlapped = (
        instruction.opcode.endswith("-start")
        and '"is_sync":true' not in attributes
        or "async_collective_fusion_config" in attributes
        or wrapped is not None
        and wrapped[1].opcode in ("async-start", "call-start")
    )
    return Collective(
        kind,
        _axes(groups, mesh),
        size,
        times,
        payload,
        times * sent(kind, payload, size),
        _scope(program, computation, instruction),
        instruction.name,
        overlapped,
    )


def _between(
    program: Program, computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> Collective:
    attributes, times, each = (
        instruction.attributes,
        program.times[computation.name],
        _partitions(program),
    )
    if found := _SLICES.search(attributes):
        first, last = int(found[2]), int(found[3])
        groups = (np.array(found[1].split(","), np.int64)[None] - 1) * each + np.arange(
            first, last + 1
        )[:, None]
    else:
        groups = _listed(attributes)
        groups = (groups // IN_SLICE - 1) * each + groups % IN_SLICE
    kind = BETWEEN_SLICES.get(
        instruction.attribute("_xla_megascale_transfer_type") or "", "collective-permute"
    )
    size = groups.shape[1]
    payload = computation.instructions[instruction.operands[0]].bytes * (
        size if kind == "all-gather" else 1
    )
    return Collective(
        kind,
        _axes(groups, mesh),
        size,
        times,
        payload,
        times * sent(kind, payload, size),
        instruction.op_name,
        instruction.attribute("_xla_host_transfer_rendezvous") or instruction.name,
        overlapped=True,
        between_slices=True,
    )


def _partitions(program: Program) -> int:
    """Devices that the program is written for: of one slice, where there are several; 0 where the
    text does not say."""
    found = re.search(r"num_partitions=(\d+)", program.attributes)
    return int(found[1]) if found else 0


def _groups(attributes: str, devices: int) -> np.ndarray:
    """Groups of devices, [groups, size], from the attributes of a collective; a permute's pairs are
    groups of two."""
    if found := _IOTA.search(attributes):
        return _iota(found[2], found[3]).reshape([int(n) for n in found[1].split(",")])
    if found := _MESH.search(attributes):
        return _of_mesh(*found.groups())
    listed = _listed(attributes)
    return listed if listed.size else np.arange(devices)[None]


@functools.lru_cache(maxsize=512)
def _iota(dims: str, order: str | None) -> np.ndarray:
    """0, 1, 2 ... reshaped to `dims` and transposed to `order`, flat."""
    shape = [int(n) for n in dims.split(",")]
    return (
        np.arange(math.prod(shape))
        .reshape(shape)
        .transpose([int(n) for n in order.split(",")] if order else range(len(shape)))
        .reshape(-1)
    )


@functools.lru_cache(maxsize=512)
def _of_mesh(axes: str, dims: str | None, order: str | None, chosen: str) -> np.ndarray:
    """The form mesh['a'=2,'b'=4], device_ids=([8]) {'b':(2)2}: a group spans the axes in braces;
    'b':(2)2 is the factor 2 of b after one of 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS.findall(chosen)
    }
    shape: list[int] = []
    spanned: list[int] = []
    for name, size in sizes.items():
        before, within = parts.get(name, (size, 1))
        spanned += [len(shape) + 1] if name in parts else []
        shape += [before, within, size // before // within]
    devices = (_iota(dims, order) if dims else np.arange(math.prod(shape))).reshape(shape)
    rest = [n for n in range(len(shape)) if n not in spanned]
    return devices.transpose([*rest, *spanned]).reshape(-1, math.prod(shape[n] for n in spanned))


@functools.lru_cache(maxsize=512)
def _explicit(text: str) -> np.ndarray:
    rows = [row for row in text.strip("{},").split("},{") if row]
    longest = max((row.count(",") for row in rows), default=0)
    numbers = ",".join(row for row in rows if row.count(",") == longest)
    return (
        np.array(numbers.split(","), np.int64).reshape(-1, longest + 1)
        if numbers
        else np.zeros((0, 0), np.int64)
    )


def _listed(attributes: str) -> np.ndarray:
    found = _LISTED.search(attributes)
    return _explicit(found[1] if found else "")


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which members of a group differ."""
    places = np.unravel_index(groups % math.prod(mesh.values()), tuple(mesh.values()))
    return tuple(
        axis for axis, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any()
    )


def _scope(program: Program, computation: Computation, instruction: Instruction) -> str:
    """Its own op_name, or that of what it is wrapped in."""
    while not instruction.op_name and program.fused(computation.name):
        computation, instruction = program.callers[computation.name]
    return instruction.op_name


def _scatters(computation: Computation, reduced: Instruction, size: int) -> bool:
    """Whether every use of an all-reduce cuts a device's piece out of it."""
    names, cuts = {reduced.name}, 0
    for instruction in computation.instructions.values():
        if names.intersection(instruction.operands):
            if instruction.opcode in VIEWS:
                names.add(instruction.name)
            elif (
                instruction.opcode == "dynamic-slice"
                and instruction.bytes * size < 2 * reduced.bytes
            ):
                cuts += 1
            else:
                return False
    return cuts > 0 and computation.root not in names
