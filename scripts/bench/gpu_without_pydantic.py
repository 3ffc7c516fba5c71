"""A stand-in for pydantic where it is not installed: enough of it to build sections of the
configuration from values that are right.

Fields get their defaults, unknown ones are refused and validators run; types are neither checked
nor converted.
"""

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any


def install() -> bool:
    """Put the stand-in where `import pydantic` finds it, unless the real one is there; whether it
    was needed. Before anything of maxstack."""
    try:
        importlib.import_module("pydantic")
        return False
    except ImportError:
        pass
    fields, bounds = types.ModuleType("pydantic.fields"), types.ModuleType("annotated_types")
    fields.__dict__.update(FieldInfo=FieldInfo)
    bounds.__dict__.update(
        {name: type(name, (), {}) for name in ("Ge", "Gt", "Le", "Lt", "MinLen")}
    )
    schemas = types.ModuleType("pydantic.json_schema")
    schemas.__dict__.update(GenerateJsonSchema=type("GenerateJsonSchema", (), {}))
    pydantic, core = types.ModuleType("pydantic"), types.ModuleType("pydantic_core")
    core.__dict__.update(PydanticCustomError=type("PydanticCustomError", (ValueError,), {}))
    pydantic.__dict__.update(
        BaseModel=BaseModel,
        ConfigDict=dict,
        Field=field,
        AfterValidator=lambda check: check,
        BeforeValidator=lambda check: check,
        TypeAdapter=lambda annotation: None,
        ValidationError=type("ValidationError", (ValueError,), {}),
        fields=fields,
        WithJsonSchema=lambda schema: schema,
        field_validator=lambda *names, mode: _marked(None),
        model_validator=lambda mode: _marked(mode),
    )
    sys.modules |= {
        "pydantic": pydantic,
        "pydantic.fields": fields,
        "pydantic.json_schema": schemas,
        "pydantic_core": core,
        "annotated_types": bounds,
    }
    return True


class FieldInfo:
    """A field's default; `...` where it has none."""

    def __init__(self, default: Any) -> None:
        self.default = default

    def is_required(self) -> bool:
        """True if the field has no default."""
        return self.default is ...


def field(default: Any = ..., **constraints: Any) -> FieldInfo:
    """pydantic.Field, its constraints forgotten."""
    return FieldInfo(default)


class BaseModel:
    """pydantic.BaseModel for sections: frozen, equal by value."""

    model_fields: dict[str, FieldInfo] = {}

    def __init_subclass__(cls) -> None:
        cls.model_fields = dict(cls.model_fields)
        for name, annotation in inspect.get_annotations(cls).items():
            if typing.ClassVar not in (annotation, typing.get_origin(annotation)):
                default = cls.__dict__.get(name, ...)
                cls.model_fields[name] = (
                    default if isinstance(default, FieldInfo) else FieldInfo(default)
                )

    def __init__(self, **given: Any) -> None:
        fields = type(self).model_fields
        if wrong := {*given} - {*fields} | {
            name for name, one in fields.items() if one.is_required() and name not in given
        }:
            raise ValueError(
                f"{type(self).__name__}: {', '.join(sorted(wrong))} unknown or missing"
            )
        for name, one in fields.items():
            object.__setattr__(self, name, given.get(name, one.default))
        for function in inspect.getmembers_static(
            type(self), lambda member: getattr(member, "validates", None) == "after"
        ):
            function[1](self)

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> "BaseModel":
        """A section of a mapping; what is nested in it stays as it is."""
        return cls(**data)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({given})"


def _marked(mode: str | None) -> Callable[[Any], Any]:
    """A decorator that notes when a validator runs; those that run on raw data are left out, since
    sections get their own types here."""

    def mark(function: Any) -> Any:
        if mode == "after":
            function.validates = mode
        return function

    return mark
