"""Parameters by their paths: what is known about each, patterns that select them, and which of
their axes form a matrix."""

import dataclasses
import fnmatch
from typing import Any

from maxstack.config import ConfigError, did_you_mean, fault, nearest, quoted

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
    """Path of the model's weight for which it is kept, in low precision or as an adapter; None: it
    is that weight."""

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
        found: list[tuple[int, ...]] = []
        for i in range(len(self.stacked), len(self.axes)):
            if found and self.axes[i] == "head_dim" and self.axes[i - 1] in HEADS:
                found[-1] = (*found[-1], i)
            else:
                found.append((i,))
        return tuple(found)

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
    """One entry of a pattern list: a glob over the path, negated by a leading `!`, and the number
    of dimensions if that matters."""

    path: str
    ndim: int | None = None
    optional: bool = False

    @property
    def excludes(self) -> bool:
        return self.path.startswith("!")

    def names(self, path: str, info: ParamInfo) -> bool:
        """Whether the path fits the glob (without its `!`), or that of the model's weight for which
        the parameter is kept."""
        return any(
            fnmatch.fnmatchcase(name, self.path.removeprefix("!"))
            for name in (path, info.weight)
            if name is not None
        )

    def matches(self, path: str, info: ParamInfo) -> bool:
        """Whether the path fits, and the dimensions."""
        return self.names(path, info) and self.ndim in (None, info.ndim)


def check_selectors(value: Any, key: str) -> tuple[Selector, ...]:
    """The pattern list that a configuration holds at `key`, or an error that says how to write
    one."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise fault(
            key,
            f"got {quoted(value)}; write a list of patterns over parameter paths, such "
            "as ['blocks/*'] or "
            "[{path: 'blocks/*', ndim: 2}]",
        )
    found = tuple(_selector(entry, f"{key}.{i}") for i, entry in enumerate(value))
    if all(selector.excludes for selector in found):
        raise fault(
            key,
            "selects nothing: at least one pattern must not start with '!'; write ['*', "
            "'!embed/*'] for all but the embedding",
        )
    return found


def selected(selectors: tuple[Selector, ...], path: str, info: ParamInfo) -> bool:
    """Whether some pattern matches and none that starts with `!` does."""
    return any(
        selector.matches(path, info) for selector in selectors if not selector.excludes
    ) and not any(selector.matches(path, info) for selector in selectors if selector.excludes)


def check_matches(selectors: tuple[Selector, ...], params: dict[str, ParamInfo], key: str) -> None:
    """Refuses a pattern that matches no parameter, and names the nearest paths."""
    for i, selector in enumerate(selectors):
        if selector.optional or any(selector.matches(path, info) for path, info in params.items()):
            continue
        of_any_rank = sorted(
            {info.ndim for path, info in params.items() if selector.names(path, info)}
        )
        if of_any_rank:
            hint = (
                f"parameters on that path have ndim {', '.join(map(str, of_any_rank))} "
                "(layers do not count, heads x head_dim count as one)"
            )
        else:
            paths = {info.weight or path for path, info in params.items()}
            hint = "nearest paths: " + ", ".join(
                nearest(selector.path.removeprefix("!"), paths, 3) or sorted(paths)[:3]
            )
        wanted = f"{selector.path!r}" + (
            f" with ndim {selector.ndim}" if selector.ndim is not None else ""
        )
        raise ConfigError(
            f"optimizer.{key}.{i}: {wanted} matches no parameter; {hint}; to allow that, "
            f"write {{path: ..., optional: true}}"
        )


def _selector(entry: Any, key: str) -> Selector:
    if isinstance(entry, str):
        return Selector(entry)
    if not isinstance(entry, dict):
        raise fault(
            key,
            f"got {quoted(entry)}; a pattern is text, or a mapping with path, ndim and optional",
        )
    kinds: dict[str, type] = {"path": str, "ndim": int, "optional": bool}
    wanted = {"path": "text", "ndim": "a whole number", "optional": "true or false"}
    for name, value in entry.items():
        if name not in kinds:
            raise fault(
                f"{key}.{name}",
                f"unknown key {quoted(name)}; a pattern has path, ndim and "
                f"optional{did_you_mean(name, kinds)}",
            )
        if type(value) is not kinds[name]:
            raise fault(f"{key}.{name}", f"got {quoted(value)}, wanted {wanted[name]}")
    return Selector(**{"path": "*", **entry})
