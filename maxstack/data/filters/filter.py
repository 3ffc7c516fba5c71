"""A filter of data.steps: a function of one document's text that keeps, changes or removes it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from maxstack.config import storage
from maxstack.errors import ConfigError, installing
from maxstack.schema.filters import Filter as FilterConfig

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_WORDS = re.compile(r"[^\W_]+")


class Removed(NamedTuple):
    """The reason for removing a document."""

    rule: str
    """The key of the rule that it breaks."""
    value: Any
    """The value that was measured."""


class Filter(ABC):
    """A function of one document's text."""

    @abstractmethod
    def __call__(self, text: str) -> str | Removed:
        """Return the text, changed or not, or the reason for its removal."""


Opener = Callable[..., Filter]
KINDS: dict[type[FilterConfig], Opener] = {}
"""The class of a filter by the class of its section. It takes the section, and the data that the
main process read for it, if any."""
Class = TypeVar("Class", bound=Opener)


def kind(section: type[FilterConfig]) -> Callable[[Class], Class]:
    """Register the class of the filters of a section."""

    def declare(opener: Class) -> Class:
        KINDS[section] = opener
        return opener

    return declare


class Rules(Filter):
    """A filter that measures a text rule by rule; the first rule that is broken removes the
    document. A key that begins with min_ is a lower bound, any other an upper one."""

    def __init__(self, cfg: FilterConfig):
        self.cfg = cfg

    @abstractmethod
    def measure(self, text: str) -> Iterator[tuple[str, float]]:
        """Yield (key of the section, value) of each rule."""

    def __call__(self, text: str) -> str | Removed:
        for rule, value in self.measure(text):
            bound = getattr(self.cfg, rule)
            if bound is None:
                continue
            broken = value < bound if rule.startswith("min") else value > bound
            if broken:
                return Removed(rule, round(value, 4))
        return text


def split_words(text: str) -> list[str]:
    """Return the runs of letters and digits, in lower case."""
    return _WORDS.findall(text.lower())


def hash_units(units: list[str]) -> np.ndarray:
    """Return a hash of each unit, the same on every machine: uint64 [N]."""
    # Not hash(), which is seeded anew in each process.
    encoded = (unit.encode(errors="surrogatepass") for unit in units)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(units))


def ngrams(hashes: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each run of `size` units: uint64 [N - size + 1], or none if N is less."""
    count = len(hashes) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    made = np.zeros(count, np.uint64)
    for at in range(size):
        # The shift and the product make the order of units count; products wrap at 64 bits on
        # purpose.
        made = (made ^ (made >> np.uint64(29))) * _MULTIPLIER + hashes[at : at + count]
    return made ^ (made >> np.uint64(32))


def missing_package(package: str, key: str, error: ImportError) -> ConfigError:
    """Return the error for an optional package that is not installed."""
    return ConfigError(
        f"data.steps: {key} needs the {package} package: {installing('clean')} ({error})"
    )


def read_lines(key: str, path: str, largest: int) -> list[str]:
    """Read the lines of a file that a key of a filter names. ConfigError if that fails."""
    try:
        return storage.read_whole(path, largest).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"data.steps: {key}: {path}: {why or error}") from error
