"""Two-way tables between config.json and a model's configuration. A table has the shape of the
model's mapping; its leaves are constants, which must hold both ways, and entries, which know how to
read a value from config.json and how to write it there."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from maxstack.config import ConfigError, did_you_mean, quoted

Values = dict[str, Any]
_MISSING = object()


class Mismatch(ValueError):
    """A model that a table cannot say."""


class Source:
    """A config.json that is being read; remembers what was."""

    def __init__(self, config: Mapping[str, Any], where: str, mtp: int | None = 0):
        self._config, self.where, self.used = config, where, set[str]()
        self.mtp = mtp
        """How many modules of multi-token prediction the tensors hold; None where they are not
        known."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the default where the key is absent."""
        self.used.add(key)
        return self._config.get(key, default)

    def need(self, key: str) -> Any:
        """The value; ConfigError where there is none."""
        value = self.get(key)
        if value is None:
            raise ConfigError(
                f"{self.where}: key {key} is missing{did_you_mean(key, self._config)}"
            )
        return value

    def fail(self, key: str, message: str) -> ConfigError:
        """The error about a value."""
        return ConfigError(f"{self.where}: {key}={quoted(self._config.get(key))}: {message}")


class Sink(Values):
    """A config.json that is being written; a key keeps its first value."""

    def put(self, key: str, value: Any) -> None:
        """Set a key; Mismatch where it already says something else."""
        if key in self and not same(self[key], value):
            raise Mismatch(f"{key} would have to be both {quoted(self[key])} and {quoted(value)}")
        self[key] = value


class Entry(Protocol):
    """A leaf of a table that stands for keys of config.json."""

    def read(self, source: Source) -> Any:
        """The model's value."""

    def write(self, value: Any, sink: Sink) -> None:
        """Put the keys that say `value`; Mismatch where none can."""


class Key:
    """The value of one key. `default` (a value, or a function of the source) stands for an absent
    key and, unless `null` is a value, for null; keys in `also` are written with the same value."""

    def __init__(
        self,
        name: str,
        default: Any = _MISSING,
        *,
        words: Mapping[Any, Any] | None = None,
        null: bool = False,
        also: Sequence[str] = (),
        to: Callable[[Any], Any] = lambda value: value,
        back: Callable[[Any], Any] = lambda value: value,
    ):
        self.name, self.default, self.words, self.null, self.also, self.to, self.back = (
            name,
            default,
            words,
            null,
            also,
            to,
            back,
        )

    def read(self, source: Source) -> Any:
        source.used |= {*self.also}
        value = source.get(self.name, _MISSING)
        if value is _MISSING or (value is None and not self.null):
            if self.default is _MISSING:
                return source.need(self.name)
            value = self.default(source) if callable(self.default) else self.default
        if self.words is not None:
            if not isinstance(value, str | bool) or value not in self.words:
                raise source.fail(
                    self.name, f"not supported; supported: {', '.join(map(str, self.words))}"
                )
            return self.words[value]
        return value if value is None else self.to(value)

    def write(self, value: Any, sink: Sink) -> None:
        for name in self.also:
            sink.put(name, value)
        if self.words is not None:
            found = [word for word, meaning in self.words.items() if meaning == value]
            if not found:
                raise Mismatch(f"{self.name} cannot say {quoted(value)}")
            sink.put(self.name, found[0])
        elif value is None and self.default not in (None, _MISSING) and not self.null:
            raise Mismatch(f"{self.name} cannot be null")
        elif value is None and self.default is _MISSING:
            raise Mismatch(f"{self.name} is needed")
        else:
            sink.put(self.name, value if value is None else self.back(value))


class Derived:
    """A value that follows from keys that other entries write; checked by reading back what was
    written."""

    def __init__(self, of: Callable[[Source], Any]):
        self.of = of

    def read(self, source: Source) -> Any:
        return self.of(source)

    def write(self, value: Any, sink: Sink) -> None:
        pass


class Case:
    """One of several tables, chosen by a key's value."""

    def __init__(self, key: str, tables: Mapping[Any, Any], default: Any = _MISSING):
        self.key, self.tables, self.default = key, tables, default

    def read(self, source: Source) -> Any:
        value = (
            source.need(self.key)
            if self.default is _MISSING
            else source.get(self.key, self.default)
        )
        if value not in self.tables:
            raise source.fail(
                self.key, f"not supported; supported: {', '.join(map(str, self.tables))}"
            )
        return read(self.tables[value], source)

    def write(self, value: Any, sink: Sink) -> None:
        for word, table in self.tables.items():
            trial = Sink(sink)
            try:
                write(table, value, trial)
                trial.put(self.key, word)
            except Mismatch:
                continue
            sink.update(trial)
            return
        raise Mismatch(f"no value of {self.key} says {quoted(value)}")


class Optional:
    """A table where a key is set, null where it is null, 0 or absent."""

    def __init__(self, key: str, table: Any, off: Any = None):
        self.key, self.table, self.off = key, table, off

    def read(self, source: Source) -> Any:
        return read(self.table, source) if source.get(self.key) else None

    def write(self, value: Any, sink: Sink) -> None:
        if value is None:
            sink.put(self.key, self.off)
        else:
            write(self.table, value, sink)


def read(table: Any, source: Source) -> Any:
    """The model's values that a table finds in a config.json."""
    if isinstance(table, Mapping):
        return {key: read(value, source) for key, value in table.items()}
    return table.read(source) if hasattr(table, "read") else table


def write(table: Any, value: Any, sink: Sink) -> None:
    """Put what says `value`; Mismatch where the table cannot."""
    if isinstance(table, Mapping):
        if not isinstance(value, Mapping):
            raise Mismatch(f"{quoted(value)} where there is a mapping")
        for key, inner in table.items():
            try:
                write(inner, value.get(key), sink)
            except Mismatch as error:
                raise Mismatch(f"{key}: {error}") from None
    elif hasattr(table, "write"):
        table.write(value, sink)
    elif not same(table, value):
        raise Mismatch(f"{quoted(value)} instead of {quoted(table)}")


def same(one: Any, other: Any) -> bool:
    """Equal, numbers up to rounding."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if (
        isinstance(one, Sequence)
        and isinstance(other, Sequence)
        and not isinstance(one, str)
        and not isinstance(other, str)
    ):
        return len(one) == len(other) and all(map(same, one, other))
    if (
        isinstance(one, bool)
        or isinstance(other, bool)
        or not isinstance(one, int | float)
        or not isinstance(other, int | float)
    ):
        return type(one) is type(other) and one == other
    return math.isclose(one, other, rel_tol=1e-6)
