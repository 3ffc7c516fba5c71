"""Type annotations of a schema, taken apart, and described in words for error messages and the
generated manual."""

import ast
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from maxstack.errors import shortened

_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
    "array": "a list",
}
"""Words for a type of a JSON schema."""
_BOUNDS = {
    "minimum": " >= {:,.10g}",
    "exclusiveMinimum": " > {:,.10g}",
    "maximum": " <= {:,.10g}",
    "exclusiveMaximum": " < {:,.10g}",
    "minLength": " of at least {}",
    "minItems": " of at least {}",
    "minProperties": " of at least {}",
    "maxLength": " of at most {} characters",
    "pattern": " that matches {}",
}
"""Words for a keyword of a JSON schema."""


def of_field(field: FieldInfo) -> Any:
    """A field's annotation with its constraints and its discriminator."""
    return Annotated[field.annotation, field]


@functools.cache
def meanings(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Docstrings below the fields of a section and its bases, by field. They are read on demand,
    because pydantic's use_attribute_docstrings reads them at import, which takes 0.4 s."""
    found = {}
    sections = model.__mro__[: model.__mro__.index(pydantic.BaseModel)]
    for owner in reversed(sections):
        body = _classes(owner.__module__).get(owner.__name__, [])
        for field, text in itertools.pairwise(body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = inspect.cleandoc(words)
    return found


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The section that an annotation names, null aside; None for anything else."""
    models = [bare(member) for member in members(annotation)]
    return models[0] if len(models) == 1 and _is_section(models[0]) else None


def members(annotation: Any) -> list[Any]:
    """Alternatives of a union that is told apart by shape, without null; a union that is told apart
    by `kind` is a single alternative."""
    if kinds(annotation):
        return [annotation]
    inner = bare(annotation)
    if _is_union(inner):
        alternatives = [member for member in get_args(inner) if member is not type(None)]
        return [member for inner in alternatives for member in members(inner)]
    return members(inner) if get_origin(inner) is Annotated else [annotation]


def bare(annotation: Any) -> Any:
    """An annotation without its constraints."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def kinds(annotation: Any) -> dict[str, type[pydantic.BaseModel]]:
    """Tag -> section of a union that is told apart by a key; empty for anything else."""
    mark = next(_discriminators(annotation), None)
    discriminator = getattr(mark, "discriminator", "")
    return {
        str(tag): model
        for model in (*(_flat(annotation) if mark else ()), *getattr(mark, "joined", ()))
        if _is_section(model)
        for tag in get_args(bare(model.model_fields[discriminator].annotation))
    }


def own_base(annotation: Any) -> str:
    """The class from which users' sections of such a union derive; "" where there are none."""
    return getattr(getattr(next(_discriminators(annotation), None), "base", None), "__name__", "")


def item(annotation: Any) -> Any:
    """The annotation of the items of a list or the values of a mapping."""
    args = [arg for arg in get_args(bare(annotation)) if arg is not Ellipsis]
    return args[-1] if args else Any


def shape(annotation: Any) -> type:
    """dict for sections and mappings, list for lists and tuples, str for scalars, object for
    anything."""
    origin = get_origin(bare(annotation)) or bare(annotation)
    if kinds(annotation) or origin is dict or _is_section(origin):
        return dict
    if origin in (tuple, list):
        return list
    return object if origin in (Any, object) else str


def choices(annotation: Any) -> list[str]:
    """Words that a Literal, or a union with one, allows."""
    return [
        str(word)
        for member in members(annotation)
        if get_origin(bare(member)) is Literal
        for word in get_args(bare(member))
    ]


class _InOrder(GenerateJsonSchema):
    """JSON schemas whose keys are in the order of the code."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value


def describe(annotation: Any) -> str:
    """Describe in words which values an annotation allows, with their bounds."""
    return _describe(pydantic.TypeAdapter(annotation).json_schema(schema_generator=_InOrder))


def _describe(schema: dict[str, Any]) -> str:
    if "discriminator" in schema:
        return f"a mapping whose kind is one of {listed([*schema['discriminator']['mapping']])}"
    if "anyOf" in schema:
        parts = dict.fromkeys(map(_describe, schema["anyOf"]))
        return ", or ".join(sorted(parts, key=lambda part: part == "null"))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:
        return "a mapping"
    if "$comment" in schema:  # of a schema with words of its own
        return str(schema["$comment"])
    bounds = " and".join(
        words.format(schema[key]) for key, words in _BOUNDS.items() if key in schema
    ).replace(" of at least 1", " that is not empty")
    words = _WORDS.get(schema.get("type", ""), "anything") + bounds
    if "items" in schema:
        return f"{words}, each item {_describe(schema['items'])}"
    values = [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
    if isinstance(values[-1], dict):
        return f"{words}, each value {_describe(values[-1])}"
    if "required" in schema and values == [None]:
        return f"{words} with {' and '.join(schema['required'])}"
    return words


def listed(words: list[str], limit: int = 24) -> str:
    """Join words with commas; those beyond `limit` are counted."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(shortened(word, 60) for word in words[:limit]) + more


def _discriminators(annotation: Any) -> Iterator[Any]:
    inner, *extras = get_args(annotation) or (None,)
    if get_origin(annotation) is Annotated:
        # pydantic keeps what it does not know in a field's metadata.
        marks = [mark for extra in extras for mark in (extra, *getattr(extra, "metadata", ()))]
        yield from (mark for mark in marks if getattr(mark, "discriminator", ""))
        yield from _discriminators(inner)
    elif _is_union(annotation) and extras == [type(None)]:
        yield from _discriminators(inner)


def _flat(annotation: Any) -> Iterator[Any]:
    """Members of nested unions, without constraints."""
    if not _is_union(inner := bare(annotation)):
        yield inner
        return
    for member in get_args(inner):
        yield from _flat(member)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
