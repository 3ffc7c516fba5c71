import json

import pytest
from tiny_config import TINY

from maxstack.load import load


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yml").write_text(TINY)
    return "tiny.yml"


def test_show_prints_yaml_that_loads_back(tiny, tmp_path, maxstack):
    (tmp_path / "shown.yml").write_text(maxstack("config show tiny.yml train.steps=7"))
    assert load("shown.yml") == load(tiny, ["train.steps=7"])


def test_diff_prints_what_differs_and_nothing_else(tiny, tmp_path, maxstack):
    other = "extends: ./tiny.yml\ntrain: {steps: 7}\ndata: {packing: none}"
    (tmp_path / "other.yml").write_text(other)
    said = maxstack("config diff tiny.yml other.yml")
    assert said == "data.packing: concat -> none\ntrain.steps: 100 -> 7\n"
    assert maxstack("config diff tiny.yml other.yml train.steps=5 data.packing=fit") == ""


def test_schema_is_printed_or_written(tiny, tmp_path, maxstack):
    printed = json.loads(maxstack("config schema"))
    maxstack("config schema --out schema.json")
    assert json.loads((tmp_path / "schema.json").read_text()) == printed


def test_an_error_in_a_file_ends_with_1(tiny, maxstack):
    said = maxstack("config show tiny.yml modle.layers=3", code=1)
    assert said.startswith("error: override: modle: unknown key; ")


@pytest.mark.parametrize("typed", ["lama-3.1-8b", "lama-3.1-8b.yml", "./lama-3.1-8b.yaml"])
def test_a_point_in_a_presets_name_begins_no_ending(typed, maxstack):
    said = maxstack(f"config show synthetic model={typed}", code=1)
    assert said.endswith("; did you mean llama-3.1-8b?\n")
