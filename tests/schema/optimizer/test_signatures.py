"""The table of signatures says what Optax has."""

import inspect
import json
import re
import runpy
import types
from pathlib import Path

import optax
import optax.contrib
import pydantic
import pytest

from maxstack.schema.optimizer import OptimizerConfig, signatures
from maxstack.schema.optimizer.schedules import OWN

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "maxstack/schema/optimizer/signatures.json"
VERSION = json.loads(TABLE.read_text())["version"]
of_its_version = pytest.mark.skipif(
    optax.__version__ != VERSION, reason=f"the table is of optax {VERSION}"
)
PUBLIC = {
    name: getattr(package, name)
    for package in (optax.contrib, optax)
    for name in dir(package)
    if not name.startswith("_")
    and callable(getattr(package, name))
    and not isinstance(getattr(package, name), types.ModuleType)
}
ALL = [(role, name) for role in ("transform", "schedule") for name in signatures.names(role)]


@of_its_version
def test_the_table_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts/make_optax_signatures.py"))
    assert TABLE.read_text() == script["written"](script["table"]())


def test_the_table_is_of_the_oldest_optax_that_is_supported():
    assert re.findall(r'"optax>=(.*)"', (ROOT / "pyproject.toml").read_text()) == [VERSION]


@pytest.mark.parametrize("role, name", ALL)
def test_what_is_in_the_table_can_be_given_to_the_function(role, name):
    table = signatures.lookup(role, name).arguments
    inspected = inspect.signature(OWN.get(name) or PUBLIC[name]).parameters
    required = {
        key
        for key, parameter in inspected.items()
        if parameter.default is parameter.empty and key not in ("count", "total")
    }
    assert table.keys() <= inspected.keys()
    assert required <= {key for key, argument in table.items() if argument.required}


@of_its_version
def test_every_public_function_that_returns_a_transformation_is_in_the_table():
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    returning = {
        name
        for name, thing in PUBLIC.items()
        if inspect.isfunction(thing) and inspect.signature(thing).return_annotation in kinds
    }
    assert len(returning) > 90
    assert returning <= set(signatures.names("transform"))


@of_its_version
def test_every_public_schedule_is_in_the_table():
    returning = {
        name
        for name, thing in PUBLIC.items()
        if inspect.isfunction(thing)
        and inspect.signature(thing).return_annotation == optax.Schedule
    }
    assert {"join_schedules", "exponential_decay"} < returning
    assert returning | {*OWN} == {*signatures.names("schedule")}


def test_unknown_and_private_names_and_our_own_are_not_optaxs():
    for name in ("adamz", "_typing", "wsd"):
        assert signatures.lookup("transform", name) is None and not signatures.is_other(name)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"chain": [{"kind": "adam2027"}]},
        {"chain": [{"kind": "adamw", "b3": 0.9}]},
        {"schedule": {"kind": "spiral"}},
    ],
)
def test_a_name_that_a_newer_optax_may_have_is_refused_with_both_versions(monkeypatch, optimizer):
    monkeypatch.setattr(signatures.metadata, "version", lambda package: "9.9")
    with pytest.raises(
        pydantic.ValidationError, match=rf"knows what Optax {VERSION} has, and 9\.9 is installed"
    ):
        OptimizerConfig(**optimizer)
