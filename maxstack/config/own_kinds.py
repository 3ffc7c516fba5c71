"""Kinds that users write: where a file says `kind: module:Name`, or a short name that an installed
package gives it, that section joins the ones that maxstack has.

Modules are imported here alone, for names in a configuration that whoever loads it trusts."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import operator
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic

from maxstack.config.reader import Node
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError, shortened

GROUP = "maxstack.kinds"
"""Entry points of packages whose names stand for kinds."""
NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
Base = TypeVar("Base", bound="Kind")
OwnName = Annotated[str, pydantic.Field(pattern=rf"^{NAME.pattern}$")]
"""A name of code."""
_FOUND: dict[str, type["Kind"]] = {}
_LOCK = threading.Lock()


class Kind(pydantic.BaseModel):
    """Base of sections from which users derive kinds of their own: a class outside maxstack that
    declares no `kind` gets `module:Name` as one."""

    PLACES: ClassVar[tuple[str, ...]] = ()
    """Class variables that hold module:class. A name without a module is one of the section's
    module."""

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        for key in cls.PLACES:
            if (place := cls.__dict__.get(key)) and ":" not in place:
                setattr(cls, key, f"{cls.__module__}:{place}")
        own = cls.__dict__.get("__annotations__", {})
        if cls.__module__.partition(".")[0] != "maxstack" and "kind" not in own:
            tag = f"{cls.__module__}:{cls.__qualname__}"
            cls.__annotations__ = {"kind": Literal[tag], **own}
            cls.kind = tag  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Open:
    """Marks a union that is told apart by `kind`; users' sections that derive from `base` join
    it."""

    base: type[Kind]
    discriminator: str = "kind"

    @property
    def joined(self) -> list[type[Kind]]:
        """Users' sections."""
        return joined(self.base)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        every: Any = functools.reduce(operator.or_, self.joined, source)
        tagged: Any = Annotated[every, pydantic.Field(discriminator=self.discriminator)]
        return handler.generate_schema(tagged)


def joined(base: type[Base]) -> list[type[Base]]:
    """Users' sections that derive from `base`."""
    return [each for each in _FOUND.values() if issubclass(each, base)]


def _check_places(name: str, kind: type[Kind]) -> None:
    """ConfigError where a section does not say what it is the section of."""
    for key in kind.PLACES:
        place = getattr(kind, key, "")
        if not place:
            raise ConfigError(f"{name}: declares no {key} (docs/EXTENDING.md)")
        if place.partition(":")[0] == kind.__module__:
            resolve(place)


def imported(name: str, base: type[Base]) -> type[Base] | None:
    """The user's section `name`, where a configuration has imported it, in this process or in the
    one that this one works for; None for others."""
    is_known = name in _FOUND or name.partition(":")[0] in sys.modules
    found = resolve(name, Kind) if is_known else None
    return found if found and issubclass(found, base) else None


def import_kinds(tree: Node) -> Node:
    """Import the kinds of their own that a merged tree names. ConfigError names the place of one
    that cannot be."""
    found = dict[str, type[Kind]]()
    for key, node in _kinds(tree):
        name = str(node.value)
        try:
            found[name] = resolve(name, Kind)
            _check_places(name, found[name])
        except ConfigError as error:
            raise ConfigError(f"{node.where}: {key}: {error}") from error
    with _LOCK:
        # A cell that runs again makes another class of the same name.
        if new := {name: each for name, each in found.items() if _FOUND.get(name) is not each}:
            _FOUND.update(new)
            _rebuild()
    return tree


def with_full_names(tree: Node, known: Mapping[str, str] | None = None) -> Node:
    """The tree with module:Name in place of the short names that installed packages give kinds."""
    known = _short_names() if known is None else known
    if isinstance(tree.value, list):
        items = [with_full_names(item, known) for item in tree.value]
        return dataclasses.replace(tree, value=items) if items != tree.value else tree
    entries = {key: with_full_names(item, known) for key, item in (tree.mapping or {}).items()}
    kind = entries.get("kind")
    if kind and isinstance(kind.value, str) and kind.value in known:
        entries["kind"] = dataclasses.replace(kind, value=known[kind.value])
    return dataclasses.replace(tree, value=entries) if entries != (tree.mapping or {}) else tree


def resolve(name: str, base: type | None = None) -> Any:
    """What module:Name stands for, in the working folder or an installed package. ConfigError where
    it cannot be imported, or, with `base`, is no class derived from it."""
    # At the end, so that no file of the folder shadows an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, inside = name.partition(":")
    try:
        found = pkgutil.resolve_name(name)
    except AttributeError:
        names = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
        raise ConfigError(f"{module} has no {inside}{did_you_mean(inside, names)}") from None
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(f"{error.name}")
        why = f"{type(error).__name__}: {shortened(str(error), 500)}"
        raise ConfigError(
            f"no module {module} in the working folder or among the installed packages"
            if missing
            else f"importing {module} failed with {why}"
        ) from error
    if base and not (isinstance(found, type) and issubclass(found, base)):
        there = [
            each.__name__
            for each in vars(sys.modules[module]).values()
            if isinstance(each, type) and issubclass(each, Kind) and each.__module__ == module
        ]
        has = f"; {module} has {', '.join(there)}" if there else ""
        raise ConfigError(
            f"{name} is no section of a kind: a class derived from MixerPart, ObjectivePart or "
            f"another base of maxstack.parts{has} (docs/EXTENDING.md)"
        )
    return found


def own_kinds(value: Any) -> dict[str, str]:
    """The kinds of their own in plain data -> version of the package and hash of the module that
    each is from."""
    names = dict[str, str]()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            names |= own_kinds(item)
    if isinstance(value, dict) and isinstance(kind := value.get("kind"), str) and kind in _FOUND:
        names[kind] = _state(_FOUND[kind])
    return names


def last_name(kind: str) -> str:
    """A kind as metrics and counts name it: without the module of one of one's own."""
    return kind.rpartition(":")[2]


def is_own(name: Any) -> bool:
    """Whether a value of `kind` names code."""
    return isinstance(name, str) and bool(NAME.fullmatch(name))


def _kinds(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Each `kind` that names code, with its key."""
    inside: Any = node.value
    for name, item in inside.items() if node.mapping else enumerate(inside or ()):
        below = f"{key}.{name}".removeprefix(".")
        if isinstance(item.value, dict | list):
            yield from _kinds(item, below)
        elif name == "kind" and is_own(item.value):
            yield below, item


@functools.cache
def _short_names() -> dict[str, str]:
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def _state(kind: type[Kind]) -> str:
    package = kind.__module__.partition(".")[0]
    made = importlib.metadata.packages_distributions().get(package, ())
    versions = [f"{name} {importlib.metadata.version(name)}, " for name in {*made}]
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError):  # typed into an interpreter or a notebook
        return "without a file"
    return f"{''.join(versions)}sha256 {hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _rebuild() -> None:
    """Let every section know the kinds that have joined."""
    done = dict[type[pydantic.BaseModel], bool]()

    def is_open(annotation: Any) -> bool:
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            return visit(annotation)
        # A list: what is inside has to be rebuilt first, all of it.
        inside = [is_open(each) for each in get_args(annotation)]
        return isinstance(annotation, Open) or any(inside)

    def visit(model: type[pydantic.BaseModel]) -> bool:
        if model not in done:
            done[model] = False
            fields = model.model_fields.values()
            found = [
                is_open(each) for field in fields for each in (field.annotation, *field.metadata)
            ]
            if any(found):
                model.model_rebuild(force=True)
            done[model] = any(found)
        return done[model]

    def every(model: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
        for below in model.__subclasses__():
            yield below
            yield from every(below)

    for model in [*every(pydantic.BaseModel)]:
        if model.__module__.partition(".")[0] != "pydantic":
            visit(model)
