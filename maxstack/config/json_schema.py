"""The JSON schema with which editors complete and check a configuration."""

from typing import Any

from maxstack.config import Section
from maxstack.config.compose import presets_dir

_NAME = {"type": "string", "description": "A preset's name, or a path that ends in .yml."}


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """A schema of draft 2020-12, with presets, extends and like. No key is required, because a file
    may extend another one that gives it."""
    whole = schema.model_json_schema()
    definitions = whole.setdefault("$defs", {})
    for name in _named_items(whole):
        definitions[name]["properties"]["like"] = {
            "type": "string",
            "description": "Another entry beside this one, whose keys this one takes over.",
        }
    for key in schema.FROM:
        for name in _sections(whole["properties"][key]):
            definitions[name]["properties"]["from"] = {
                "type": "string",
                "description": "A folder that gives this section.",
            }
    for key, folders in schema.PRESETS.items():
        if key:
            _accept_presets(whole, key, folders)
    whole["properties"]["extends"] = {
        "anyOf": [_NAME, {"type": "array", "items": _NAME}],
        "description": "What this file is merged over.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_relax(whole)}


def _accept_presets(whole: dict[str, Any], key: str, folders: Any) -> None:
    names = sorted(
        {file.stem for folder in folders for file in (presets_dir() / folder).glob("*.yml")}
    )
    section = whole["properties"][key]
    kinds = section.get("anyOf") or section.get("oneOf") or [{"$ref": section["$ref"]}]
    for name in _sections(section):
        whole["$defs"][name]["properties"]["preset"] = _NAME
    choices = [{"enum": names}] if names else []
    whole["properties"][key] = {
        "anyOf": [*choices, _NAME, *kinds],
        "description": section.get("description", ""),
    }


def _sections(node: dict[str, Any]) -> list[str]:
    """Definitions of what a key may hold."""
    inside = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    own = [node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else []
    return own + [name for item in inside for name in _sections(item)]


def _named_items(node: Any) -> set[str]:
    """Definitions of the values of free mappings."""
    if isinstance(node, list):
        return {name for item in node for name in _named_items(item)}
    if not isinstance(node, dict):
        return set()
    names = {name for item in node.values() for name in _named_items(item)}
    values = node.get("additionalProperties")
    if isinstance(values, dict) and "$ref" in values:
        names.add(values["$ref"].rsplit("/", 1)[-1])
    return names


def _relax(node: Any) -> Any:
    """A schema without required keys, with tagged unions as plain ones."""
    if isinstance(node, list):
        return [_relax(item) for item in node]
    if not isinstance(node, dict):
        return node
    relaxed = {}
    for key, item in node.items():
        is_mapping_of_kinds = key == "discriminator" and isinstance(item, dict)
        if is_mapping_of_kinds and "propertyName" in item:
            continue
        if key != "required" or not isinstance(item, list):
            relaxed["anyOf" if key == "oneOf" else key] = _relax(item)
    return relaxed
