"""Two-way tables between config.json and a model's configuration.

A table has the structure of the model's mapping. Its leaves are constants, which must hold both
ways, and entries, which read a value from config.json and write it there: one declaration gives
import and export. Reading remembers which keys were used, so that unknown ones can be refused;
writing raises Mismatch with the path of the value that the table cannot express.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError, quoted

_MISSING = object()


class Mismatch(ValueError):
    """A model that a table cannot express."""


class Source:
    """A config.json that is read; remembers the keys that were used."""

    def __init__(self, config: Mapping[str, Any], where: str, mtp: int | None = 0):
        self._config, self.where = config, where
        self.used = set[str]()
        self.mtp = mtp
        """Number of modules of multi-token prediction among the tensors; None: unknown."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or the default where the key is absent."""
        self.used.add(key)
        return self._config.get(key, default)

    def need(self, key: str) -> Any:
        """Return the value; ConfigError where there is none."""
        value = self.get(key, _MISSING)
        if value is _MISSING:
            said = f"is missing{did_you_mean(key, self._config)}"
        elif value is None:
            said = "is null, and the model needs its value"
        else:
            return value
        raise ConfigError(f"{self.where}: key {key} {said}")

    def choose(self, key: str, value: Any, choices: Mapping[Any, Any]) -> Any:
        """Return the choice that a key's value names; ConfigError where it names none."""
        if not isinstance(value, Hashable) or value not in choices:
            supported = ", ".join(map(str, choices))
            raise self.fail(key, f"not supported; supported: {supported}")
        return choices[value]

    def fail(self, key: str, message: str) -> ConfigError:
        """Return an error about a value."""
        return ConfigError(f"{self.where}: {key}={quoted(self._config.get(key))}: {message}")


# Blocks of several kinds write the same keys; where they disagree, the family cannot express the
# model.
class Sink(dict[str, Any]):
    """A config.json that is written; a key keeps its first value."""

    def put(self, key: str, value: Any) -> None:
        """Set a key; Mismatch where it has another value."""
        if key in self and not same(self[key], value):
            raise Mismatch(f"{key} would have to be both {quoted(self[key])} and {quoted(value)}")
        self[key] = value


class Entry(Protocol):
    """A leaf of a table that stands for keys of config.json."""

    def read(self, source: Source) -> Any:
        """Return the model's value."""

    def write(self, value: Any, sink: Sink) -> None:
        """Put the keys that express `value`; Mismatch where none do."""


@dataclasses.dataclass(frozen=True)
class Key:
    """The value of one key."""

    name: str
    default: Any = _MISSING
    """The value, or a function of the source, for an absent key, and for null unless `null` is a
    value."""
    _: dataclasses.KW_ONLY
    absent: Any = _MISSING
    """Value of an absent key where null means another one: a default of transformers."""
    other: str = ""
    """Another spelling of the name."""
    words: Mapping[Any, Any] | None = None
    """Their value -> ours."""
    null: bool = False
    also: Sequence[str] = ()
    """Further keys with the same value."""
    to: Callable[[Any], Any] = lambda value: value
    """Converts their value to ours."""
    back: Callable[[Any], Any] = lambda value: value

    def read(self, source: Source) -> Any:
        # Known, though the values are not compared: the first key decides.
        source.used |= {*self.also}
        value = source.get(self.name, self.absent)
        # A file may hold both spellings; two different values leave open which one was trained.
        if self.other and (second := source.get(self.other)) is not None:
            if value not in (_MISSING, None, second):
                raise source.fail(
                    self.name, f"{self.other} says {second}; leave out the one that is wrong"
                )
            value = second
        # transformers takes the default of its class for an absent key; null may mean something
        # else there, hence `absent`, `default` and `null`.
        if value is _MISSING or (value is None and not self.null):
            if self.default is _MISSING:
                return source.need(self.name)
            value = self.default(source) if callable(self.default) else self.default
        if self.words is not None:
            return source.choose(self.name, value, self.words)
        return value if value is None else self.to(value)

    def write(self, value: Any, sink: Sink) -> None:
        for name in self.also:
            sink.put(name, value)
        if self.words is not None:
            # The first word of a meaning is written: silu, not swish.
            for word, meaning in self.words.items():
                if meaning == value:
                    sink.put(self.name, word)
                    return
            raise Mismatch(f"{self.name} cannot say {quoted(value)}")
        if value is None and self.default is _MISSING and not self.null:
            raise Mismatch(f"{self.name} is needed")
        # Reading null would give the default, not None.
        if value is None and self.default is not None and not self.null:
            raise Mismatch(f"{self.name} cannot be null")
        sink.put(self.name, value if value is None else self.back(value))


@dataclasses.dataclass(frozen=True)
# Writing has nothing to do: Family.write reads its file back and compares.
class Derived:
    """A value that follows from keys of other entries; reading back what was written checks it."""

    read: Callable[[Source], Any]

    def write(self, value: Any, sink: Sink) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Case:
    """One of several tables, by a key's value."""

    key: str
    tables: Mapping[Any, Any]
    default: Any = _MISSING

    def read(self, source: Source) -> Any:
        value = (
            source.need(self.key)
            if self.default is _MISSING
            else source.get(self.key, self.default)
        )
        return read(source.choose(self.key, value, self.tables), source)

    def write(self, value: Any, sink: Sink) -> None:
        write_first(self.tables, value, sink, self.key)


@dataclasses.dataclass(frozen=True)
class Optional:
    """A table where a key has a value, None where it is null or 0. An absent key is refused."""

    key: str
    table: Any
    off: Any = None

    def read(self, source: Source) -> Any:
        # An absent key means the default of a class of transformers, which differs from null.
        set_ = source.get(self.key, _MISSING)
        if set_ is _MISSING:
            source.need(self.key)
        return read(self.table, source) if set_ else None

    def write(self, value: Any, sink: Sink) -> None:
        if value is None:
            sink.put(self.key, self.off)
        else:
            write(self.table, value, sink)


def read(table: Any, source: Source) -> Any:
    """Return the model's values that a table reads from a config.json."""
    if isinstance(table, Mapping):
        return {key: read(value, source) for key, value in table.items()}
    return table.read(source) if hasattr(table, "read") else table


def keys(table: Any) -> set[str]:
    """Return the names of all keys in a table, also of cases that were not chosen."""
    found: set[str] = set()
    if isinstance(table, Key):
        found |= {table.name, *table.also, *filter(None, [table.other])}
    # A key of a case that was not chosen changes nothing, so it is known and not refused.
    elif isinstance(table, Case | Optional):
        found.add(table.key)
    if isinstance(table, Mapping):
        parts = [*table.values()]
    elif isinstance(table, list | tuple):
        parts = [*table]
    else:
        parts = [*vars(table).values()] if hasattr(table, "__dict__") else []
    for part in parts:
        # Functions among the fields (`to`, `default`) hold no entries.
        if not callable(part):
            found |= keys(part)
    return found


def write(table: Any, value: Any, sink: Sink) -> None:
    """Put the keys that express `value`; Mismatch where the table cannot express it."""
    if isinstance(table, Mapping):
        if not isinstance(value, Mapping):
            raise Mismatch(f"{quoted(value)} where there is a mapping")
        # Keys of the value that the table lacks are found by Family.write, which reads back.
        for key, inner in table.items():
            try:
                write(inner, value.get(key), sink)
            except Mismatch as error:
                raise Mismatch(f"{key}: {error}") from None
    elif hasattr(table, "write"):
        table.write(value, sink)
    elif not same(table, value):
        raise Mismatch(f"{quoted(value)} instead of {quoted(table)}")


def write_first(tables: Mapping[Any, Any], value: Any, sink: Sink, key: str | None = None) -> Any:
    """Put the keys of the first table that expresses `value`, and its name under `key`; return the
    name. Mismatch with all reasons where none does."""
    reasons = []
    for name, table in tables.items():
        # A copy, since a table that fails halfway would leave its keys behind.
        trial = Sink(sink)
        try:
            write(table, value, trial)
            if key:
                trial.put(key, name)
        except Mismatch as error:
            reasons.append(str(error))
            continue
        sink.update(trial)
        return name
    raise Mismatch("; ".join(dict.fromkeys(reasons)))


def same(first: Any, second: Any) -> bool:
    """Return True where two values are equal, numbers up to rounding."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    # Not isinstance: True would equal 1. Conversions (scale to scalar and back) round.
    if type(first) in (int, float) and type(second) in (int, float):
        return math.isclose(first, second, rel_tol=1e-6)
    return type(first) is type(second) and first == second
