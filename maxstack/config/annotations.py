"""What a schema's type annotations say, in words: used by error messages and by the generated
manual."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from maxstack.config.quoting import shortened

_SCALARS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}
_BOUNDS = (
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "<="),
    (annotated_types.Lt, "lt", "<"),
)


def of_field(field: FieldInfo) -> Any:
    """A field's annotation with its constraints and its discriminator."""
    return Annotated[field.annotation, field]


def section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The section that an annotation names, null set aside; None for anything else."""
    found = [bare(member) for member in members(annotation)]
    return (
        found[0]
        if len(found) == 1
        and isinstance(found[0], type)
        and issubclass(found[0], pydantic.BaseModel)
        else None
    )


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union that is told apart by shape, null left out; a union told apart by
    `kind` is one alternative."""
    if kinds(annotation):
        return [annotation]
    if get_origin(annotation) is Annotated:
        inner = get_args(annotation)[0]
        return (
            members(inner) if _is_union(inner) or get_origin(inner) is Annotated else [annotation]
        )
    if _is_union(annotation):
        return [
            found
            for member in get_args(annotation)
            if member is not type(None)
            for found in members(member)
        ]
    return [annotation]


def bare(annotation: Any) -> Any:
    """Without constraints."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def kinds(annotation: Any) -> dict[str, type[pydantic.BaseModel]]:
    """Tag -> section of a union that is told apart by a key; empty for anything else."""
    discriminator = next(_discriminators(annotation), "")
    found: dict[str, type[pydantic.BaseModel]] = {}
    for member in _flat(annotation) if discriminator else ():
        model = bare(member)
        if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
            for tag in get_args(bare(model.model_fields[discriminator].annotation)):
                found[str(tag)] = model
    return found


def item(annotation: Any) -> Any:
    """What a list or a mapping holds."""
    args = [arg for arg in get_args(bare(annotation)) if arg is not Ellipsis]
    return args[-1] if args else Any


def shape(annotation: Any) -> type:
    """dict for sections and mappings, list for lists and tuples, str for scalars, object for
    anything."""
    origin = get_origin(bare(annotation)) or bare(annotation)
    if (
        kinds(annotation)
        or origin is dict
        or (isinstance(origin, type) and issubclass(origin, pydantic.BaseModel))
    ):
        return dict
    return list if origin in (tuple, list) else object if origin in (Any, object) else str


def choices(annotation: Any) -> list[str]:
    """The words that a Literal, or a union with one, allows."""
    return [
        str(word)
        for member in members(annotation)
        if get_origin(bare(member)) is Literal
        for word in get_args(bare(member))
    ]


def describe(annotation: Any) -> str:
    """In words, what a value may be, with its bounds."""
    tags = kinds(annotation)
    bounds = " and".join(_bounds(annotation))
    inner = bare(annotation)
    if tags:
        words = f"a mapping whose kind is one of {listed(list(tags))}"
        return f"{words}, or null" if type(None) in _flat(annotation) else words
    if get_origin(inner) is Annotated:
        return describe(inner) + bounds
    if _is_union(inner):
        parts = [
            describe(member) + (bounds if _takes(member, bounds) else "")
            for member in get_args(inner)
        ]
        return ", or ".join(sorted(dict.fromkeys(parts), key=lambda part: part == "null"))
    origin = get_origin(inner)
    if origin is Literal:
        choices = get_args(inner)
        return f"{'one of ' if len(choices) > 1 else ''}{', '.join(map(str, choices))}"
    if origin in (tuple, list):
        return f"a list{bounds}, each item {describe(item(inner))}"
    if origin is dict:
        return f"a mapping{bounds}, each value {describe(item(inner))}"
    if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
        return "a mapping"
    declared = next(
        (c.json_schema for c in _constraints(annotation) if isinstance(c, pydantic.WithJsonSchema)),
        None,
    )
    return _described(declared) if declared else _SCALARS.get(inner, "anything") + bounds


def listed(words: list[str], limit: int = 24) -> str:
    """The words with commas, the rest counted if there are many."""
    return ", ".join(shortened(word, 60) for word in words[:limit]) + (
        f" and {len(words) - limit} more" if len(words) > limit else ""
    )


def _described(schema: dict[str, Any]) -> str:
    """In words, a JSON schema that stands in for an annotation."""
    if "anyOf" in schema:
        return ", or ".join(_described(choice) for choice in schema["anyOf"])
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
        "object": "a mapping",
    }
    if schema.get("type") == "array":
        return f"a list, each item {_described(schema['items'])}"
    keys = f" with {' and '.join(schema['required'])}" if "required" in schema else ""
    return words.get(schema.get("type", ""), "anything") + keys


def _takes(member: Any, bounds: str) -> bool:
    return (
        bool(bounds)
        and bare(member) is not type(None)
        and not (bare(member) in (str, bool) and bounds.strip()[0] in "<>")
    )


def _bounds(annotation: Any) -> Iterator[str]:
    for constraint in _constraints(annotation):
        for kind, name, sign in _BOUNDS:
            if isinstance(constraint, kind):
                yield f" {sign} {getattr(constraint, name):g}"
        if isinstance(constraint, annotated_types.MinLen) and constraint.min_length:
            yield (
                " that is not empty"
                if constraint.min_length == 1
                else f" of at least {constraint.min_length}"
            )
        if isinstance(constraint, annotated_types.MaxLen):
            yield f" of at most {constraint.max_length} characters"
        if pattern := getattr(constraint, "pattern", None):
            yield f" that matches {pattern}"


def _constraints(annotation: Any) -> Iterator[Any]:
    for extra in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        yield from extra.metadata if isinstance(extra, FieldInfo) else (extra,)


def _discriminators(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            if isinstance(getattr(extra, "discriminator", None), str):
                yield extra.discriminator
        yield from _discriminators(get_args(annotation)[0])
    elif _is_union(annotation):
        rest = [member for member in get_args(annotation) if member is not type(None)]
        if len(rest) == 1:
            yield from _discriminators(rest[0])


def _flat(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _flat(get_args(annotation)[0])
    elif _is_union(annotation):
        for member in get_args(annotation):
            yield from _flat(member)
    else:
        yield annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)
