"""The JSON schema that editors use to complete and check a configuration while it is written."""

from typing import Any

from maxstack.config import Section
from maxstack.config.compose import presets_dir

_NAME = {"type": "string", "description": "A preset's name, or a path that ends in .yml."}


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """Draft 2020-12. No key is required, because a file may extend another that gives it; presets,
    extends and like are known."""
    found = schema.model_json_schema()
    definitions = found.setdefault("$defs", {})
    for name in _named_items(found):
        definitions[name]["properties"]["like"] = {
            "type": "string",
            "description": "Another entry beside this one, whose keys this one takes over.",
        }
    for key in schema.FROM:
        definition = found["properties"][key]["$ref"].rsplit("/", 1)[-1]
        definitions[definition]["properties"]["from"] = {
            "type": "string",
            "description": "A folder that gives this section.",
        }
    for key in schema.PRESETS:
        if key:
            _accept_presets(found, key, schema.PRESETS[key])
    found["properties"]["extends"] = {
        "anyOf": [_NAME, {"type": "array", "items": _NAME}],
        "description": "What this file is merged over.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_relaxed(found)}


def _accept_presets(found: dict[str, Any], key: str, folders: Any) -> None:
    names = sorted(
        {file.stem for folder in folders for file in (presets_dir() / folder).glob("*.yml")}
    )
    section = found["properties"][key]
    found["$defs"][section["$ref"].rsplit("/", 1)[-1]]["properties"]["preset"] = _NAME
    known = [{"enum": names}] if names else []
    found["properties"][key] = {
        "anyOf": [*known, _NAME, {"$ref": section["$ref"]}],
        "description": section.get("description", ""),
    }


def _named_items(node: Any) -> set[str]:
    """Definitions that stand as the values of a free mapping."""
    if isinstance(node, list):
        return {name for item in node for name in _named_items(item)}
    if not isinstance(node, dict):
        return set()
    values = node.get("additionalProperties")
    here = (
        {values["$ref"].rsplit("/", 1)[-1]}
        if isinstance(values, dict) and "$ref" in values
        else set()
    )
    return here | {name for item in node.values() for name in _named_items(item)}


def _relaxed(node: Any) -> Any:
    if isinstance(node, list):
        return [_relaxed(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: item
        for key, item in node.items()
        if not (key == "required" and isinstance(item, list))
        and not (key == "discriminator" and isinstance(item, dict) and "propertyName" in item)
    }
    return {"anyOf" if key == "oneOf" else key: _relaxed(item) for key, item in kept.items()}
