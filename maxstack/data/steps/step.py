"""A step of data.steps: a function of one document's text."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from maxstack.errors import ConfigError, installing
from maxstack.schema.steps import Step as StepConfig

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
TENTHS = 20
_WORDS = re.compile(r"[^\W_]+")


class Removed(NamedTuple):
    """Why a document goes."""

    rule: str
    """The key of the rule that it breaks."""
    value: Any
    """What the rule measured."""


class Step(ABC):
    """What one document's text becomes."""

    @abstractmethod
    def __call__(self, text: str) -> str | Removed:
        """The text, changed or not, or why it is removed."""


Opener = Callable[..., Step]
KINDS: dict[type[StepConfig], Opener] = {}
"""What opens a step, by its section. It takes the section, and data where the driver read some."""
Class = TypeVar("Class", bound=Opener)


def kind(section: type[StepConfig]) -> Callable[[Class], Class]:
    """Declares the class of a kind of step."""

    def declare(opener: Class) -> Class:
        KINDS[section] = opener
        return opener

    return declare


class Rules(Step):
    """A step whose rules are measured one after the other; the first that is broken removes the
    document. A key that begins with min_ is a lower bound, any other an upper one."""

    def __init__(self, cfg: StepConfig):
        self.cfg = cfg
        self.near: dict[str, list[int]] = {}
        """By rule, documents by tenths of what was measured over the bound; the last: 1.9 and
        more."""

    @abstractmethod
    def measured(self, text: str) -> Iterator[tuple[str, float]]:
        """(key of the section, value) of each rule."""

    def __call__(self, text: str) -> str | Removed:
        for rule, value in self.measured(text):
            bound = getattr(self.cfg, rule)
            if not bound and bound != 0:
                continue
            if bound:
                counts = self.near.setdefault(rule, [0] * TENTHS)
                counts[min(int(10 * value / bound), TENTHS - 1)] += 1
            if value < bound if rule.startswith("min") else value > bound:
                return Removed(rule, round(value, 4))
        return text


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, in lower case."""
    return _WORDS.findall(text.lower())


def hashes_of(units: list[str]) -> np.ndarray:
    """uint64 [N]: a hash of each unit, the same on every machine."""
    encoded = (unit.encode(errors="surrogatepass") for unit in units)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(units))


def ngrams(hashes: np.ndarray, size: int) -> np.ndarray:
    """uint64 [N - size + 1]: a hash of each run of `size` units; none where there are fewer."""
    count = len(hashes) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    made = np.zeros(count, np.uint64)
    for at in range(size):
        made = (made ^ (made >> np.uint64(29))) * _MULTIPLIER + hashes[at : at + count]
    return made ^ (made >> np.uint64(32))


def missing(package: str, step: str, error: ImportError) -> ConfigError:
    """The error where an optional package is not installed."""
    return ConfigError(
        f"data.steps: {step} needs the {package} package: {installing('clean')} ({error})"
    )


def unreadable(key: str, path: str, error: OSError | UnicodeDecodeError) -> ConfigError:
    """The error where a file that a step names cannot be read."""
    why = error.strerror if isinstance(error, OSError) else "not UTF-8"
    return ConfigError(f"data.steps: {key}: {path}: {why or error}")
