"""Write maxstack/schema/optimizer/signatures.json, the arguments of the public transforms and
schedules of the installed Optax and of our own schedules.

Run it with the oldest Optax that pyproject.toml allows, so that every version has what the table
has, and after a change of arguments in maxstack/schema/optimizer/schedules.py.

example: python scripts/make_optax_signatures.py
"""

import argparse
import inspect
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "maxstack/schema/optimizer/signatures.json"
SORTS = {
    **dict.fromkeys(
        ("warmup_steps", "decay_steps", "transition_steps", "transition_begin"), "steps"
    ),
    **dict.fromkeys(("value", "init_value", "peak_value", "end_value"), "value"),
    "schedules": "schedules",
    "boundaries": "boundaries",
    "boundaries_and_scales": "scales",
    "cosine_kwargs": "cycles",
    "should_skip_update_fn": "skip",
    "every_k_schedule": "whole",
    "key": "whole",
}
"""Sorts of arguments that follow from the name alone."""


def main() -> int:
    """Write the file; the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    OUT.write_text(written(table()))
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")
    return 0


def written(entries: dict[str, Any]) -> str:
    """The table as JSON, a function a line."""
    parts = []
    for name, value in entries.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value[key])}" for key in value)
            text = f"{{\n{lines}\n}}"
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table() -> dict[str, Any]:
    """The version of Optax; by role, each function's package and arguments; and the public names
    that are no transforms."""
    import optax
    import optax.contrib

    from maxstack.schema.optimizer.schedules import OWN

    entries: dict[str, Any] = {
        "version": optax.__version__,
        "transform": {},
        "schedule": {name: _entry("maxstack", OWN[name]) for name in OWN},
        "other": [],
    }
    for name in sorted({*vars(optax), *vars(optax.contrib)}):
        package = "optax" if name in vars(optax) else "optax.contrib"
        thing = getattr(sys.modules[package], name)
        if name.startswith("_") or not callable(thing) or typing.get_origin(thing):
            continue
        role = _role(thing)
        if role != "transform":
            entries["other"].append(name)
        if role != "other":
            entries[role][name] = _entry(package, thing)
    return entries


def _role(thing: Any) -> str:
    """transform, schedule or other, by the return type; by the last return statement of a function
    that has no return type."""
    import optax

    if inspect.isclass(thing):
        methods = ("init", "update", "gradient_transformation")
        return "transform" if all(hasattr(thing, name) for name in methods) else "other"
    try:
        returned = inspect.signature(thing).return_annotation
    except ValueError:
        return "other"
    if returned == optax.Schedule:
        return "schedule"
    if returned is inspect.Signature.empty and inspect.isfunction(thing):
        calls = re.findall(r"^  return (?:\w+\.)*(\w+)", inspect.getsource(thing), re.MULTILINE)
        made = (*calls[-1:], "")[0]
        return (
            "transform" if made == "chain" or made.startswith("GradientTransformation") else "other"
        )
    transforms = optax.GradientTransformation, optax.GradientTransformationExtraArgs
    return "transform" if returned in transforms else "other"


def _entry(package: str, thing: Any) -> dict[str, Any]:
    parameters = inspect.signature(thing).parameters.values()
    return {
        "package": package,
        "arguments": {
            parameter.name: _argument(parameter)
            for parameter in parameters
            if package != "maxstack" or parameter.name not in ("count", "total")
        },
    }


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    entry: dict[str, Any] = {"sort": _sort(parameter)}
    default, annotation = parameter.default, parameter.annotation
    members = typing.get_args(annotation)
    if default is parameter.empty:
        entry["required"] = True
    elif isinstance(default, bool | int | float | str):
        entry["default"] = default
    # MaskOrFn is optional too, but optax.masked fails with None.
    if default is None or (type(None) in members and entry["sort"] != "mask"):
        entry["nullable"] = True
    if entry["sort"] == "choice":
        entry["choices"] = members
    return entry


def _sort(parameter: inspect.Parameter) -> str:
    """The form in which a configuration writes an argument, judged by its name and annotation."""
    import optax

    name, annotation = parameter.name, parameter.annotation
    text = str(annotation)
    rules = (
        ("dimensions", name.endswith("weight_dimension_numbers")),
        (SORTS.get(name, ""), name in SORTS),
        ("mask", name.endswith("mask")),
        ("transform", "GradientTransformation" in text),
        ("rate", str(optax.Schedule) in text),
        ("dtype", "dtype" in name),
        ("python", "Callable" in text),
        ("flag", annotation is bool),
        ("sequence", "uple[" in text or "equence[" in text),
        ("choice", "Literal[" in text),
        ("text", annotation is str),
        ("whole", annotation in (int, int | None)),
    )
    return next((sort for sort, holds in rules if holds), "number")


if __name__ == "__main__":
    sys.exit(main())
