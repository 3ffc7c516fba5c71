"""Roofline of a step of inference: a bound on its speed by the bytes that a device reads, the FLOPs
it computes and the bytes it receives. Computed from shapes; the hardware need not be here.

A step takes at least the longest of three times, which are assumed to overlap: reading weights and
cache from memory, the matmuls of its tokens, and receiving the shards of weights that other devices
keep (Williams et al. 2009). Few tokens leave experts unread, so their weights count by the chance
that some token chooses them.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from maxstack.hardware.chips import Chip
from maxstack.plan.estimate import low_flops, mesh_axes
from maxstack.plan.topology import Link, Topology, groups
from maxstack.schema.mesh import names, parts

if TYPE_CHECKING:
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class Speed:
    """A lower bound of a step's time, and an upper bound of all devices' tokens per second."""

    seconds: float
    tokens_per_second: float
    limit: str
    """The bottleneck: memory, compute or a kind of link."""


class DeviceWeight(NamedTuple):
    """A weight on one device."""

    kept: float
    """Bytes that the device stores between steps."""
    read: float
    """Bytes that a step reads, with the shards that other devices send; of experts, if it needs all
    of them."""
    gathered: tuple[str, ...]
    """Mesh axes whose devices send their shards."""
    chosen: float = 1.0
    """Share of the experts that a token needs; 1: no experts."""
    spread: int = 1
    """Replicas whose rows come to the experts of this device."""

    def needed(self, rows: int) -> float:
        """Return the bytes that `rows` rows of each replica need on average, where experts are
        chosen evenly and independently."""
        # The chance that a token passes an expert by, to the power of the tokens, is that all do.
        return self.read * (1 - (1 - self.chosen) ** (rows * self.spread))


@dataclasses.dataclass(frozen=True)
class Device:
    """A device and what limits its steps."""

    weights: Sequence[DeviceWeight]
    low: Mapping[str, float]
    """FLOPs of a token by type of low precision."""
    dtype: str
    share: float
    """Part of a replica's matmuls that the device computes."""
    chip: Chip
    link: Callable[[tuple[str, ...]], Link]
    sizes: Mapping[str, int]
    replicas: int

    @classmethod
    def of(cls, cfg: "Config", topology: Topology, sizes: Mapping[str, int]) -> "Device | None":
        """Return a device of a mesh of these sizes; None where its chip is unknown."""
        from maxstack.weights.rewrite import Rewrite

        if topology.chip is None:
            return None
        replicas = parts(cfg.mesh.rules["batch"], sizes)
        return cls(
            weights_on_device(cfg, sizes),
            low_flops(cfg, Rewrite(cfg), trains=False),
            cfg.model.dtype,
            # A replica's matmuls are shared by its devices.
            replicas / topology.size,
            topology.chip,
            groups(topology, tuple(sizes.values())),
            sizes,
            replicas,
        )

    def compute(self, flops: float) -> float:
        """Return the seconds of matmuls for a token with so many FLOPs."""
        # Only the matmuls of quantized weights are faster; attention and the rest run in the
        # model's dtype.
        low = sum(each / self.chip.flops(dtype) for dtype, each in self.low.items())
        rest = max(0.0, flops - sum(self.low.values()))
        return self.share * (low + rest / self.chip.flops(self.dtype))

    def reading(self, rows: int) -> float:
        """Return the seconds of reading the weights that so many tokens need."""
        return (
            sum(each.needed(rows) for each in self.weights) / self.chip.memory_bandwidth_per_device
        )

    def balance(self, flops: float) -> float:
        """Return the tokens whose matmuls take as long as reading all weights; fewer take as
        long."""
        whole = sum(each.read for each in self.weights)
        return whole / self.chip.memory_bandwidth_per_device / self.compute(flops)

    def speed(self, rows: int, flops: float, cached: float) -> Speed:
        """Return the bound of a step of `rows` tokens with so many FLOPs each, that reads `cached`
        bytes of the cache: the longest of memory, compute and networks, assumed to overlap
        (Williams et al. 2009, Roofline)."""
        seconds: dict[str, float] = collections.defaultdict(float)
        seconds["memory"] = self.reading(rows) + cached / self.chip.memory_bandwidth_per_device
        seconds["compute"] = rows * self.compute(flops)
        for each in self.weights:
            if (number := parts(each.gathered, self.sizes)) > 1:
                over = self.link(each.gathered)
                # A link without a published bandwidth bounds nothing.
                if over.bandwidth:
                    # One part of `number` lies on the device itself.
                    received = each.read * (number - 1) / number
                    seconds[over.kind] += received / over.bandwidth
        limit = max(seconds, key=lambda kind: seconds[kind])
        return Speed(seconds[limit], rows * self.replicas / seconds[limit], limit)


def weights_on_device(cfg: "Config", sizes: Mapping[str, int]) -> list[DeviceWeight]:
    """Return each weight on one device of a mesh, in the types that inference keeps."""
    from flax import nnx

    from maxstack import state
    from maxstack.models.model import weights_of
    from maxstack.models.stack import mixture as mixture_at
    from maxstack.weights.rewrite import Rewrite

    rewrite = Rewrite(cfg)
    original = weights_of(cfg.model)
    rules = cfg.mesh.rules
    width, batch = 4 if cfg.model.dtype == "float32" else 2, names(rules["batch"])
    info = state.flat(state.of_weights(rewrite.state, rewrite.replaced)[1])
    rows = []
    for keys, param in nnx.to_flat_state(rewrite.state):
        path, leaf = "/".join(map(str, keys)), param.get_value()
        match = next(
            (m for key, m in rewrite.matches.items() if f"{path}/".startswith(f"{key}/")), None
        )
        use = match.spec.use if match else param.get_metadata().get("use")
        # The types that `programs.prepare_weights` keeps.
        cast = use and path in original
        size = leaf.size * (width if cast else leaf.dtype.itemsize)
        axes = mesh_axes(info[path].axes, rules)
        kept = size / parts(axes, sizes)
        # Experts stay where they are and tokens travel to them; all other shards over the axes of
        # the batch are gathered.
        over = [axis for axis in names(rules["expert"]) if use == "experts" and axis in axes]
        gathered = tuple(axis for axis in axes if axis in batch and axis not in over)
        # A step looks a few rows of an embedding up, unless the head multiplies by all of it.
        unread = use == "rows" and not cfg.decoder.head.tied
        unread |= path.startswith("mtp/") and not cfg.serve.modules
        read = 0.0 if unread or "per_layer_embed" in path else kept * parts(gathered, sizes)
        chosen, spread = 1.0, parts([axis for axis in over if axis in batch], sizes)
        if use == "experts":
            mixture = mixture_at(cfg.model, tuple(path.split("/")))
            chosen = mixture.top_k / mixture.experts
        rows.append(DeviceWeight(kept, read, gathered, chosen, spread))
    return rows


def forward_flops(cfg: "Config", start: int, end: int) -> float:
    """Return the forward FLOPs of a token, on average over positions `start` to `end - 1`."""
    from maxstack.models.flops import components

    def total(length: int) -> float:
        counts = components(cfg.model, length) if length else {}
        each = sum(count.causal for name, count in counts.items() if name != "further tokens")
        # FLOPs of training: a third is forward, two thirds are the two products of the backward.
        return length * each / 3

    # The difference of two whole texts, because attention costs more the later a token stands.
    return (total(end) - total(start)) / (end - start)
