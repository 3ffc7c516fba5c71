"""The table of chips: whole, sourced, and found by name and by jax's name."""

import re
from pathlib import Path

import pytest

from maxstack.config import plain_data
from maxstack.config.compose import plain
from maxstack.config.reader import read_yaml
from maxstack.hardware import chips as module
from maxstack.hardware.chips import by_kind, chip, chips

TABLE = Path(module.__file__).with_suffix(".yml")
SOURCES = plain(read_yaml(TABLE.read_text(encoding="utf-8"), TABLE.name))["sources"]

CHIPS = pytest.mark.parametrize("one", chips().values(), ids=lambda one: one.name)


def numbers(value, path=""):
    """Dotted paths of the numbers in plain data; a list of them counts as one."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) or isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@CHIPS
def test_every_number_has_a_known_source(one):
    data = {key: item for key, item in plain_data(one).items() if key not in ("kinds", "sources")}
    if one.devices == 1:
        del data["devices"]
    unsourced = [
        path
        for path in numbers(data)
        if not any(path == given or path.startswith(f"{given}.") for given in one.sources)
    ]
    assert unsourced == []
    assert {re.match(r"[a-z0-9-]+", said)[0] for said in one.sources.values()} <= SOURCES.keys()


def test_every_source_is_used():
    assert {
        key
        for key in SOURCES
        if not any(
            re.search(rf"\b{key}\b", said)
            for one in chips().values()
            for said in one.sources.values()
        )
    } == set()


@CHIPS
def test_figures_are_of_their_units(one):
    assert 1e14 < one.peak_flops < one.peak["bf16"] * 1.001
    assert all(one.flops(name) >= one.peak_flops for name in ("float8_e4m3fn", "int8", "bfloat16"))
    assert 0.9 < one.usable * one.devices / one.memory <= 1
    assert (
        one.memory_bandwidth
        > 10 * (one.torus.link if one.torus else one.nvlink.bandwidth / 2)
        > 10 * one.network
    )
    assert (one.torus is None) == (one.platform == "cuda") != (one.nvlink is None)


def test_a_device_is_known_by_one_name():
    kinds = [kind for one in chips().values() for kind in one.kinds]
    assert len(kinds) == len(set(kinds))
    assert by_kind("TPU v5 lite") is chip("v5e")
    assert by_kind("cpu") is None


def test_a_chip_of_two_devices_shares_out_its_peak():
    assert chip("tpu7x").peak_flops == 2307e12 / 2


def test_float32_runs_on_the_units_there_are():
    assert chip("h100").flops("float32") == 494.7e12
    assert chip("v5p").flops("float32") == 459e12
