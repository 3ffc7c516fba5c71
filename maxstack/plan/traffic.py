"""Collectives of a compiled program: the mesh axes that each spans, and the bytes that it sends.

An instruction names the groups of devices that take part, in one of three notations (`_groups`).
The mesh axes along which the members of a group differ are those of the collective. Its bytes
follow from the shapes of its operands by the ring algorithms' formulas."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from maxstack.plan.hlo import Instruction, Program, within

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# libtpu rewrites collectives between slices into pairs of send and recv; their attributes keep what
# they were.
BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
IN_SLICE = 100_000
"""libtpu numbers a device of a multi-slice program (slice + 1) * 100000 + its place in the
slice."""
# Operations through which an all-reduced value may pass before its piece is sliced out.
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
    """A collective of the program.

    `payload`: bytes of an all-gather's output, or of another collective's input, on a device.
    `sent`: bytes that a device sends per step. With g devices, ring algorithms send (g-1)/g of the
    payload in an all-gather, reduce-scatter or all-to-all, twice that in an all-reduce, and all of
    it in a permute (Thakur et al. 2005, Optimization of Collective Communication Operations in
    MPICH)."""

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
    between_slices: bool = False
    """True if libtpu sends it over the data-center network; other collectives of a multi-slice TPU
    program stay within a slice."""
    instruction: str = ""
    """Name of the instruction that starts it."""


def collectives(
    program: Program, mesh: Mapping[str, int], without: Sequence[str] = ()
) -> list[Collective]:
    """Return every collective that leaves the device, except those in one of the scopes `without`.
    `mesh`: axis -> size; devices are numbered row-major over its axes, as in `jax.sharding.Mesh`.

    An all-reduce in a TPU fusion that keeps only this device's piece is a reduce-scatter. A ragged
    all-to-all counts as if its buffers were full.
    """
    rows = [
        _collective(program, instruction, mesh)
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if program.times[computation.name] and _sends(instruction)
    ]
    return [
        row
        for row in rows
        # A group of one device, or axes of size one, send nothing, though XLA leaves the
        # instruction.
        if row.axes and row.size > 1 and row.payload and not within(row.op_name, without)
    ]


def _sends(instruction: Instruction) -> bool:
    """Return True for collectives. A TPU's asynchronous fusions repeat a collective in every part
    that overlaps with it, loops too; only the first, with the flag -1, counts."""
    attributes = instruction.attributes
    if "async_collective_fusion_config" in attributes and '"flag_start":"-1"' not in attributes:
        return False
    if instruction.opcode == "send":
        return "_xla_megascale_target" in attributes
    # The -done half moves nothing more.
    return instruction.opcode.removesuffix("-start") in KINDS


def sent(kind: str, payload: int, size: int) -> float:
    """Return the bytes that one of `size` devices sends by the ring algorithm."""
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    return payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def _collective(program: Program, instruction: Instruction, mesh: Mapping[str, int]) -> Collective:
    between_slices = instruction.opcode == "send"
    if between_slices:
        kind, groups = _between_slices(program, instruction)
    else:
        kind, groups = _within_slice(program, instruction, math.prod(mesh.values()))
    size = groups.shape[1]
    times = program.times[instruction.computation.name]
    # From the operands, since a -start returns its operands beside its results.
    payload = sum(made.bytes for made in instruction.inputs)
    if kind == "all-gather":
        payload *= size
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh),
        size=size,
        times=times,
        payload=payload,
        sent=times * sent(kind, payload, size),
        op_name=_scope(instruction),
        name=instruction.attribute("_xla_host_transfer_rendezvous") or instruction.name,
        instruction=instruction.name,
        between_slices=between_slices,
    )


def _within_slice(
    program: Program, instruction: Instruction, devices: int
) -> tuple[str, np.ndarray]:
    """Return the kind and the groups of devices, [groups, size]."""
    attributes = instruction.attributes
    kind = instruction.opcode.removesuffix("-start")
    partitions = _partitions(program)
    # Without channel_id the numbers are those of replicas, not of devices.
    if "channel_id" in attributes or not partitions:
        groups = _groups(attributes, partitions or devices)
    else:
        groups = np.zeros((1, 1), np.int64)  # groups of replicas; a partitioned program has one
    if (
        kind == "all-reduce"
        and instruction.computation.wrapper
        and _scatters(instruction, groups.shape[1])
    ):
        kind = "reduce-scatter"
    return kind, groups


def _between_slices(program: Program, instruction: Instruction) -> tuple[str, np.ndarray]:
    """Return the kind and the groups of what libtpu sends to other slices."""
    partitions = _partitions(program)
    if target := _SLICES.search(instruction.attributes):
        # libtpu counts slices from 1 here.
        slices = np.array(target[1].split(","), np.int64)[None] - 1
        groups = slices * partitions + np.arange(int(target[2]), int(target[3]) + 1)[:, None]
    else:
        devices = _listed(instruction.attributes)
        groups = (devices // IN_SLICE - 1) * partitions + devices % IN_SLICE
    transfer = instruction.attribute("_xla_megascale_transfer_type") or ""
    return BETWEEN_SLICES.get(transfer, "collective-permute"), groups


def _partitions(program: Program) -> int:
    """Return the devices that the program is written for, of one slice if there are several; 0 if
    the text does not say."""
    number = re.search(r"num_partitions=(\d+)", program.attributes)
    return int(number[1]) if number else 0


def _groups(attributes: str, devices: int) -> np.ndarray:
    """Parse groups of devices, [groups, size]; a permute's pairs are groups of two."""
    if iota := _IOTA.search(attributes):
        return _iota(iota[2], iota[3]).reshape([int(n) for n in iota[1].split(",")])
    if mesh := _MESH.search(attributes):
        return _of_mesh(*mesh.groups())
    listed = _listed(attributes)
    return listed if listed.size else np.arange(devices)[None]


@functools.lru_cache(maxsize=512)
def _iota(dims: str, order: str | None) -> np.ndarray:
    """Return 0, 1, 2... reshaped to `dims` and transposed to `order`, flat."""
    shape = [int(n) for n in dims.split(",")]
    return (
        np.arange(math.prod(shape))
        .reshape(shape)
        .transpose([int(n) for n in order.split(",")] if order else range(len(shape)))
        .reshape(-1)
    )


@functools.lru_cache(maxsize=512)
def _of_mesh(axes: str, dims: str | None, order: str | None, chosen: str) -> np.ndarray:
    """Parse mesh['a'=2,'b'=4], device_ids=([8]) {'b':(2)2}: a group spans the axes in braces;
    'b':(2)2 is the factor 2 of b after a factor 2."""
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
    # Axes that a group spans go last, so that each row of the result is a group.
    rest = [n for n in range(len(shape)) if n not in spanned]
    return devices.transpose([*rest, *spanned]).reshape(-1, math.prod(shape[n] for n in spanned))


def _listed(attributes: str) -> np.ndarray:
    """Parse {{0,1},{2,3}}; of groups of several sizes, keep the largest."""
    braces = _LISTED.search(attributes)
    return _explicit(braces[1] if braces else "")


@functools.lru_cache(maxsize=512)
def _explicit(text: str) -> np.ndarray:
    rows = [row.split(",") for row in text.strip("{},").split("},{") if row]
    # numpy needs rows of one length.
    longest = max(map(len, rows), default=0)
    return np.array([row for row in rows if len(row) == longest], np.int64)


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group differ."""
    # An axis belongs to a collective if any member of a group has another coordinate on it than the
    # first member.
    coords = np.unravel_index(groups % math.prod(mesh.values()), tuple(mesh.values()))
    return tuple(axis for axis, x in zip(mesh, coords, strict=True) if (x != x[:, :1]).any())


def _scope(instruction: Instruction) -> str:
    """Return the op_name of an instruction, or of the operation that wraps it."""
    while not instruction.op_name and (wrapper := instruction.computation.wrapper):
        instruction = wrapper
    return instruction.op_name


def _scatters(reduced: Instruction, size: int) -> bool:
    """Return True if every use of an all-reduce slices a device's piece out of it."""
    names = {reduced.name}
    cuts = 0
    for instruction in reduced.computation.instructions.values():
        if names.intersection(instruction.operands):
            if instruction.opcode in VIEWS:
                names.add(instruction.name)
            elif (
                instruction.opcode == "dynamic-slice"
                # Not `==`: where the size does not divide, pieces are padded.
                and instruction.bytes * size < 2 * reduced.bytes
            ):
                cuts += 1
            else:
                return False
    # If the sum leaves the fusion whole, it is an all-reduce after all.
    return cuts > 0 and reduced.computation.root not in names
