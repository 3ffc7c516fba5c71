import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxstack.config import plain_data
from maxstack.config.annotations import item, kinds, members, of_field, section, shape
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.schema import foreign
from maxstack.schema.config import Config
from maxstack.schema.foreign import equivalent

ROWS = yaml.safe_load(Path(foreign.__file__).with_name("foreign.yml").read_text())


def exists(annotation: Any, default: Any, path: list[str]) -> bool:
    """True where the schema has a key, NAME and N standing for any; below what is free, the default
    must have it."""
    if not path:
        return True
    for member in members(annotation):
        for model in kinds(member).values() if kinds(member) else filter(None, [section(member)]):
            field = model.model_fields.get(path[0])
            if field and exists(of_field(field), field.default, path[1:]):
                return True
        if path[0] == {dict: "NAME", list: "N"}.get(shape(member)) and exists(
            item(member), None, path[1:]
        ):
            return True
    inside = plain_data(default)
    inside = dict(enumerate(inside)) if isinstance(inside, list) else inside
    keys = {str(key): value for key, value in inside.items()} if isinstance(inside, dict) else {}
    return path[0] in keys and exists(Any, keys[path[0]], path[1:])


@pytest.mark.parametrize(
    "key", sorted({key for row in ROWS for key in row.get("ours", "").split()})
)
def test_what_a_foreign_name_leads_to_is_a_key_of_the_schema(key):
    assert exists(Config, None, key.split("."))


def test_no_foreign_name_stands_in_two_rows():
    names = [name for row in ROWS for name in row["theirs"].split()]
    assert sorted(names) == sorted(set(names))


def test_a_row_without_keys_says_why():
    assert all(row.get("ours") or row.get("remark") for row in ROWS)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.lr=1e-3", "here that is optimizer.learning_rate (the peak)"),
        (
            "num_train_epochs=3",
            "here that is train.epochs",
        ),
        (
            "per_device_train_batch_size=4",
            "here that is train.batch_size (rows in a step: per device x devices x "
            "train.accumulate)",
        ),
        (
            "training={local-batch-size: 4, seq_len: 8}",
            "training.seq_len: here that is data.seq_len",
        ),
        ("lora.r=8", "here that is lora.rank"),
        ("objective.kind=dpo", "those of objective.kind=preference (objective.loss)"),
        ("lora={target_modules: [q_proj]}", "here that is lora.targets (regular expressions"),
        ("packing=true", "here that is data.packing"),
        ("optimizer.name=lion", "here that is optimizer (a preset's name"),
        *(
            (f"data.sources=[{{kind: text, {key}: a.txt}}]", "here that is data.sources.N.files")
            for key in ("path", "paths", "file")
        ),
        *(
            (
                f"data.sources=[{{kind: jsonl, files: [a], {key}: b}}]",
                "here that is data.sources.N.field",
            )
            for key in ("text_column", "text_field")
        ),
        (
            "data.tokenizer={kind: huggingface, path: a, name: b}",
            "here that is data.tokenizer.path",
        ),
        ("checkpoint.interval=5", "here that is checkpoint.every (steps)"),
        ("train.logging_steps=10", "every step is logged"),
        (
            "optimizer.schedule.warmup_ratio=0.1",
            "here that is optimizer.schedule.warmup_steps (a share of train.steps as 2%)",
        ),
    ],
)
def test_a_key_of_another_framework_is_told_by_our_name(override, says):
    with pytest.raises(ConfigError) as caught:
        load("synthetic", [override])
    assert says in str(caught.value)


def test_our_own_key_in_a_section_of_another_kind_is_not_called_foreign():
    assert equivalent("model.blocks.block.mixer.window") == "" != equivalent("model.window")


EXAMPLES = {
    name[:-2]: re.search("'(.*)'", row["remark"])[1]
    for row in ROWS
    for name in row["theirs"].split()
    if name.endswith(".=")
}


@pytest.mark.parametrize("section", sorted(EXAMPLES.keys() - {"peft", "teacher"}))
def test_a_mapping_given_as_a_scalar_is_answered_by_an_example_that_is_taken(section):
    with pytest.raises(ConfigError, match=re.escape(f"such as {section}='")):
        load("quickstart", [f"{section}=x"])
    load("quickstart", [f"{section}={EXAMPLES[section]}"])
