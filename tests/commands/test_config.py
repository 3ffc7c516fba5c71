import json

import pytest
from tiny_config import TINY

from maxstack import cli
from maxstack.load import load


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yml").write_text(TINY)
    return "tiny.yml"


def test_show_prints_yaml_that_loads_back(tiny, tmp_path, capsys):
    assert cli.main(["config", "show", tiny, "train.steps=7"]) == 0
    (tmp_path / "shown.yml").write_text(capsys.readouterr().out)
    assert load("shown.yml") == load(tiny, ["train.steps=7"])


def test_diff_prints_what_differs_and_nothing_else(tiny, tmp_path, capsys):
    (tmp_path / "other.yml").write_text(
        "extends: ./tiny.yml\ntrain: {steps: 7}\ndata: {packing: none}"
    )
    assert cli.main(["config", "diff", tiny, "other.yml"]) == 0
    assert capsys.readouterr().out == "data.packing: concat -> none\ntrain.steps: 100 -> 7\n"
    assert cli.main(["config", "diff", tiny, "other.yml", "train.steps=5", "data.packing=fit"]) == 0
    assert capsys.readouterr().out == ""


def test_schema_is_printed_or_written(tiny, tmp_path, capsys):
    assert cli.main(["config", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert cli.main("config schema --out schema.json".split()) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == printed


def test_an_error_in_a_file_ends_with_1(tiny, capsys):
    assert cli.main(["config", "show", tiny, "modle.layers=3"]) == 1
    assert capsys.readouterr().err.startswith("error: override: modle: unknown key; ")


@pytest.mark.parametrize("typed", ["lama-3.1-8b", "lama-3.1-8b.yml", "./lama-3.1-8b.yaml"])
def test_a_point_in_a_presets_name_begins_no_ending(typed, capsys):
    assert cli.main(f"config show synthetic model={typed}".split()) == 1
    assert capsys.readouterr().err.endswith("; did you mean llama-3.1-8b?\n")
