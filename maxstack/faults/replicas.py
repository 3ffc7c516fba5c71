"""Silent data corruption: each device hashes its copies of arrays that several devices hold, and
the hashes are compared.

Where copies differ, a majority names the devices at fault, and the steps since the last checkpoint,
which was compared before it was written, are computed again. If all copies then agree, the fault
was a passing one; else it stays, and the run ends. Of two copies, computing again also tells which
was wrong: the one that changed.

A fault is seen where it changes one copy alone: in a device's memory, or in work that each replica
does for itself, such as the optimizer's update. A wrong share of a sum over devices reaches all
replicas alike and is not seen; nor is a fault in what exists once."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
"""Transient faults of a process after which one more ends the run."""
GOLDEN, ODD = 0x9E3779B1, 0x85EBCA6B
CHUNK = 1 << 13
HOST = "pinned_host"


class Part(NamedTuple):
    """Leaves of one branch of the state that are sharded alike."""

    name: str
    shards: np.ndarray
    """[devices]: number of each device's shard, in the order of the mesh; equal ones are
    replicas."""
    leaves: tuple[int, ...]
    """Numbers of the state's leaves."""
    bytes: int
    """On one device."""


class Difference(NamedTuple):
    """One shard of one part whose copies differ."""

    part: Part
    column: int
    """Number of the part."""
    hashes: dict[int, int]
    """Number of a device in the mesh -> hash of its copy."""

    def outvoted(self) -> set[int]:
        """Return the devices whose hash is not the majority's; none where there is no majority."""
        # There are two values at least, or it would be no difference.
        (majority, most), (_, next_most), *_ = Counter(self.hashes.values()).most_common()
        if most == next_most:
            return set()
        return {device for device, value in self.hashes.items() if value != majority}


class Recompute(NamedTuple):
    """Decision to go on from the newest checkpoint before step `first`, with the same batches."""

    first: int


class Replicas:
    """The copies in a run's state, by its shapes and shardings (`run.abstract`)."""

    def __init__(self, abstract: "State", mesh: Mesh):
        self._mesh = mesh
        flat = jax.tree_util.tree_leaves_with_path(abstract)
        split = frozenset(axis for axis, size in mesh.shape.items() if size > 1)
        numbers: dict[tuple[str, frozenset[str]], list[int]] = {}
        for i, (path, leaf) in enumerate(flat):
            # Along an axis that does not split a leaf, its devices hold copies.
            axes = split.intersection(itertools.chain(*map(names, leaf.sharding.spec)))
            if axes != split and leaf.sharding.memory_kind != HOST:
                # Leaves that are sharded alike make one sum, so that few numbers are gathered.
                name = path[0].name if path[0].name in ("params", "opt") else "counters"
                numbers.setdefault((name, axes), []).append(i)
        leaves = [leaf for _, leaf in flat]
        self.parts = []
        for (name, axes), own in numbers.items():
            size = sum(_local_bytes(leaves[i]) for i in own)
            self.parts.append(Part(name, _shards(mesh, axes), tuple(own), size))
        self._compared = self._select(leaves)
        self._size = _bytes(leaves)
        self.covered = _bytes(self._compared) / self._size
        """Share of the state's bytes that exist more than once in devices' memory."""

    def describe(self, every: int) -> str:
        """Return a line for the log: how much is compared."""
        text = (
            f"replicas: {self.covered:.1%} of the state's {_mib(self._size)} lie on several "
            f"devices and are compared every {every} steps"
        )
        if self.covered > 0.5:
            return text
        return (
            f"{text}; the rest exists once or lies in the host's memory, so damage there is not "
            "seen"
        )

    def hashes(self, state: "State") -> np.ndarray:
        """Return hashes, uint32 [devices, parts], the same in every process: equal for equal bits,
        and certainly different where one element differs."""
        if not self.parts:
            return np.zeros((self._mesh.size, 0), np.uint32)
        return np.asarray(self.program(self._select(jax.tree.leaves(state))))

    def _select(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the compared ones of the state's leaves, part by part."""
        return [leaves[i] for part in self.parts for i in part.leaves]

    def compare(self, hashes: np.ndarray) -> list[Difference]:
        """Return the shards whose copies have different hashes."""
        differences = []
        for column, part in enumerate(self.parts):
            values = hashes[:, column]
            # Each copy is compared with the first one of its shard; which of them is wrong is told
            # later.
            _, first, inverse = np.unique(part.shards, return_index=True, return_inverse=True)
            for shard in np.unique(part.shards[values != values[first[inverse]]]):
                devices = np.flatnonzero(part.shards == shard)
                copies = dict(zip(devices.tolist(), values[devices].tolist(), strict=True))
                differences.append(Difference(part, column, copies))
        return differences

    def name_devices(self, devices: Iterable[int]) -> str:
        """Name devices by their numbers in the mesh: `device 3 (cpu) of process 1 and ...`."""
        named = [self._mesh.devices.flat[i] for i in sorted(devices)]
        return " and ".join(
            f"device {d.id} ({d.device_kind}) of process {d.process_index}" for d in named
        )

    @functools.cached_property
    def program(self) -> Any:
        """The compiled function from the leaves of all parts to their hashes, replicated."""
        in_chunks = self._mesh.devices.flat[0].platform == "cpu"

        def local(leaves: list[jax.Array]) -> jax.Array:
            hashes = (_hash(number, leaf, in_chunks) for number, leaf in enumerate(leaves, 1))
            sums = [
                sum(itertools.islice(hashes, len(part.leaves)), jnp.uint32(0))
                for part in self.parts
            ]
            return jnp.stack(sums)[None]

        specs = [leaf.sharding.spec for leaf in self._compared]
        mapped = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(specs,),
            # A row for each device, which no sum over devices makes equal.
            out_specs=PartitionSpec(self._mesh.axis_names),
            check_vma=False,
        )
        return (
            # Replicated, so that every process reads the same numbers and decides alike.
            jax.jit(mapped, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
            .lower(self._compared)
            .compile()
        )


class Corruption:
    """Decides what a difference between copies leads to. Every process reads the same hashes and
    decides alike. The constructor compiles a program."""

    def __init__(self, replicas: Replicas, every: int, say: Callable[[str], None]):
        self._replicas = replicas
        self._every = every
        self._say = say
        self._suspected: tuple[int, np.ndarray] | None = None
        self._faults = 0
        if replicas.parts:
            _ = replicas.program  # compile now, not in the middle of the run

    def due(self, step: int, saving: bool) -> bool:
        """Return whether to check after `step`: at the interval, before each save, so that no
        checkpoint is damaged, and where there was a difference before."""
        differed = self._suspected is not None and step == self._suspected[0]
        return bool(self._replicas.parts) and (saving or step % self._every == 0 or differed)

    def compare_copies(self, step: int, state: "State") -> Recompute | None:
        """Compare the copies in the state after `step`; return the step to go back to, if any.
        ConfigError where a device is to be taken out of service."""
        hashes = self._replicas.hashes(state)
        differences = self._replicas.compare(hashes)
        if self._suspected is None:
            return self._recompute(step, hashes, differences) if differences else None
        first, before = self._suspected
        if differences:
            # Hashes of another step say nothing about which copy changed.
            after = hashes if step == first else None
            raise ConfigError(f"step {step}: {self._describe_lasting(before, after, differences)}")
        # Between the checkpoint and the suspected step there may be checks that pass: only that
        # step, once computed again, clears the device.
        if step >= first:
            self._suspected = None
            self._say(
                f"step {step}, computed again: all copies agree, so the fault was a passing one, "
                f"{self._name_guilty(before, hashes)}; if a device has it often, take it out of "
                "service"
            )
        return None

    def _recompute(self, step: int, hashes: np.ndarray, differences: list[Difference]) -> Recompute:
        text = f"step {step}: SILENT DATA CORRUPTION in {describe_sizes(differences)}"
        self._faults += 1
        # One that passes each time would otherwise cost the steps since a checkpoint for ever.
        if self._faults > MOST:
            raise ConfigError(
                f"{text}; it is fault number {self._faults} since this process began, and {MOST} "
                "are passed over: test these devices, or take them out of service, and run the "
                "same command again"
            )
        which = "differ, and it is not known yet which is right"
        if _certain(differences):
            which = "differs from most replicas"
        self._say(
            f"{text}: {self._replicas.name_devices(find_suspects(differences))}: {which}; the "
            "steps since the last checkpoint are computed again"
        )
        self._suspected = step, hashes
        return Recompute(step)

    def _name_guilty(self, before: np.ndarray, after: np.ndarray) -> str:
        """Name the devices that had a passing fault: those outvoted, or where there was no
        majority, those whose hash changed."""
        differences = self._replicas.compare(before)
        suspects = find_suspects(differences)
        if _certain(differences):
            return f"of {self._replicas.name_devices(suspects)}"
        guilty = suspects & _find_changed(differences, before, after)
        if 0 < len(guilty) < len(suspects):
            return f"of {self._replicas.name_devices(guilty)}"
        return (
            f"of one of {self._replicas.name_devices(suspects)}; more replicas (mesh.data), "
            "or a smaller faults.check_every, tell which"
        )

    def _describe_lasting(
        self, before: np.ndarray, after: np.ndarray | None, differences: list[Difference]
    ) -> str:
        """Return the error about a fault that stays; `after`: the hashes, where the steps were
        computed again up to the same one."""
        first = self._replicas.compare(before)
        # A device that is at fault is under suspicion both times.
        both = find_suspects(first) & find_suspects(differences)
        text = (
            "silent data corruption, again after computing the steps again, in "
            f"{describe_sizes(differences)}"
        )
        if not both:
            now = self._replicas.name_devices(find_suspects(differences))
            return (
                f"{text}: {self._replicas.name_devices(find_suspects(first))} before, {now} now, "
                "so it is not one device's; test these, or set faults.check_every=0 where the "
                "program itself is not deterministic (on a GPU see "
                "xla.flags.xla_gpu_deterministic_ops)"
            )
        if after is not None and not _certain(differences):
            both = both & _find_changed(first, before, after) or both
        some = "" if len(both) == 1 else "one or more of "
        return (
            f"{text}: the fault stays, in {some}{self._replicas.name_devices(both)}; take it out "
            "of service, and run the same command again"
        )


def describe_sizes(differences: list[Difference]) -> str:
    """Return bytes and names of the parts that differ."""
    parts = {difference.column: difference.part for difference in differences}
    return " and ".join(f"{_mib(part.bytes)} of {part.name}" for part in parts.values())


def _hash(number: int, leaf: jax.Array, in_chunks: bool) -> jax.Array:
    """Return uint32, a sum over elements modulo 2^32.

    Each summand is a bijection of the element's bits: xor, multiplication by an odd number and
    x ^ (x >> n) can all be undone. So where one element differs, by one bit or more, the sum
    certainly does; where several do, they cancel out about once in 2^32. Position and leaf take
    part in the bijection, so two elements or leaves that were swapped are noticed too. 64 bits
    count as two elements.
    """
    seed = jnp.uint32(number * ODD & 0xFFFFFFFF)
    rounds = leaf.size // CHUNK
    if not in_chunks or rounds < 2 or leaf.dtype.itemsize != 4:
        bits = _bits(leaf)
        # Modulo 2^32 a sum does not depend on its order, so XLA may reduce as it likes.
        return _mix(bits, seed + _positions(bits.shape)).sum(dtype=jnp.uint32)
    # In one pass XLA on a CPU writes all summands to memory first: 1.6 GB/s, with temporaries of
    # half the state. In a loop over chunks they stay in the cache: 4 to 6 GB/s, 0.6 MB
    # (EXPERIMENTS.md).
    flat = leaf.reshape(-1)
    here = seed + _positions((CHUNK,))

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice(flat, (i * CHUNK,), (CHUNK,))
        return sums + _mix(
            _bits(piece), here + i.astype(jnp.uint32) * jnp.uint32(CHUNK * GOLDEN & 0xFFFFFFFF)
        )

    sums = jax.lax.fori_loop(0, rounds, add, jnp.zeros(CHUNK, jnp.uint32))
    rest = _bits(flat[rounds * CHUNK :])
    last = seed + _positions(rest.shape) + jnp.uint32(rounds * CHUNK * GOLDEN & 0xFFFFFFFF)
    return sums.sum(dtype=jnp.uint32) + _mix(rest, last).sum(dtype=jnp.uint32)


def _mix(bits: jax.Array, key: jax.Array) -> jax.Array:
    """Apply a bijection of 32 bits, a different one for each key, after the finalizer of Appleby's
    MurmurHash3."""
    # With an odd multiplier for each position alone, two flipped sign bits cancelled out.
    x = bits ^ key
    x = (x ^ (x >> 16)) * jnp.uint32(ODD)
    return (x ^ (x >> 15)) * (key | 1)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Return GOLDEN times the index in the flattened array, as uint32 of this shape. It is made of
    iotas, which are fused and take no memory."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        total += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(
            stride * GOLDEN & 0xFFFFFFFF
        )
        stride *= shape[dim]
    return total


def _bits(leaf: jax.Array) -> jax.Array:
    """Return the elements' bits as uint32; two for one of 64 bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    limits = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    unsigned = getattr(jnp, f"uint{min(limits(leaf.dtype).bits, 32)}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _find_outvoted(differences: list[Difference]) -> set[int]:
    return {device for difference in differences for device in difference.outvoted()}


def find_suspects(differences: list[Difference]) -> set[int]:
    """Return the fewest devices that explain the differences: the outvoted ones, and where the
    other copies have no majority, all of them."""
    # One faulty device may differ in several shards, in some of which it has only one other copy.
    suspects = outvoted = _find_outvoted(differences)
    for difference in differences:
        left = {
            device: value for device, value in difference.hashes.items() if device not in outvoted
        }
        if len({*left.values()}) > 1:
            suspects = suspects | left.keys()
    return suspects


def _certain(differences: list[Difference]) -> bool:
    """Return whether a majority names every suspect."""
    return find_suspects(differences) == _find_outvoted(differences)


def _find_changed(differences: list[Difference], before: np.ndarray, after: np.ndarray) -> set[int]:
    """Return the devices whose copies changed, of those where there were differences."""
    return {
        device
        for difference in differences
        for device in difference.hashes
        if before[device, difference.column] != after[device, difference.column]
    }


def _shards(mesh: Mesh, axes: frozenset[str]) -> np.ndarray:
    """Return [devices]: number of each device's shard, where these axes split."""
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
