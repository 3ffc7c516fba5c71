"""The plan of a compiled step, as a screen of text or as JSON."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.hardware import chips
from maxstack.models.flops import Count
from maxstack.plan.activations import activations
from maxstack.plan.buffers import Buffer, Memory, allocations, largest, memory
from maxstack.plan.program import parse
from maxstack.plan.rollout import Rollout, lines, phases
from maxstack.plan.roofline import ATTENTION, OVERFLOW, Flow, Roofline, flows, roofline
from maxstack.plan.step import Step, TooLarge
from maxstack.plan.topology import Topology, groups
from maxstack.plan.traffic import collectives
from maxstack.plan.work import operations
from maxstack.report.table import bytes_text, table

if TYPE_CHECKING:
    from maxstack.schema.config import Config

GIB = 2**30
SHOWN = 6
FROM_TEXT = ", read from the program's text: the compiler gave no buffer assignment"
LOW = re.compile(r"[su][1-8]$|f[48]e")
"""Element types of low precision, by XLA's names."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes, seconds and FLOPs are of one device, unless the name says otherwise."""

    config: str
    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    batch_size: int
    seq_len: int
    parameters: int
    """Parameters of the whole model."""
    memory: dict[str, int]
    """Part -> bytes of a step, as the compiler counts them."""
    needed: int
    """Bytes of a step or a rollout with its engine, whichever is more."""
    usable: int | None
    """Bytes that a program may use; None if unknown."""
    buffers: tuple[Buffer, ...]
    flops: dict[str, Count]
    """Component -> FLOPs of a whole step on all devices."""
    products: dict[str, float]
    """XLA's element type -> FLOPs in the compiled program, without attention's."""
    flows: tuple[Flow, ...]
    roofline: Roofline | None
    """None if the step was too large to compile, or the chip is unknown."""
    peak: float | None
    bubble: float
    """Share of time in which a pipeline stage is idle."""
    seconds: dict[str, float]
    """Seconds that making the plan took, by part."""
    rollout: Rollout | None = None
    """None for a run without rollouts."""
    counted: str = "tokens"
    """Unit of the objective: tokens, or images of seq_len tokens."""

    @property
    def fits(self) -> bool | None:
        """None if the device's memory is unknown."""
        return None if self.usable is None else self.needed <= self.usable

    @property
    def tokens(self) -> int:
        """Tokens of a step on all devices."""
        return self.batch_size * self.seq_len

    @property
    def tokens_per_second(self) -> float | None:
        """The speed bound of all devices together."""
        seconds = self.roofline.seconds if self.roofline else None
        return self.tokens / seconds if seconds else None

    @property
    def images_per_second(self) -> float | None:
        """The speed bound in images; None if the objective counts tokens."""
        rate = self.tokens_per_second
        return rate / self.seq_len if rate and self.counted == "images" else None

    def mfu(self, kind: str = "causal") -> float | None:
        """Return the bound on MFU, with the FLOPs of `causal` or `full` attention."""
        if not (self.roofline and self.roofline.seconds and self.peak):
            return None
        flops = getattr(_total(self.flops), kind)
        return flops / (self.roofline.seconds * self.peak * self.devices)

    def __str__(self) -> str:
        return text(self)

    def json(self) -> dict[str, Any]:
        """Return every value as plain data."""
        figures = dataclasses.asdict(self) | {
            "flops": {name: count._asdict() for name, count in self.flops.items()},
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "images_per_second": self.images_per_second,
            "mfu_causal": self.mfu(),
            "mfu_full": self.mfu("full"),
        }
        if self.rollout:
            figures["rollout"] = self.rollout.json()
        if self.roofline:
            figures["roofline"] |= {"seconds": self.roofline.seconds, "limit": self.roofline.limit}
        return figures


def _total(flops: Mapping[str, Count]) -> Count:
    return Count(*map(sum, zip(*flops.values(), strict=True)))


def read(
    name: str, cfg: "Config", topology: Topology, step: Step, dump: Path | None = None
) -> Plan:
    """Make the plan of a compiled step, or of one too large to compile. `dump`: see
    `compile_step`."""
    from maxstack.models.pipeline import bubble
    from maxstack.plan import fit

    run = step.run
    chip = topology.chip
    sizes = dict(run.mesh.shape)
    # The parts of the state come from shapes and the total from the compiler; _rest() attributes
    # the difference.
    state = {**fit.state_bytes(run), "batch": fit.shard_bytes(run.batches.abstract())}
    if step.too_large:
        figures = _from_error(step.too_large, state)
    else:
        figures = _from_program(cfg, topology, step, state, dump)
    tokens = cfg.train.batch_size * cfg.data.seq_len
    return Plan(
        config=name,
        topology=topology.name,
        chip=chip.kinds[0] if chip else topology.devices()[0].device_kind,
        devices=topology.size,
        mesh={axis: size for axis, size in sizes.items() if size > 1},
        batch_size=cfg.train.batch_size,
        seq_len=cfg.data.seq_len,
        counted=run.objective.unit,
        parameters=run.weights.parameters,
        usable=fit.usable(run.mesh.devices.flat[0], topology.size),
        flops={
            part: Count(each.causal * tokens, each.full * tokens)
            for part, each in run.flops.items()
        },
        peak=chip.peak_flops if chip else None,
        bubble=bubble(sizes["stage"], cfg.mesh.rounds, cfg.mesh.microbatches or sizes["stage"]),
        seconds={"lowering": step.lowering, "compiling": step.compiling},
        **figures,
    )


def _from_error(refusal: TooLarge, state: dict[str, int]) -> dict[str, Any]:
    """Fields of the plan of a step that does not fit, from the compiler's error."""
    buffers = [
        Buffer(size, shape, name, "", "temporary") for size, shape, name in refusal.largest[:SHOWN]
    ]
    return {
        # The refusal says only a sum, which beyond the state is all temporaries.
        "memory": state | {"temporaries": max(0, refusal.needed - sum(state.values()))},
        "needed": refusal.needed,
        "buffers": tuple(buffers),
        "products": {},
        "flows": (),
        "roofline": None,
    }


def _from_program(
    cfg: "Config", topology: Topology, step: Step, state: dict[str, int], dump: Path | None
) -> dict[str, Any]:
    """Fields of the plan that are read from the compiled program. `state`: bytes of its parts."""
    program = parse(step.compiled.as_text())
    chip = topology.chip
    sizes = dict(step.run.mesh.shape)
    total = memory(step.compiled)
    link = groups(topology, tuple(sizes.values()))
    # Rounds of a dispatch to experts that balanced routing does not need are left out, because a
    # plan must stay a bound.
    sent = tuple(flows(collectives(program, sizes, without=(OVERFLOW,)), link))
    # The roofline counts attention as one kernel that keeps its scores on the chip, so what the
    # program does for it instead is left out.
    work = operations(program, without=(ATTENTION, OVERFLOW))
    products: dict[str, float] = collections.defaultdict(float)
    for operation in work:
        products[operation.dtype] += operation.flops
    return {
        "memory": state | _rest(total, sum(state.values()), activations(program)),
        "needed": total.needed,
        "buffers": tuple(largest(program, SHOWN, allocations(dump) if dump else ())),
        "products": {dtype: flops for dtype, flops in products.items() if flops},
        "flows": sent,
        "roofline": roofline(cfg, chip, topology.size, work, sent) if chip else None,
    }


def _rest(total: Memory, state: int, saved: int) -> dict[str, int]:
    """Split the bytes that the compiled program needs beyond its state: padding of the arguments,
    the program itself, saved activations, and other temporaries."""
    # The compiler counts arguments with their layout's padding; shapes do not.
    padding = max(0, total.arguments - state)
    runs = max(0, total.needed - state - padding - total.code)
    return {
        "padding": padding,
        "code": total.code,
        # Activations are summed over the program's text, where some may share memory; they cannot
        # exceed what the compiler needs.
        "activations": min(saved, runs),
        "temporaries": max(0, runs - saved),
    }


def text(plan: Plan, cost: Sequence[str] = ()) -> str:
    """Format the plan as a screen, with the lines of `cost` before the verdict."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"
    head = [
        f"{plan.config} on {plan.topology}: {plan.devices:,} x {plan.chip}, mesh {mesh}",
        f"{plan.parameters:,} parameters, {plan.batch_size:,} x {plan.seq_len:,} = "
        f"{plan.tokens:,} tokens per step",
    ]
    included = ", included above" if plan.roofline else ""
    pipeline = f"pipeline: a stage is idle {plan.bubble:.1%} of the time{included}"
    sections = (
        head,
        _memory(plan),
        _flops(plan),
        _traffic(plan) if plan.flows else (),
        _speed(plan) if plan.roofline else (),
        _rollout(plan),
        [pipeline] if plan.bubble else (),
        cost,
        [_verdict(plan)],
    )
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section)


def _verdict(plan: Plan) -> str:
    """Say whether the run fits, and by how much."""
    if plan.usable is None:
        return f"needs {plan.needed / GIB:.2f} GiB per device; the device's memory is unknown"
    left = plan.usable - plan.needed
    share = f"{bytes_text(plan.needed)} of {bytes_text(plan.usable)} per device"
    if left >= 0:
        return f"FITS: {share}, {bytes_text(left)} ({left / plan.usable:.0%}) left"
    return f"DOES NOT FIT: {share}, {bytes_text(-left)} ({-left / plan.usable:.0%}) too much"


def _amount(number: float) -> str:
    """Format FLOPs with a prefix."""
    prefixes = "kMGTPE"
    power = next((n for n in range(1, len(prefixes)) if number < 1000 ** (n + 1)), len(prefixes))
    return f"{number / 1000**power:,.2f} {prefixes[power - 1]}FLOP"


def _memory(plan: Plan) -> Iterator[str]:
    yield "memory of one device"
    if plan.rollout:
        yield _in_phases(plan, plan.rollout)
    else:
        yield table("lr", ((name, bytes_text(size)) for name, size in plan.memory.items() if size))
    if plan.buffers:
        yield f"its largest buffers{'' if plan.buffers[0].exact else FROM_TEXT}"
        rows = [
            (
                bytes_text(buffer.bytes),
                "" if buffer.kind == "temporary" else buffer.kind,
                _short(buffer.op_name or buffer.name),
                re.sub(".*/maxstack/", "maxstack/", buffer.source),
            )
            for buffer in plan.buffers
        ]
        yield table("llll", rows)


def _in_phases(plan: Plan, rollout: Rollout) -> str:
    """Format a column of bytes each for the update and the rollout."""
    columns = phases(plan.memory, rollout)
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    rows = []
    for name in names:
        sizes = [parts.get(name, 0) for parts in columns.values()]
        if any(sizes):
            rows.append((name, *(bytes_text(size) if size else "-" for size in sizes)))
    rows.append(("sum", *(bytes_text(sum(parts.values())) for parts in columns.values())))
    return table("lrr", rows, ("", *columns))


def _rollout(plan: Plan) -> Iterator[str]:
    if plan.rollout:
        chip = chips.by_kind(plan.chip)
        number = plan.devices / (chip.devices if chip else 1)
        yield from lines(plan.rollout, plan.devices, number)


def _short(name: str) -> str:
    return name if len(name) <= 70 else f"...{name[-67:]}"


def _flops(plan: Plan) -> Iterator[str]:
    yield "FLOPs of a step on all devices, without recomputation"
    total = _total(plan.flops)
    rows = [
        (name, _amount(count.causal), f"{count.causal / total.causal:.1%}", _amount(count.full))
        for name, count in (*plan.flops.items(), ("total", total))
    ]
    yield table("lrrr", rows, ("", "causal", "", "full"))
    chip = chips.by_kind(plan.chip)
    whole = _amount(sum(plan.products.values()))
    for dtype, flops in sorted(plan.products.items()):
        if LOW.match(dtype):
            peak = f" (peak {chip.flops(dtype) / 1e12:,.0f} TFLOP/s)" if chip else ""
            yield (
                f"in {dtype}: {_amount(flops)} of {whole} per step and device as compiled, without "
                f"attention{peak}"
            )


def _traffic(plan: Plan) -> Iterator[str]:
    yield "sent by one device per step"
    ordered = sorted(plan.flows, key=lambda flow: (-(flow.seconds or 0), -flow.bytes))
    rows = [
        (
            flow.kind,
            " x ".join(flow.axes) or "none",
            flow.link,
            f"{flow.times:,.0f}",
            bytes_text(flow.bytes),
            f"{flow.seconds * 1e3:,.1f}" if flow.seconds is not None else "?",
        )
        for flow in ordered[: 2 * SHOWN]
    ]
    yield table("lllrrr", rows, ("collective", "over", "link", "times", "bytes", "ms"))


def _speed(plan: Plan) -> Iterator[str]:
    bound = plan.roofline
    assert bound
    networks = "".join(f", {kind} {seconds * 1e3:,.1f}" for kind, seconds in bound.network.items())
    yield (
        f"minimum ms per step: matrix products {bound.compute * 1e3:,.1f} + "
        f"attention {bound.attention * 1e3:,.1f} + memory "
        f"{bound.memory * 1e3:,.1f} = {bound.device * 1e3:,.1f}{networks}"
    )
    rate = plan.tokens_per_second
    causal = plan.mfu()
    full = plan.mfu("full")
    assert rate and causal and full
    images = f"{plan.images_per_second:,.0f} images/s, " if plan.images_per_second else ""
    yield (
        f"at most {images}{rate:,.0f} tokens/s ({rate / plan.devices:,.0f} per device), MFU "
        f"{causal:.1%} causal, {full:.1%} full; "
        f"{bound.seconds:.3f} s per step, limited by {bound.limit}"
    )
