"""Records in the shapes of published data sets, each of a small file, without rewriting it."""

import json

import numpy as np
import pytest
from json_lines import write_rows

from maxstack.data.conversations import Completion, read_example, read_preference, read_prompt
from maxstack.data.examples import units_of
from maxstack.data.feed import Feed
from maxstack.data.presets import PRESETS, apply_preset, suggest_setting
from maxstack.data.sources import open_source
from maxstack.errors import ConfigError, DataError
from maxstack.load import load
from maxstack.schema.data import OF_PRESETS, DataConfig


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


WEATHER = {
    "name": "weather",
    "description": "The weather of a day.",
    "parameters": {
        "city": {"description": "Where", "type": "str"},
        "days": {"description": "Which", "type": "List[int], optional", "default": [0]},
    },
}
CALLED = {"name": "weather", "arguments": {"city": "Rome"}}
TREE = {
    "message_tree_id": "1",
    "prompt": {
        "text": "Hi",
        "role": "prompter",
        "replies": [
            {"text": "No.", "role": "assistant", "rank": 1, "replies": []},
            {
                "text": "Hello!",
                "role": "assistant",
                "rank": 0,
                "replies": [{"text": "Thanks", "role": "prompter", "replies": []}],
            },
        ],
    },
}
HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: 1 + 1?\n\nAssistant:"
CHATS = [
    (
        {"preset": "alpaca"},
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        [user("Add.\n\n1 and 2"), assistant("3")],
    ),
    (
        {"preset": "alpaca"},
        {
            "instruction": "And 2?",
            "input": "",
            "output": "4",
            "system": "Count.",
            "history": [["1 + 1?", "2"]],
        },
        [system("Count."), user("1 + 1?"), assistant("2"), user("And 2?"), assistant("4")],
    ),
    (
        {"preset": "dolly"},
        {"instruction": "Who?", "context": "Ada wrote.", "response": "Ada", "category": "qa"},
        [user("Who?\n\nAda wrote."), assistant("Ada")],
    ),
    (
        {"preset": "qa", "columns": {"answer": "response", "system": "system_prompt"}},
        {"id": "t0.1", "system_prompt": "Be brief.", "question": "Hi", "response": "Hello"},
        [system("Be brief."), user("Hi"), assistant("Hello")],
    ),
    (
        {"preset": "gsm8k", "kind": "chat"},
        {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
        [user("1 + 1?"), assistant("1 + 1 = <<1+1=2>>2\n#### 2")],
    ),
    ({"preset": "oasst"}, TREE, [user("Hi"), assistant("Hello!")]),
    (
        {"kind": "chat"},  # ToolACE, whose calls are text
        {
            "system": "You may call [weather].",
            "conversations": [
                {"from": "user", "value": "Rome?"},
                {"from": "assistant", "value": '[weather(city="Rome")]'},
                {"from": "tool", "value": "sun"},
                {"from": "assistant", "value": "Sun."},
            ],
        },
        [
            system("You may call [weather]."),
            user("Rome?"),
            assistant('[weather(city="Rome")]'),
            {"role": "tool", "content": "sun"},
            assistant("Sun."),
        ],
    ),
    (
        {"kind": "labelled"},  # trl-lib/kto-mix-14k
        {"prompt": [user("Hi")], "completion": [assistant("Hello!")], "label": True},
        [user("Hi"), assistant("Hello!")],
    ),
]
ASKED = [user("Hi"), assistant("Hello!"), user("1 + 1?")]
PAIRS = [
    ({"preset": "hh-rlhf"}, {"chosen": f"{HUMAN} 2", "rejected": f"{HUMAN} 3"}, ASKED),
    (
        {"preset": "nectar"},
        {
            "prompt": f"{HUMAN} ",
            "answers": [
                {"answer": "3", "model": "b", "rank": 4.0},
                {"answer": "2", "model": "a", "rank": 1.0},
                {"answer": "two", "model": "c", "rank": 2.0},
            ],
        },
        ASKED,
    ),
    (
        {"preset": "orca-pairs"},
        {"system": "Count.", "question": "1 + 1?", "chosen": "2", "rejected": "3"},
        [system("Count."), user("1 + 1?")],
    ),
]
PROMPTS = [
    (
        {"preset": "gsm8k"},
        {"question": "1 + 1?", "answer": "so it is\n#### 1,200"},
        ([user("1 + 1?")], "1,200"),
    ),
    (
        {"preset": "math"},
        {"problem": "1 + 1?", "level": "Level 1", "type": "A", "solution": r"\boxed{2}"},
        ([user("1 + 1?")], r"\boxed{2}"),
    ),
]


def config(record, path="a", **fields):
    source = {"kind": "jsonl", "files": [path], "record": record}
    return DataConfig.model_validate({"sources": [source]} | fields)


def kind_of(record):
    cfg = config(record)
    assert cfg.packing == "fit"
    return cfg.sources[0].record


@pytest.mark.parametrize(("record", "row", "messages"), CHATS)
def test_conversations(record, row, messages):
    assert read_example(apply_preset(row, kind_of(record))).messages == messages


def test_a_key_that_is_null_in_a_row_of_parquet_is_absent():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": messages, "prompt": None, "completion": None}
    assert read_example(row).messages == messages
    assert read_prompt({"messages": messages[:1], "prompt": None}).messages == messages[:1]


@pytest.mark.parametrize(("record", "row", "asked"), PAIRS)
def test_preferences(record, row, asked):
    chosen, rejected = read_preference(apply_preset(row, kind_of(record)))
    assert chosen.messages == [*asked, assistant("2")]
    assert rejected.messages == [*asked, assistant("3")]


@pytest.mark.parametrize(("record", "row", "wanted"), PROMPTS)
def test_prompts_and_what_rewards_compare_with(record, row, wanted):
    made = apply_preset(row, kind_of(record))
    assert (read_prompt(made).messages, made["answer"]) == wanted
    assert read_prompt(made).trained == 1


def test_calls_of_functions():
    """Salesforce/xlam-function-calling-60k, whose calls and functions are JSON in text."""
    row = {"query": "Rome?", "answers": json.dumps([CALLED]), "tools": json.dumps([WEATHER])}
    found = read_example(apply_preset(row, kind_of({"preset": "xlam"})))
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": CALLED}]
    (tool,) = found.tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "Which",
                "default": [0],
            },
        },
        "required": ["city"],
    }


def test_a_system_message_makes_texts_a_conversation():
    row = {"system": "Be brief.", "prompt": "Hi", "completion": "Hello"}
    assert read_example(row).messages == [system("Be brief."), user("Hi"), assistant("Hello")]
    assert isinstance(read_example(row | {"system": ""}), Completion)
    assert read_prompt(row).messages == [system("Be brief."), user("Hi")]


def test_a_file_is_trained_on_and_says_what_it_does_not_read(tmp_path):
    row = {"instruction": "Add.", "input": "1", "output": "3", "text": "all"}
    write_rows(path := f"{tmp_path}/a.jsonl", [row] * 3)
    tokenizer = {"kind": "bytes", "eos": True}
    data = config({"preset": "alpaca"}, path, tokenizer=tokenizer, template="plain", seq_len=64)
    feed = Feed(data, [0], 1)
    assert feed.describe() == ["jsonl-0: 3 documents; not read: text"]
    batch = next(feed)
    counted = batch["targets"][batch["mask"] == 1]
    assert bytes(counted[counted < 256].astype(np.uint8)).startswith(b"3")


@pytest.mark.parametrize(
    ("record", "row", "said"),
    [
        ({"preset": "alpaca"}, {"prompt": "a"}, "alpaca: no instruction in it; it has prompt"),
        ({"preset": "qa", "columns": {"question": "q"}}, {"question": "a"}, "columns: no q in it"),
        ({"preset": "hh-rlhf"}, {"chosen": "a", "rejected": "b"}, "begins with a blank line and"),
        ({"preset": "xlam"}, {"query": "a", "answers": "{", "tools": "[]"}, "not of this shape"),
    ],
)
def test_a_record_of_another_shape_is_told_with_its_place(tmp_path, record, row, said):
    write_rows(path := f"{tmp_path}/a.jsonl", [row])
    data = config(record, path)
    documents = open_source(data.sources[0])
    with pytest.raises(DataError, match=rf"a\.jsonl.*{said}"):
        units_of(documents, 0, data, {})


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"instruction": "a", "output": "b"}, "{preset: alpaca}"),
        ({"chosen": f"{HUMAN} 2", "rejected": f"{HUMAN} 3"}, "{preset: hh-rlhf}"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "{preset: orca-pairs}"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "{kind: pairs}"),
        ({"chosen": [user("a")], "rejected": [user("b")]}, "{kind: pairs}"),
        ({"prompt": "a", "completion": "b", "label": True}, "{kind: labelled}"),
        ({"prompt": "a", "completion": "b"}, "{kind: chat}"),
        ({"messages": []}, "{kind: chat}"),
        ({"prompt": "a", "response": "b"}, "{kind: chat, columns: {completion: response}}"),
        ({"prompt": None}, ""),
    ],
    ids=str,
)
def test_the_setting_that_is_suggested_reads_the_record(row, setting):
    assert suggest_setting(row) == (setting and f"record: {setting}")


def test_every_preset_has_its_kinds_and_a_wrong_one_is_refused(tmp_path):
    assert OF_PRESETS.keys() == PRESETS.keys()
    text = "data: {sources: [{kind: jsonl, files: [a], record: {preset: PRESET, kind: pairs}}]}"
    for preset, said in (("alpaca", "preset=alpaca gives chat"), ("alpacca", "alpaca")):
        (tmp_path / "run.yml").write_text(text.replace("PRESET", preset))
        with pytest.raises(ConfigError, match=said):
            load(tmp_path / "run.yml")
