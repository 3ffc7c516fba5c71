"""pydantic's errors as paragraphs: file:line, key path, value, what is allowed, the nearest valid
word."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pydantic

from maxstack.config.annotations import (
    bare,
    choices,
    describe,
    item,
    kinds,
    listed,
    meanings,
    members,
    of_field,
    own_base,
    section,
    shape,
)
from maxstack.config.reader import Node
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted, shortened

SHOWN = 5
Path = tuple[str | int, ...]
Foreign = Callable[[str], str]
Words = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class _Location:
    """The key path and the annotation that an error's location leads to."""

    path: Path
    annotation: Any
    owner: Any
    """Annotation of the mapping or list around it."""
    entry: Path = ()
    """The innermost entry of a mapping of named sections on the path."""
    vague: bool = False
    """The error is about an alternative of a union that the value's shape did not choose, so only
    the union itself can be named."""


def explanation(
    schema: type[pydantic.BaseModel],
    tree: Node,
    error: pydantic.ValidationError,
    foreign: Foreign,
    words: Words,
) -> str:
    """A paragraph for each problem, limited to the first few. `foreign` translates a key of another
    framework; `words` are composition keys, by the section that may hold them."""
    messages: dict[Path, str] = {}
    vague: dict[Path, str] = {}
    lacking: dict[Path, list[str]] = {}
    for detail in error.errors(include_url=False):
        location = _follow(schema, tree, detail["loc"])
        path, message = _message(location, tree, dict(detail), foreign, words)
        is_vague = location.vague or detail["type"] == "too_short"
        (vague if is_vague else messages).setdefault(path, message)
        if location.entry and detail["type"] in ("missing", "union_tag_not_found"):
            lacking.setdefault(location.entry, []).append(_dotted(path[len(location.entry) :]))
    for path, message in vague.items():
        if not any(_is_within(other, path) for other in messages):
            messages[path] = message
    for entry, keys in lacking.items():
        if names := _names_of_other_files(tree, entry):
            others = {path: messages[path] for path in messages if not _is_within(path, entry)}
            problem = (
                f"is not there; there is {listed(names)}; a new one needs {listed(keys)} "
                f"too{did_you_mean(entry[-1], names)}"
            )
            messages = others | {entry: problem}
    return paragraphs(tree, messages)


def _is_within(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def paragraphs(tree: Node, faults: Mapping[Path, str]) -> str:
    """A paragraph for each fault, limited to the first few: file:line, key path, message."""
    lines = [
        f"{_where(tree, path)}: {shortened(_dotted(path)) or 'the configuration'}: {message}"
        for path, message in faults.items()
    ]
    more = [f"... and {len(lines) - SHOWN} more problems"] if len(lines) > SHOWN else []
    return "\n".join(lines[:SHOWN] + more)


def _names_of_other_files(tree: Node, entry: Path) -> list[str]:
    """Names beside an entry that came from other files: the entry may be a misspelling of one."""
    around = tree.at(*entry[:-1])
    entries = (around.mapping or {}).copy() if around else {}
    own = entries.pop(f"{entry[-1]}", None)
    return [name for name, node in entries.items() if own and _files(node) - _files(own)]


def _files(node: Node) -> set[str]:
    """The files, or `override`, that gave the values at and below a node."""
    if not isinstance(node.value, dict | list) or not node.value:
        return {node.where.rpartition(":")[0] or node.where}
    inside = node.value.values() if isinstance(node.value, dict) else node.value
    return {file for below in inside for file in _files(below)}


def _where(tree: Node, path: Path) -> str:
    for end in range(len(path), 0, -1):
        if node := tree.at(*path[:end]):
            return node.where
    return tree.where


def _follow(schema: Any, tree: Node, loc: Path) -> _Location:
    """The place of pydantic's `loc`, which holds keys and also alternatives of unions."""
    location = _Location((), schema, None)
    for segment in loc:
        if segment == "[key]" and tree.at(*location.path, segment) is None:  # of a mapping's key
            break
        if table := kinds(location.annotation):
            if str(segment) in table:
                location = dataclasses.replace(location, annotation=table[str(segment)])
            continue
        alternatives = members(location.annotation)
        if len(alternatives) > 1:
            chosen = [member for member in alternatives if _labels(member, str(segment))][:1]
            shapes = {shape(member) for member in chosen} & {dict, list}
            if not isinstance(_value(tree, location.path), tuple(shapes)):
                return dataclasses.replace(location, vague=True)
            location = dataclasses.replace(location, annotation=chosen[0])
            continue
        only = alternatives[0] if alternatives else Any
        path, inside = (*location.path, segment), _inside(only, segment)
        if inside is not None or tree.at(*path) is not None or segment == loc[-1]:
            is_named = shape(only) is dict and not section(only) and section(item(only)) is not None
            entry = path if is_named else location.entry
            location = _Location(path, Any if inside is None else inside, only, entry)
    return location


def _value(tree: Node, path: Path) -> Any:
    """The value at a path; None also where there is none."""
    node = tree.at(*path)
    return node.value if node else None


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


def _message(
    location: _Location, tree: Node, detail: dict[str, Any], foreign: Foreign, words: Words
) -> tuple[Path, str]:
    """The path to name, and the problem there."""
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "fault":
        below = tuple(part for part in context["key"].split(".") if part)
        return location.path + below, context["message"]
    if kind == "extra_forbidden":
        return location.path, _unknown_key(location, tree, foreign, words)
    if kind == "missing":
        return location.path, f"missing; wanted: {_wanted(location)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path, tags = (*location.path, "kind"), list(kinds(location.annotation))
        if not tags:
            tags = [tag.strip(" '") for tag in context.get("expected_tags", "").split(",")]
        if tree.at(*path) is None:
            return path, f"missing; allowed: {listed(tags)}"
        tag = _value(tree, path)
        if base := own_base(location.annotation):
            tags.append(f"module:Name derived from {base}")
        meant = foreign(_dotted((*path, tag))) if isinstance(tag, str) else ""
        hint = f"; {meant}" if meant else did_you_mean(tag, tags)
        return path, f"got {_got(tag)}; allowed: {listed(tags)}{hint}"
    if kind in ("value_error", "assertion_error"):
        return location.path, str(context.get("error", detail["msg"]))
    value = _value(tree, location.path)
    wrong = _wrong_value(location, value, detail["msg"])
    example = "" if isinstance(value, dict | list) else foreign(_dotted((*location.path, "=")))
    return location.path, f"{wrong}{f', {example}' if example else ''}"


def _unknown_key(location: _Location, tree: Node, foreign: Foreign, words: Words) -> str:
    model = section(location.owner)
    keys = [*words.get(_dotted(location.path[:-1]), ()), *(model.model_fields if model else ())]
    paths = [_dotted(path) for path in _leaves(tree.at(*location.path), location.path)]
    ours = {shortened(path): name for path in paths if (name := foreign(path))}
    hints = [name if len(paths) == 1 else f"{path}: {name}" for path, name in ours.items()]
    hint = f"; {'; '.join(hints[:SHOWN])}" if hints else did_you_mean(location.path[-1], keys)
    return f"unknown key; allowed: {listed(keys, 40)}{hint}"


def _leaves(node: Node | None, path: Path) -> Iterator[Path]:
    """Paths of the values at and below a node that are no mapping, or an empty one."""
    for key, inside in (node.mapping or {}).items() if node else ():
        yield from _leaves(inside, (*path, key))
    if not (node and node.mapping):
        yield path


def _wanted(location: _Location) -> str:
    model = section(location.owner)
    meaning = meanings(model).get(str(location.path[-1]), "").replace("\n", " ") if model else ""
    return f"{describe(location.annotation)}{f' ({meaning})' if meaning else ''}"


def _wrong_value(location: _Location, value: Any, message: str) -> str:
    allowed = describe(location.annotation) if location.annotation is not Any else message
    hint = did_you_mean(value, choices(location.annotation))
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"got {_got(value)}; allowed: {allowed}, not infinite"
        if value.is_integer() and abs(value) < 2**53 and "whole number" in allowed:
            hint = f"; write {int(value)}"
    return f"got {_got(value)}; allowed: {allowed}{hint}"


def _got(value: Any) -> str:
    if isinstance(value, bool):
        return "true (a switch)" if value else "false (a switch)"
    if isinstance(value, str):
        return f"{quoted(value)} (text)"
    words = {type(None): "null", dict: "a mapping", list: "a list"}
    return words.get(type(value)) or str(value)
