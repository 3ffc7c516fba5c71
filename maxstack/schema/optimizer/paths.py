"""Parameters by their paths: their shapes and axes, patterns that select them, and the axes that
form a matrix."""

import dataclasses
import fnmatch
from typing import Any

from maxstack.config import fault
from maxstack.config.spelling import did_you_mean, nearest
from maxstack.errors import ConfigError, quoted

STACKED = ("layers", "expert")
HEADS = ("heads", "kv_heads")


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape, dtype and logical axes of a parameter; a leaf of the tree that has the parameters'
    structure."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    carried: bool = False
    """Updated by a rule of the model, never by the optimizer."""
    frozen: bool = False
    """Never updated: it is kept in low precision, adapters are trained in its place, or the loss
    does not depend on it."""
    weight: str | None = None
    """Path of the model's weight that it stands for, in low precision or as an adapter; None: it is
    that weight."""

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), (self.axes, self.shape)
        assert all(axis not in STACKED for axis in self.axes[len(self.stacked) :]), (
            f"stacked axes lead: {self.axes}"
        )

    @property
    def stacked(self) -> tuple[int, ...]:
        """Sizes of the leading axes along which independent tensors lie: layers, then experts."""
        count = next((i for i, axis in enumerate(self.axes) if axis not in STACKED), len(self.axes))
        return self.shape[:count]

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """The axes of one tensor, heads taken together with head_dim: a matrix has two factors, a
        scale or a bias one."""
        factors: list[tuple[int, ...]] = []
        for i in range(len(self.stacked), len(self.axes)):
            if factors and self.axes[i] == "head_dim" and self.axes[i - 1] in HEADS:
                factors[-1] = (*factors[-1], i)
            else:
                factors.append((i,))
        return tuple(factors)

    @property
    def ndim(self) -> int:
        """Dimensions of one tensor: neither layers nor experts count, and heads x head_dim count as
        one."""
        return len(self.factors)

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Axes that are reduced and axes that come out of x @ W, when this is a matrix; of more
        than two dimensions, all but the last are reduced."""
        if self.ndim < 2:
            return None
        return tuple(axis for factor in self.factors[:-1] for axis in factor), self.factors[-1]


@dataclasses.dataclass(frozen=True)
class Selector:
    """A pattern of a list: a glob over the path, negated by a leading `!`, and the number of
    dimensions if that matters."""

    path: str
    ndim: int | None = None
    optional: bool = False

    @property
    def excludes(self) -> bool:
        """True for a negated pattern."""
        return self.path.startswith("!")

    @property
    def glob(self) -> str:
        """The pattern without its `!`."""
        return self.path.removeprefix("!")

    def matches_path(self, path: str, info: ParamInfo) -> bool:
        """True if the glob fits the path, or that of the model's weight that the parameter stands
        for."""
        return any(fnmatch.fnmatchcase(name, self.glob) for name in (path, info.weight or path))

    def matches(self, path: str, info: ParamInfo) -> bool:
        """True if the glob and the dimensions fit."""
        return self.matches_path(path, info) and self.ndim in (None, info.ndim)


def check_selectors(value: Any, key: str) -> tuple[Selector, ...]:
    """The pattern list that a configuration holds at `key`, or a fault that says how to write
    one."""
    if not isinstance(value, list | tuple):
        raise fault(
            key,
            f"got {quoted(value)}; write a list of patterns over parameter paths, such "
            "as ['blocks/*'] or [{path: 'blocks/*', ndim: 2}]",
        )
    selectors = tuple(_selector(entry, f"{key}.{i}") for i, entry in enumerate(value))
    if all(selector.excludes for selector in selectors):
        raise fault(
            key,
            "selects nothing: at least one pattern must not start with '!'; write ['*', "
            "'!embed/*'] for all but the embedding",
        )
    return selectors


def selected(selectors: tuple[Selector, ...], path: str, info: ParamInfo) -> bool:
    """True if some pattern matches and none that starts with `!` does."""
    matching = [selector for selector in selectors if selector.matches(path, info)]
    return bool(matching) and not any(selector.excludes for selector in matching)


def check_matches(selectors: tuple[Selector, ...], params: dict[str, ParamInfo], key: str) -> None:
    """Refuses a pattern that matches no parameter, and names the nearest paths."""
    for i, selector in enumerate(selectors):
        if selector.optional or any(selector.matches(path, info) for path, info in params.items()):
            continue
        ranks = sorted(
            {info.ndim for path, info in params.items() if selector.matches_path(path, info)}
        )
        if ranks:
            hint = (
                f"parameters on that path have ndim {', '.join(map(str, ranks))} "
                "(layers do not count, heads x head_dim count as one)"
            )
        else:
            paths = sorted({info.weight or path for path, info in params.items()})
            hint = "nearest paths: " + ", ".join(nearest(selector.glob, paths, 3) or paths[:3])
        ndim = "" if selector.ndim is None else f" with ndim {selector.ndim}"
        raise ConfigError(
            f"optimizer.{key}.{i}: {selector.path!r}{ndim} matches no parameter; {hint}; to allow "
            "that, write {path: ..., optional: true}"
        )


def _selector(entry: Any, key: str) -> Selector:
    if isinstance(entry, str):
        return Selector(entry)
    if not isinstance(entry, dict):
        raise fault(
            key,
            f"got {quoted(entry)}; a pattern is text, or a mapping with path, ndim and optional",
        )
    sorts: dict[str, tuple[type, str]] = {
        "path": (str, "text"),
        "ndim": (int, "a whole number"),
        "optional": (bool, "true or false"),
    }
    for name, value in entry.items():
        if name not in sorts:
            raise fault(
                f"{key}.{name}",
                f"unknown key {quoted(name)}; a pattern has path, ndim and "
                f"optional{did_you_mean(name, sorts)}",
            )
        kind, wanted = sorts[name]
        if type(value) is not kind:
            raise fault(f"{key}.{name}", f"got {quoted(value)}, wanted {wanted}")
    return Selector(**{"path": "*", **entry})
