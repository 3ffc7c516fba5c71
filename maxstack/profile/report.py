"""Formats a profile, or two side by side."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from maxstack.plan.report import FROM_TEXT
from maxstack.profile.analysis import Operation, Summary
from maxstack.profile.origins import DIRECTIONS
from maxstack.report.table import bytes_text, table

SHOWN = 10
"""Rows of a table."""
LEAST = 0.001
"""Share of a step below which a row is left out."""


def text(profile: Summary) -> str:
    """Format one profile, a table for each question."""
    sections = (
        _head(profile),
        _layers(profile),
        _lines(profile),
        _operations(profile),
        _collectives(profile),
        _host(profile),
        _memory(profile),
        profile.remarks,
    )
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section)


def comparison(before: Summary, after: Summary) -> str:
    """Format two profiles side by side, the rows that changed most first."""
    sections: dict[str, Callable[[Summary], Mapping[str, float]]] = {
        "": _parts,
        "direction": lambda profile: profile.directions,
        "layer": lambda profile: {row.name: row.total for row in profile.layers},
        "source line": _by_line,
        "collective": _by_collective,
    }
    heads = [f"{name}: {_title(each)}" for name, each in (("A", before), ("B", after))]
    tables = [
        _side_by_side(name, of(before), of(after))
        for name, of in sections.items()
        if of(before) or of(after)
    ]
    return "\n\n".join(["\n".join(heads), *tables, _memories(before, after)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _title(profile: Summary) -> str:
    first, last = profile.steps[0], profile.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    of = f", process {profile.process} of {profile.processes}" if profile.processes > 1 else ""
    return f"{profile.run}, {steps}, {profile.devices} x {profile.device_kind}{of}"


def _head(profile: Summary) -> Iterator[str]:
    yield _title(profile)
    if profile.unproven:
        platform = profile.platform.upper()
        yield f"unproven: reading {platform} traces has not been checked on hardware"
    if profile.dropped:
        yield f"left out: {profile.dropped} steps that are incomplete or were not requested"
    yield ""
    rows = [(name, _ms(s), _share(s, profile)) for name, s in _parts(profile).items()]
    yield table("lrr", rows, ("", "ms/step", ""))
    rate = f"{profile.tokens / profile.step_seconds:,.0f} tokens/s"
    mfu = f", MFU {profile.mfu:.1%}" if profile.mfu else ""
    flops = profile.flops / profile.step_seconds / 1e9
    yield f"  {rate}, {flops:,.1f} GFLOP/s on all devices{mfu}"
    if profile.bound:
        yield (
            f"  roofline: the operations need at least {_ms(profile.bound)} ms, "
            f"{profile.bound / profile.busy:.0%} of the busy time"
        )
    yield f"  {profile.attributed:.2%} of the busy time is attributed to source"


def _parts(profile: Summary) -> dict[str, float]:
    """Busy and idle seconds."""
    parts = {"step": profile.step_seconds}
    parts |= {"busy": profile.busy, "idle": profile.idle}
    if profile.waiting is not None:
        waiting = min(profile.waiting, profile.idle)
        parts |= {"  waiting for a batch": waiting, "  other": profile.idle - waiting}
    return parts


def _share(seconds: float, profile: Summary) -> str:
    return f"{seconds / profile.step_seconds:.1%}"


def _layers(profile: Summary) -> Iterator[str]:
    total = profile.directions
    shown = [name for name in DIRECTIONS if total.get(name, 0.0) > 0]
    rows = [
        (row.name, row.seconds, row.total)
        for row in profile.layers[: 2 * SHOWN]
        if row.total >= LEAST * profile.step_seconds
    ]
    rows.append(("all", total, sum(total.values())))
    cells = []
    for name, of, every in rows:
        ways = [_ms(of[way]) if of.get(way) else "-" for way in shown]
        cells.append((name, *ways, _ms(every), _share(every, profile)))
    yield table(f"l{'r' * len(shown)}rr", cells, ("layer, ms/step", *shown, "all", ""))


def _lines(profile: Summary) -> Iterator[str]:
    rows = [
        (
            _ms(row.seconds),
            _share(row.seconds, profile),
            _short(row.source) or "unknown",
            _short(row.caller),
        )
        for row in profile.lines[:SHOWN]
        if row.seconds >= LEAST * profile.step_seconds
    ]
    yield table("rrll", rows, ("ms/step", "", "source line", "called from"))


def _operations(profile: Summary) -> Iterator[str]:
    rows = [
        [
            _ms(row.seconds),
            _share(row.seconds, profile),
            row.name,
            f"{row.times:,.0f}",
            *_speeds(row),
            _of_bound(row),
            " ".join(dict.fromkeys(filter(None, (row.layer, row.direction)))),
        ]
        for row in profile.operations[:SHOWN]
    ]
    header = ["ms/step", "", "operation", "times", "GFLOP/s", "GB/s", "of its bound", "layer"]
    sides = "rrlrrrrl"
    if profile.bound is None:
        # The column says nothing for a chip without figures.
        for cells in (header, *rows):
            cells.pop(6)
        sides = "rrlrrrl"
    yield table(sides, rows, header)


def _speeds(row: Operation) -> tuple[str, str]:
    """Return GFLOP/s and GB/s in the seconds that are its own."""
    flops = f"{row.flops / row.seconds / 1e9:,.1f}" if row.flops and row.seconds else "-"
    moved = f"{row.bytes / row.seconds / 1e9:,.1f}" if row.bytes and row.seconds else "-"
    return flops, moved


def _of_bound(row: Operation) -> str:
    if not row.bound or not row.seconds:
        return "-"
    return f"{row.bound / row.seconds:.0%} {row.limit}"


def _collectives(profile: Summary) -> Iterator[str]:
    rows = [
        (
            row.kind,
            " x ".join(row.axes),
            f"{row.times:,.0f}",
            bytes_text(row.bytes),
            _ms(row.seconds),
            _ms(row.exposed),
            f"{row.exposed / row.seconds:.0%}" if row.seconds else "-",
        )
        for row in profile.collectives[:SHOWN]
    ]
    if rows:
        header = ("collective", "over", "times", "sent by a device", "ms/step", "exposed", "")
        yield table("llrrrrr", rows, header)


def _host(profile: Summary) -> Iterator[str]:
    if profile.host:
        rows = [(name, _ms(seconds)) for name, seconds in profile.host.items()]
        yield table("lr", rows, ("the host's loop", "ms/step"))


def _memory(profile: Summary) -> Iterator[str]:
    if not profile.memory:
        return
    of = f" of {bytes_text(profile.usable)}" if profile.usable else ""
    peak = f"; the device reports {bytes_text(profile.peak)}" if profile.peak else ""
    yield f"memory of one device: a step needs {bytes_text(profile.memory['needed'])}{of}{peak}"
    parts = ((name, size) for name, size in profile.memory.items() if name != "needed" and size)
    yield "  " + ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
    if profile.buffers:
        yield f"its largest buffers{'' if profile.buffers[0].exact else FROM_TEXT}"
        rows = [
            (bytes_text(row.bytes), row.kind, _name(row.op_name or row.name), _short(row.source))
            for row in profile.buffers
        ]
        yield table("rlll", rows)


def _short(source: str) -> str:
    return re.sub(".*/maxstack/", "maxstack/", source)


def _name(name: str) -> str:
    return name if len(name) <= 70 else f"...{name[-67:]}"


def _by_line(profile: Summary) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for row in profile.lines:
        name = _short(row.source) or "unknown"
        sums[name] = sums.get(name, 0.0) + row.seconds
    return sums


def _by_collective(profile: Summary) -> Mapping[str, float]:
    return {f"{row.kind} over {' x '.join(row.axes)}": row.seconds for row in profile.collectives}


def _side_by_side(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Format a table of both, with the largest changes first unless it has no name."""
    names = dict.fromkeys([*before, *after])
    order: Iterable[str] = names
    if name:
        # By absolute change: what became slower and what became faster matter alike.
        order = sorted(names, key=lambda key: -abs(after.get(key, 0.0) - before.get(key, 0.0)))
    rows = [_both(key, before.get(key), after.get(key)) for key in [*order][:SHOWN]]
    return table("lrrrr", rows, (name or "ms/step", "A", "B", "B - A", ""))


def _both(name: str, before: float | None, after: float | None) -> Sequence[str]:
    change = (after or 0.0) - (before or 0.0)
    ratio = f"{change / before:+.0%}" if before else ""
    shown = ["-" if seconds is None else _ms(seconds) for seconds in (before, after)]
    return name, *shown, f"{change * 1e3:+,.2f}", ratio


def _memories(before: Summary, after: Summary) -> str:
    needed = [bytes_text(each.memory["needed"]) if each.memory else "?" for each in (before, after)]
    return f"memory of one device: {needed[0]} and {needed[1]}"
