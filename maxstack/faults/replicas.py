"""Silent data corruption: each device hashes its copies of arrays that several devices hold, and
the hashes are compared.

A fault is seen where it changes one copy alone: in a device's memory, or in work that each replica
does for itself, as the optimizer's update. A wrong share of a sum over devices reaches all replicas
alike and is not seen; nor is a fault in what exists once."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack.errors import ConfigError
from maxstack.schema.mesh import names

if TYPE_CHECKING:
    from maxstack.state import State

MOST = 3
"""Passing faults that a process accepts; one more ends the run."""
GOLDEN, ODD = 0x9E3779B1, 0x85EBCA6B
CHUNK = 1 << 13
HOST = "pinned_host"


class Part(NamedTuple):
    """Leaves of one branch of the state that lie on the mesh in the same way."""

    name: str
    shards: np.ndarray
    """[devices]: number of the shard that each holds, in the order of the mesh; equal numbers are
    replicas."""
    leaves: tuple[int, ...]
    """Numbers of the state's leaves."""
    bytes: int
    """On one device."""


class Difference(NamedTuple):
    """One shard of one part, of which not all copies are the same."""

    part: Part
    column: int
    """Number of the part."""
    hashes: dict[int, int]
    """Device's number in the mesh -> hash of its copy."""

    def outvoted(self) -> set[int]:
        """The devices whose hash is not that of most; none where no hash has the most devices."""
        (majority, most), (_, next_most), *_ = Counter(self.hashes.values()).most_common()
        if most == next_most:
            return set()
        return {device for device, value in self.hashes.items() if value != majority}


class Recompute(NamedTuple):
    """Decision to go on from the newest checkpoint before step `first`, and to train on all batches
    again."""

    first: int


class Replicas:
    """The copies in a run's state, from its shapes and shardings (`run.abstract`)."""

    def __init__(self, abstract: "State", mesh: Mesh):
        self._mesh, flat = mesh, jax.tree_util.tree_leaves_with_path(abstract)
        split = frozenset(axis for axis, size in mesh.shape.items() if size > 1)
        numbers: dict[tuple[str, frozenset[str]], list[int]] = {}
        for i, (path, leaf) in enumerate(flat):
            axes = split & {axis for part in leaf.sharding.spec for axis in names(part)}
            if axes != split and leaf.sharding.memory_kind != HOST:
                name = path[0].name if path[0].name in ("params", "opt") else "counters"
                numbers.setdefault((name, axes), []).append(i)
        leaves = [leaf for _, leaf in flat]
        self.parts = [
            Part(name, _shards(mesh, axes), tuple(own), sum(_local_bytes(leaves[i]) for i in own))
            for (name, axes), own in numbers.items()
        ]
        self._compared = [leaves[i] for part in self.parts for i in part.leaves]
        self._size = _bytes(leaves)
        self.covered = _bytes(self._compared) / self._size
        """The share of the state's bytes that exist more than once in devices' memory."""

    def describe(self, every: int) -> str:
        """A line for the log: how much is compared."""
        text = (
            f"replicas: {self.covered:.1%} of the state's {_mib(self._size)} lie on several "
            f"devices and are compared every {every} steps"
        )
        if self.covered > 0.5:
            return text
        return (
            f"{text}; of the rest there is one copy, or it lies in the host's memory, "
            "and damage is not seen"
        )

    def hashes(self, state: "State") -> np.ndarray:
        """uint32 [devices, parts], the same in every process: equal for equal bits, and certainly
        different where one element differs."""
        if not self.parts:
            return np.zeros((self._mesh.size, 0), np.uint32)
        leaves = jax.tree.leaves(state)
        return np.asarray(self.program([leaves[i] for part in self.parts for i in part.leaves]))

    def compare(self, hashes: np.ndarray) -> list[Difference]:
        """The shards of which not all copies have the same hash."""
        differences = []
        for column, part in enumerate(self.parts):
            values = hashes[:, column]
            _, first, inverse = np.unique(part.shards, return_index=True, return_inverse=True)
            for shard in np.unique(part.shards[values != values[first[inverse]]]):
                devices = np.flatnonzero(part.shards == shard)
                copies = dict(zip(devices.tolist(), values[devices].tolist(), strict=True))
                differences.append(Difference(part, column, copies))
        return differences

    def named(self, devices: Iterable[int]) -> str:
        """Devices by their numbers in the mesh -> `device 3 (cpu) of process 1 and ...`."""
        flat = self._mesh.devices.flat
        return " and ".join(
            f"device {d.id} ({d.device_kind}) of process {d.process_index}"
            for d in (flat[i] for i in sorted(devices))
        )

    @functools.cached_property
    def program(self) -> Any:
        """Compiled function from the leaves of all parts to their hashes, replicated."""
        in_chunks = self._mesh.devices.flat[0].platform == "cpu"

        def local(leaves: list[jax.Array]) -> jax.Array:
            hashes, numbered = [], iter(enumerate(leaves, 1))
            for part in self.parts:
                hashes.append(
                    sum((_hash(*next(numbered), in_chunks) for _ in part.leaves), jnp.uint32(0))
                )
            return jnp.stack(hashes)[None]

        specs = [leaf.sharding.spec for leaf in self._compared]
        mapped = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(self._mesh.axis_names),
            check_vma=False,
        )
        return (
            jax.jit(mapped, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
            .lower(self._compared)
            .compile()
        )


class Corruption:
    """Decides after a difference between copies: the steps since the last checkpoint are computed
    again. Where the copies then agree the fault was a passing one, else the run ends. Every process
    reads the same hashes and decides alike. The constructor compiles a program."""

    def __init__(self, replicas: Replicas, every: int, say: Callable[[str], None]):
        self._replicas, self._every, self._say = replicas, every, say
        self._suspected: tuple[int, np.ndarray] | None = None
        self._faults = 0
        if replicas.parts:
            _ = replicas.program  # compiled now, and not in the middle of the run

    def due(self, step: int, saving: bool) -> bool:
        """True where to check after `step`: every so often, before each save, so that no checkpoint
        is damaged, and where there was a difference."""
        differed = self._suspected is not None and step == self._suspected[0]
        return bool(self._replicas.parts) and (saving or step % self._every == 0 or differed)

    def compare_copies(self, step: int, state: "State") -> Recompute | None:
        """Compare the copies in the state after `step` -> the step to go back to, if need be.
        ConfigError where a device is to be taken out of service."""
        hashes = self._replicas.hashes(state)
        differences = self._replicas.compare(hashes)
        if self._suspected is None:
            return self._recompute(step, hashes, differences) if differences else None
        first, before = self._suspected
        if differences:
            after = hashes if step == first else None
            raise ConfigError(f"step {step}: {self._lasting(before, after, differences)}")
        if step >= first:
            self._suspected = None
            self._say(
                f"step {step}, computed again: all copies agree, so the fault was a "
                f"passing one, {self._guilty(before, hashes)}; "
                "where one device has it often, take it out of service"
            )
        return None

    def _recompute(self, step: int, hashes: np.ndarray, differences: list[Difference]) -> Recompute:
        text = f"step {step}: SILENT DATA CORRUPTION in {sizes(differences)}"
        self._faults += 1
        if self._faults > MOST:
            raise ConfigError(
                f"{text}; it is the fault number {self._faults} since this process began, "
                f"and {MOST} are passed over: test these "
                "devices, or take them out of service, and run the same command again"
            )
        which = "not alike, and nothing says yet which is right"
        if _certain(differences):
            which = "not as most replicas"
        self._say(
            f"{text}: {self._replicas.named(suspected(differences))}: {which}; the steps since the "
            "last checkpoint are computed again"
        )
        self._suspected = step, hashes
        return Recompute(step)

    def _guilty(self, before: np.ndarray, after: np.ndarray) -> str:
        """The devices that had a passing fault: those outvoted; of suspects that are equally many,
        those whose hash is another one now."""
        differences = self._replicas.compare(before)
        suspects = suspected(differences)
        if _certain(differences):
            return f"of {self._replicas.named(suspects)}"
        guilty = suspects & _changed(differences, before, after)
        if 0 < len(guilty) < len(suspects):
            return f"of {self._replicas.named(guilty)}"
        return (
            f"of one of {self._replicas.named(suspects)}; more replicas (mesh.data), "
            "or a smaller faults.check_every, tell which"
        )

    def _lasting(
        self, before: np.ndarray, after: np.ndarray | None, differences: list[Difference]
    ) -> str:
        """The error about a fault that stays; `after`: the hashes where the steps were computed up
        to the same one as before."""
        first = self._replicas.compare(before)
        both = suspected(first) & suspected(differences)
        text = (
            "silent data corruption, and again after computing the steps again, in "
            f"{sizes(differences)}"
        )
        if not both:
            return (
                f"{text}: {self._replicas.named(suspected(first))} before, "
                f"{self._replicas.named(suspected(differences))} now, so it is not one device's; "
                "test these, or set faults.check_every=0 where the program itself is not "
                "deterministic (on a GPU see xla.flags.xla_gpu_deterministic_ops)"
            )
        if after is not None and not _certain(differences):
            both = both & _changed(first, before, after) or both
        return (
            f"{text}: the fault stays, in "
            f"{'' if len(both) == 1 else 'one or more of '}{self._replicas.named(both)}; take it "
            "out of service, and run the same command again"
        )


def sizes(differences: list[Difference]) -> str:
    """Bytes and names of the parts that differ."""
    parts = {difference.column: difference.part for difference in differences}
    return " and ".join(f"{_mib(part.bytes)} of {part.name}" for part in parts.values())


def _hash(number: int, leaf: jax.Array, in_chunks: bool) -> jax.Array:
    """uint32, a sum over elements modulo 2^32.

    Each summand is a bijection of the element's bits: xor, and multiplication by an odd number, can
    be undone, and so can x ^ (x >> n). Where one element differs, by one bit or more, the sum
    differs therefore with certainty; where several do, they cancel out once in 2^32 or so. Position
    and leaf take part in the bijection, so that two elements, or leaves, that changed places are
    noticed too. 64 bits count as two elements.
    """
    seed, rounds = jnp.uint32(number * ODD & 0xFFFFFFFF), leaf.size // CHUNK
    if not in_chunks or rounds < 2 or leaf.dtype.itemsize != 4:
        bits = _bits(leaf)
        return _mixed(bits, seed + _positions(bits.shape)).sum(dtype=jnp.uint32)
    # XLA on a CPU would else write all summands to memory first; in a loop they stay in its cache.
    flat, here = leaf.reshape(-1), seed + _positions((CHUNK,))

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice(flat, (i * CHUNK,), (CHUNK,))
        return sums + _mixed(
            _bits(piece), here + i.astype(jnp.uint32) * jnp.uint32(CHUNK * GOLDEN & 0xFFFFFFFF)
        )

    sums = jax.lax.fori_loop(0, rounds, add, jnp.zeros(CHUNK, jnp.uint32))
    rest = _bits(flat[rounds * CHUNK :])
    last = seed + _positions(rest.shape) + jnp.uint32(rounds * CHUNK * GOLDEN & 0xFFFFFFFF)
    return sums.sum(dtype=jnp.uint32) + _mixed(rest, last).sum(dtype=jnp.uint32)


def _mixed(bits: jax.Array, key: jax.Array) -> jax.Array:
    """A bijection of 32 bits, another one for each key, after the finalizer of Appleby's
    MurmurHash3."""
    x = bits ^ key
    x = (x ^ (x >> 16)) * jnp.uint32(ODD)
    return (x ^ (x >> 15)) * (key | 1)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """GOLDEN times the index in the flattened array, as uint32 of this shape. Made of iotas, which
    are fused and take no memory."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        total += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(
            stride * GOLDEN & 0xFFFFFFFF
        )
        stride *= shape[dim]
    return total


def _bits(leaf: jax.Array) -> jax.Array:
    """The elements' bits as uint32; two for one of 64 bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    limits = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    unsigned = getattr(jnp, f"uint{min(limits(leaf.dtype).bits, 32)}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _outvoted(differences: list[Difference]) -> set[int]:
    return {device for difference in differences for device in difference.outvoted()}


def suspected(differences: list[Difference]) -> set[int]:
    """The fewest devices that explain the differences: the outvoted ones, and where no other copies
    are in the majority, all that are left."""
    suspects = outvoted = _outvoted(differences)
    for difference in differences:
        left = {
            device: value for device, value in difference.hashes.items() if device not in outvoted
        }
        if len({*left.values()}) > 1:
            suspects = suspects | left.keys()
    return suspects


def _certain(differences: list[Difference]) -> bool:
    """True where a majority names every suspect."""
    return suspected(differences) == _outvoted(differences)


def _changed(differences: list[Difference], before: np.ndarray, after: np.ndarray) -> set[int]:
    """The devices that hold something else than before, where there were differences."""
    return {
        device
        for difference in differences
        for device in difference.hashes
        if before[device, difference.column] != after[device, difference.column]
    }


def _shards(mesh: Mesh, axes: frozenset[str]) -> np.ndarray:
    """[devices]: number of each device's shard, where these axes split."""
    sizes = [size if axis in axes else 1 for axis, size in mesh.shape.items()]
    shards = np.arange(np.prod(sizes)).reshape(sizes)
    return np.broadcast_to(shards, tuple(mesh.shape.values())).ravel()


def _bytes(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
