import jsonschema
import pytest
from tiny_config import TINY

from maxstack.config.compose import plain, presets_dir
from maxstack.config.json_schema import json_schema
from maxstack.config.reader import read_yaml
from maxstack.schema.config import Config

RUNS = sorted([*presets_dir().glob("*.yml"), *presets_dir().glob("recipes/*.yml")])


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(Config)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(validator, text: str) -> list[str]:
    return [error.message for error in validator.iter_errors(plain(read_yaml(text, "file.yml")))]


@pytest.mark.parametrize(
    "text",
    [
        TINY,
        "extends: quickstart",
        "extends: [a, ./b.yml]\ntrain: {steps: 3}",
        "model: some-name\nmesh: some-mesh\noptimizer: adamw",
        "model: {preset: some-name, layers: 3}",
        "data: {tokenizer: {bos: false}}",
        "train: {profile: null}",
        "mesh: {rules: {vocab: [tensor, fsdp], seq: null}}",
    ],
)
def test_what_composition_allows_is_valid(validator, text):
    assert problems(validator, text) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trian: {steps: 3}", "trian"),
        ("train: {stesp: 3}", "stesp"),
        ("train: {steps: many}", "many"),
        ("train: {steps: 0}", "0"),
        ("data: {packing: dense}", "dense"),
        ("model: {layers: two}", "two"),
        ("data: {sources: [{kind: txt}]}", "txt"),
        ("extends: 3", "3"),
    ],
)
def test_what_no_file_may_say_is_invalid(validator, text, says):
    assert any(says in problem for problem in problems(validator, text))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_runs_are_valid(validator, path):
    assert problems(validator, path.read_text()) == []


def test_keys_have_what_their_docstrings_say(validator):
    keys = validator.schema["$defs"]["TrainConfig"]["properties"]
    assert keys["batch_size"]["description"].startswith("Rows per step, over all devices")
