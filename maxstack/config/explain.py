"""Turning pydantic's errors into paragraphs: file:line, key path, what was got, what is allowed,
the nearest valid word."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic

from maxstack.config.annotations import (
    bare,
    choices,
    describe,
    item,
    kinds,
    listed,
    members,
    of_field,
    section,
    shape,
)
from maxstack.config.quoting import quoted, shortened
from maxstack.config.reader import Node
from maxstack.config.spelling import did_you_mean

SHOWN = 5
Path = tuple[str | int, ...]
Foreign = Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an error's location leads: the key path, and the annotation there."""

    path: Path
    annotation: Any
    owner: Any
    """The annotation of the mapping or list around it."""
    entry: Path = ()
    """The entry of a mapping of named sections that the path leads into, the innermost one."""
    vague: bool = False
    """One alternative of a union failed, and not the one that the value's shape chose: only the
    union itself can be named."""


def explanation(
    schema: type[pydantic.BaseModel], tree: Node, error: pydantic.ValidationError, foreign: Foreign
) -> str:
    """A paragraph for each problem, the first few of them; `foreign` says what a key of another
    framework is called here."""
    found: dict[Path, str] = {}
    vague: dict[Path, str] = {}
    lacking: dict[Path, list[str]] = {}
    for detail in error.errors(include_url=False):
        place = _follow(schema, tree, detail["loc"])
        for path, message in _messages(place, tree, dict(detail), foreign):
            (vague if place.vague or detail["type"] == "too_short" else found).setdefault(
                path, message
            )
            if place.entry and detail["type"] in ("missing", "union_tag_not_found"):
                lacking.setdefault(place.entry, []).append(
                    ".".join(map(str, path[len(place.entry) :]))
                )
    for path, message in vague.items():
        if not any(other[: len(path)] == path for other in found):
            found[path] = message
    for entry, keys in lacking.items():
        if names := _apart(tree, entry):
            found = {
                path: message for path, message in found.items() if path[: len(entry)] != entry
            }
            found[entry] = (
                f"is not there; there is {listed(names)}; a new one needs {listed(keys)} "
                f"too{did_you_mean(entry[-1], names)}"
            )
    return paragraphs(tree, found)


def paragraphs(tree: Node, faults: Mapping[Path, str]) -> str:
    """A paragraph for each fault, the first few of them: file:line, key path, message."""
    lines = [
        f"{_where(tree, path)}: "
        f"{shortened('.'.join(map(str, path))) or 'the configuration'}: {message}"
        for path, message in faults.items()
    ]
    more = [f"... and {len(lines) - SHOWN} more problems"] if len(lines) > SHOWN else []
    return "\n".join(lines[:SHOWN] + more)


def _apart(tree: Node, entry: Path) -> list[str]:
    """Names beside an entry that other files gave than the entry, which so may have been meant for
    one of them."""
    own, around = tree.at(*entry), tree.at(*entry[:-1])
    if own is None or around is None:
        return []
    given = _files(own)
    return [
        name
        for name, node in (around.mapping or {}).items()
        if name != entry[-1] and _files(node) - given
    ]


def _files(node: Node) -> set[str]:
    """The files, or `override`, that gave what stands at and below a node."""
    if not isinstance(node.value, dict | list) or not node.value:
        return {node.where.rpartition(":")[0] or node.where}
    inside = node.value.values() if isinstance(node.value, dict) else node.value
    return {file for below in inside for file in _files(below)}


def _where(tree: Node, path: Path) -> str:
    for end in range(len(path), 0, -1):
        if node := tree.at(*path[:end]):
            return node.where
    return tree.where


def _follow(schema: Any, tree: Node, loc: Path) -> _Place:
    place = _Place((), schema, None)
    for segment in loc:
        alternatives = members(place.annotation)
        table = kinds(place.annotation)
        if table:
            if str(segment) in table:
                place = dataclasses.replace(place, annotation=table[str(segment)])
            continue
        if len(alternatives) > 1:
            chosen = next(
                (member for member in alternatives if _labels(member, str(segment))), None
            )
            node = tree.at(*place.path)
            if (
                chosen is None
                or shape(chosen) not in (dict, list)
                or not isinstance(node.value if node else None, shape(chosen))
            ):
                return dataclasses.replace(place, vague=True)
            place = dataclasses.replace(place, annotation=chosen)
            continue
        only = alternatives[0] if alternatives else Any
        inside = _inside(only, segment)
        if inside is not None or tree.at(*place.path, segment) is not None or segment == loc[-1]:
            path = *place.path, segment
            named = shape(only) is dict and not section(only) and section(item(only)) is not None
            place = _Place(
                path, Any if inside is None else inside, only, path if named else place.entry
            )
    return place


def _labels(member: Any, label: str) -> bool:
    if kinds(member):
        return label.startswith("tagged-union")
    named = bare(member)
    return (
        label == getattr(named, "__name__", "")
        or (shape(member) is list and label.startswith(("tuple[", "list[")))
        or (shape(member) is dict and label.startswith("dict["))
    )


def _inside(annotation: Any, segment: str | int) -> Any | None:
    if model := section(annotation):
        field = model.model_fields.get(str(segment))
        return of_field(field) if field else None
    return item(annotation) if shape(annotation) in (dict, list) else None


def _messages(
    place: _Place, tree: Node, detail: dict[str, Any], foreign: Foreign
) -> list[tuple[Path, str]]:
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "fault":
        return [
            (
                place.path + tuple(part for part in context["key"].split(".") if part),
                context["message"],
            )
        ]
    if kind == "extra_forbidden":
        return [(place.path, _unknown_key(place, tree, foreign))]
    if kind == "missing":
        return [(place.path, f"missing; wanted: {_wanted(place)}")]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = list(kinds(place.annotation)) or [
            tag.strip(" '") for tag in context.get("expected_tags", "").split(",")
        ]
        got = tree.at(*place.path, "kind")
        if got is None:
            return [((*place.path, "kind"), f"missing; allowed: {listed(tags)}")]
        return [
            (
                (*place.path, "kind"),
                f"got {_got(got)}; allowed: {listed(tags)}{did_you_mean(got.value, tags)}",
            )
        ]
    if kind in ("value_error", "assertion_error"):
        return [(place.path, str(context.get("error", detail["msg"])))]
    return [(place.path, _wrong_value(place, tree, detail["msg"]))]


def _unknown_key(place: _Place, tree: Node, foreign: Foreign) -> str:
    model = section(place.owner)
    keys = list(model.model_fields) if model else []
    paths = [".".join(map(str, path)) for path in _leaves(tree.at(*place.path), place.path)]
    told = [
        f"{shortened(path)}: {said}" if len(paths) > 1 else said
        for path in paths
        if (said := foreign(path))
    ]
    hint = f"; {'; '.join(told[:SHOWN])}" if told else did_you_mean(place.path[-1], keys)
    return f"unknown key; allowed: {listed(keys, 40)}{hint}"


def _leaves(node: Node | None, path: Path) -> Iterator[Path]:
    """Paths of what is no mapping, or an empty one, at and below a node."""
    for key, inside in (node.mapping or {}).items() if node else ():
        yield from _leaves(inside, (*path, key))
    if not (node and node.mapping):
        yield path


def _wanted(place: _Place) -> str:
    model = section(place.owner)
    field = model.model_fields.get(str(place.path[-1])) if model else None
    meaning = (field.description or "").replace("\n", " ") if field else ""
    return f"{describe(place.annotation)}{f' ({meaning})' if meaning else ''}"


def _wrong_value(place: _Place, tree: Node, message: str) -> str:
    node = tree.at(*place.path)
    value = node.value if node else None
    allowed = describe(place.annotation) if place.annotation is not Any else message
    if isinstance(value, float) and not math.isfinite(value):
        return f"got {_got(node)}; allowed: {allowed}, not infinite"
    integral = (
        isinstance(value, float)
        and value.is_integer()
        and abs(value) < 2**53
        and "whole number" in allowed
    )
    hint = (
        f"; write {int(value)}"
        if integral and isinstance(value, float)
        else did_you_mean(value, choices(place.annotation))
    )
    return f"got {_got(node)}; allowed: {allowed}{hint}"


def _got(node: Node | None) -> str:
    value = node.value if node else None
    if isinstance(value, bool):
        return "true (a switch)" if value else "false (a switch)"
    if isinstance(value, str):
        return f"{quoted(value)} (text)"
    if value is None:
        return "null"
    return (
        "a mapping"
        if isinstance(value, dict)
        else "a list"
        if isinstance(value, list)
        else f"{value}"
    )
