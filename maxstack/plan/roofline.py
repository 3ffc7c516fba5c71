"""Roofline: a lower bound on the time of a compiled step.

Every operation takes at least its FLOPs at the peak of their format, or its bytes at the memory's
bandwidth, whichever is longer (Williams et al. 2009, Roofline); operations follow each other on a
device. Attention is replaced by one kernel that keeps its scores on the chip. Collectives of one
kind of link follow each other, and run beside the device's work. Whatever a real run adds
(imperfect kernels, latency, exposed collectives, input) makes it slower."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from maxstack.hardware.chips import Chip
from maxstack.models.flops import Count, components
from maxstack.plan.topology import Link
from maxstack.plan.traffic import Collective
from maxstack.plan.work import Operation

if TYPE_CHECKING:
    from maxstack.schema.config import Config

ATTENTION = "attention"
"""Scope of attention's kernels."""
OVERFLOW = "further_windows"
"""Scope of the rounds of a dispatch to experts that balanced routing does not need."""
BACKWARD = 2.5
"""Matrix products of attention's backward pass, recomputed scores included, relative to its forward
pass: 5 to 2 (Dao 2023, arXiv:2307.08691)."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """Collectives of one kind over the same mesh axes: bytes that a device sends per step, and
    seconds that its links need for them."""

    kind: str
    axes: tuple[str, ...]
    link: str
    times: float
    bytes: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Minimum seconds of a step. Compute, memory and attention add up on a device; networks overlap
    with them."""

    compute: float
    """Operations limited by the matrix units."""
    memory: float
    """Operations limited by the device's memory."""
    attention: float
    """A kernel that keeps its scores on the chip, at the peak of the matrix units."""
    network: dict[str, float]
    """Kind of link -> seconds."""

    @property
    def device(self) -> float:
        """Seconds that a device is busy, including a pipeline's bubble."""
        return self.compute + self.memory + self.attention

    @property
    def seconds(self) -> float:
        """Seconds of a step, if networks overlap fully with the device's work."""
        return max(self.device, *self.network.values(), 0.0)

    @property
    def limit(self) -> str:
        """The limiting resource: compute, memory or a kind of link."""
        slowest = max(self.network, key=lambda kind: self.network[kind], default="")
        if self.network.get(slowest, 0.0) > self.device:
            return slowest
        return "compute" if self.compute + self.attention > self.memory else "memory"


def roofline(
    cfg: "Config", chip: Chip, devices: int, operations: Iterable[Operation], flows: Iterable[Flow]
) -> Roofline:
    """Compute the bound. `operations`: one device's, without those of attention."""
    compute = 0.0
    memory = 0.0
    for operation in operations:
        # An operation's products and its traffic overlap, but no operation overlaps with the next:
        # the bound is the sum over operations of the longer of both.
        by_flops = operation.flops / chip.flops(operation.dtype)
        by_bytes = operation.bytes / chip.memory_bandwidth_per_device
        if by_flops > by_bytes:
            compute += by_flops
        else:
            memory += by_bytes
    attention = attention_flops(cfg, devices) / chip.flops(cfg.model.dtype)
    network: dict[str, float] = collections.defaultdict(float)
    for flow in flows:
        # A link of unknown speed counts as free: the result must stay a lower bound.
        network[flow.link] += flow.seconds or 0.0
    return Roofline(compute, memory, attention, dict(network))


def attention_flops(cfg: "Config", devices: int) -> float:
    """Return the FLOPs of attention's kernels on one device in a step: forward, backward with
    recomputed scores, and forward again if remat recomputes it. Masked scores do not count."""
    count = components(cfg.model, cfg.data.seq_len).get(ATTENTION, Count(0.0, 0.0))
    # With the context kept, remat needs no second forward pass of attention.
    again = 0.0 if cfg.model.remat.keeps("context") else 1.0
    tokens = cfg.train.batch_size * cfg.data.seq_len
    # FLOPs of training are three times those of the forward pass, so a third is one forward pass.
    return count.causal / 3 * (1 + again + BACKWARD) * tokens / devices


def flows(
    collectives: Iterable[Collective], link: Callable[[tuple[str, ...]], Link]
) -> Iterator[Flow]:
    """Group collectives by kind and axes, and compute the seconds that the links between such
    devices need for them."""
    rows: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = collections.defaultdict(list)
    for row in collectives:
        rows[row.kind, row.axes, row.between_slices].append(row)
    for (kind, axes, between_slices), alike in rows.items():
        spanned = axes
        # libtpu splits a collective: the parts within a slice are collectives of their own, so this
        # one uses only the axes that cross slices.
        if between_slices:
            spanned = tuple(axis for axis in axes if link((axis,)).kind == "DCN")
        over = link(spanned)
        sent = sum(row.sent for row in alike)
        seconds = sent / over.bandwidth if over.bandwidth else None
        # A switch that adds receives each number once and sends the sum back, half of what a ring
        # moves.
        if seconds and kind == "all-reduce" and over.in_switch:
            seconds /= 2
        yield Flow(kind, axes, over.kind, sum(row.times for row in alike), sent, seconds)
