"""Composing, validating and explaining YAML configurations; knows no field names and imports
nothing heavy."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from maxstack.config import own_kinds
from maxstack.config.annotations import kinds, meanings, members, of_field, section
from maxstack.config.compose import Presets, Readers, merged_tree, plain, underlay
from maxstack.config.explain import explanation, paragraphs
from maxstack.config.reader import Node
from maxstack.config.writer import write_yaml
from maxstack.errors import ConfigError, quoted

Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], pydantic.Field(strict=False)]


class NameMap(dict[str, str]):
    """A mapping that sections which are compared by their hash may hold."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


Names = Annotated[dict[str, str], pydantic.AfterValidator(NameMap)]
"""A mapping of names."""
PositiveInt = Annotated[int, pydantic.Field(ge=1)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0)]
CountInt = Annotated[int, pydantic.Field(ge=1, le=10_000)]
"""Number of what is made or looked at one by one: layers, heads, experts, devices of an axis."""
SizeInt = Annotated[int, pydantic.Field(ge=1, le=100_000_000)]
"""Size of a tensor's dimension, or number of rows and tokens that are made at a time."""
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0)]
Source = str | Path | Mapping[str, Any] | Node
"""A file, a preset's name, the content of a file or a merged tree."""
ABSENT = "(absent)"
Fault = tuple[str, str]
"""A key, as a dotted path, and a message: what is wrong and what to do."""


class Section(pydantic.BaseModel):
    """A mapping of the configuration: frozen, without unknown keys, without type coercion;
    attribute docstrings document the keys."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )

    PRESETS: ClassVar[Presets] = {}
    """For a root section: top-level key -> folders inside configs/ with its presets; "" stands for
    whole files."""
    FROM: ClassVar[tuple[str, ...]] = ()
    """For a root section: top-level keys that may hold `from: path`."""

    def own_faults(self) -> Iterable[Fault]:
        """Faults between the values of this section."""
        return ()

    @pydantic.model_validator(mode="after")
    def _has_no_fault(self) -> Self:
        for key, message in self.own_faults():
            raise fault(key, message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: Any, handler: "pydantic.GetJsonSchemaHandler"
    ) -> dict[str, Any]:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        for key, meaning in meanings(cls).items():
            if key in properties:
                properties[key]["description"] = meaning
        return found

    @classmethod
    def foreign(cls, path: str) -> str:
        """For a root section: our name for another framework's key at a dotted path; "" if not
        known."""
        return ""


Root = TypeVar("Root", bound=Section)


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{quoted(pattern)} is not a regular expression: {error}") from error
    return pattern


Regex = Annotated[str, pydantic.AfterValidator(_compiled)]


def fault(key: str, message: str) -> PydanticCustomError:
    """Make the error that a validator raises about `key`, a dotted path relative to its section."""
    return PydanticCustomError("fault", "{message}", {"key": key, "message": message})


def load(
    schema: type[Root],
    path: Source,
    overrides: Sequence[str] = (),
) -> Root:
    """Load and validate a file, a preset's name or a mapping, with `a.b.c=value` overrides.
    ConfigError names the place of every problem."""
    return load_tree(schema, path, overrides)[0]


def load_tree(
    schema: type[Root],
    path: Source,
    overrides: Sequence[str] = (),
    *,
    readers: Readers | None = None,
    completed: Callable[[Node], Node] = lambda tree: tree,
    faults: Callable[[Root], Sequence[Fault]] = lambda cfg: (),
) -> tuple[Root, Node]:
    """Load a configuration -> the validated section, and the merged tree that knows where each
    value came from. `readers` reads `from: path` for each key of `schema.FROM`, `completed` adds
    derived values to the merged tree, and `faults` returns the faults of a validated
    configuration."""
    defaults = {
        name: plain_data(field.default)
        for name, field in schema.model_fields.items()
        if not field.is_required()
    }
    tree = merged_tree(schema.PRESETS, path, overrides, defaults, readers, _keys(schema))
    tree = completed(tree)
    for where, below in _beneath(schema):
        tree = underlay(tree, where, below)
    try:
        cfg = schema.model_validate(plain(tree))
    except pydantic.ValidationError as error:
        # Only now, since looking through the installed packages takes a while.
        if (named := own_kinds.with_full_names(tree)) is not tree:
            return load_tree(schema, named, completed=completed, faults=faults)
        words = {
            key: ["preset", "from"] if key in schema.FROM else ["preset"]
            for key in schema.PRESETS
            if key
        }
        raise ConfigError(explanation(schema, tree, error, schema.foreign, words)) from None
    if wrong := faults(cfg):
        raise ConfigError(paragraphs(tree, {(*key.split("."),): text for key, text in wrong}))
    return cfg, tree


def _keys(schema: type[Section]) -> dict[str, set[str]]:
    """Keys of each section, "" for those of the root."""
    keys = {"": {*schema.model_fields}}
    for name, field in schema.model_fields.items():
        models = [
            model
            for union in members(of_field(field))
            for model in (section(union), *kinds(union).values())
        ]
        keys[name] = {key for model in models if model for key in model.model_fields}
    return keys


def dump(cfg: Section | Mapping[str, Any]) -> str:
    """The resolved configuration as YAML, with defaults; it loads back to an equal object."""
    return "".join(f"{line}\n" for line, _ in write_yaml(plain_data(cfg)))


def annotated(cfg: Section, tree: Node) -> str:
    """The YAML of `dump` with each value's origin in a comment."""
    lines = [
        (line, "" if path is None else _origin(tree, path))
        for line, path in write_yaml(plain_data(cfg))
    ]
    width = min(72, max((len(line) for line, origin in lines if origin), default=0))
    return "".join(
        f"{line:<{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines
    )


def difference(
    old: Section | Mapping[str, Any], new: Section | Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """(key path, old value, new value) of each difference; ABSENT where one side lacks the key."""
    return list(_differences(plain_data(old), plain_data(new), ()))


def plain_data(cfg: Any) -> Any:
    """Convert a section, or a mapping or list that may hold some, to dicts, lists and scalars."""
    value = cfg.model_dump() if isinstance(cfg, pydantic.BaseModel) else cfg
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    return [plain_data(item) for item in value] if isinstance(value, list | tuple) else value


def _beneath(
    schema: type[Section] | Section, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Defaults, by path, that pydantic does not fill in where a file gives a part of them: keys of
    default mappings, the kind of a default section."""
    model = schema if isinstance(schema, type) else type(schema)
    for name, field in model.model_fields.items():
        default = field.default if isinstance(schema, type) else getattr(schema, name)
        required = section(field.annotation) if field.is_required() else None
        if required and issubclass(required, Section):
            yield from _beneath(required, (*path, name))
        elif isinstance(default, Section):
            if (kind := type(default).model_fields.get("kind")) and kind.is_required():
                yield (*path, name), {"kind": plain_data(default)["kind"]}
            yield from _beneath(default, (*path, name))
        elif isinstance(default, dict) and default:
            yield (*path, name), plain_data(default)


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield ".".join(path), old, new


def _origin(tree: Node, path: tuple[str | int, ...]) -> str:
    node = tree.at(*path)
    if node is None:
        return "default"
    inside = node.value if isinstance(node.value, list) else []
    return ", ".join(dict.fromkeys([node.where, *(item.where for item in inside)]))
