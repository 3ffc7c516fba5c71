"""Traces in the format of XLA's xplane.proto, made by hand: for devices that are not here."""

import dataclasses
from collections.abc import Mapping, Sequence

Value = int | float | str


@dataclasses.dataclass(frozen=True)
class Event:
    """One event of a line, in microseconds."""

    name: str
    begin: float
    length: float
    stats: Mapping[str, Value] = dataclasses.field(default_factory=dict)


def xspace(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> bytes:
    """XSpace of planes by name, each of lines by name."""
    return b"".join(_message(1, _plane(name, lines)) for name, lines in planes.items())


def _plane(name: str, lines: Mapping[str, Sequence[Event]]) -> bytes:
    events: dict[str, int] = {}
    stats: dict[str, int] = {}
    body = _text(2, name)
    for number, (line, rows) in enumerate(lines.items()):
        inner = _number(1, number + 1) + _text(2, line)
        for row in rows:
            event = _number(1, events.setdefault(row.name, len(events) + 1))
            event += _number(2, round(row.begin * 1e6)) + _number(3, round(row.length * 1e6))
            for key, value in row.stats.items():
                stat = _number(1, stats.setdefault(key, len(stats) + 1))
                stat += _number(4, value) if isinstance(value, int) else _text(5, str(value))
                event += _message(4, stat)
            inner += _message(4, event)
        body += _message(3, inner)
    for field, names in ((4, events), (5, stats)):
        for text, number in names.items():
            metadata = _number(1, number) + _text(2, text)
            body += _message(field, _number(1, number) + _message(2, metadata))
    return body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
