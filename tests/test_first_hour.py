"""What a newcomer guesses in the first hour ends in a sentence that names the mend."""

import json
import re
from types import SimpleNamespace

import pytest
import tiny

from maxstack import cli
from maxstack.data.conversations import read_example, read_prompt
from maxstack.data.examples import _remedy
from maxstack.errors import ConfigError, DataError
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.server.schemas import CompletionBody, parse_body
from maxstack.meter import PATIENCE, Meter
from maxstack.rewards.runner import ARGUMENTS, _check_takes

DATA = "data.sources=[{kind: jsonl, files: [d.jsonl], record: %s}]"
# `config show` reads a configuration as `train` does, and is quicker.
GUESSES = {
    "config show d.jsonl": r"'data\.sources=\[\{kind: jsonl, files: \[d\.jsonl\]\}\]'",
    "config show folder": r"files: \['folder/\*\*/\*'\]",
    "config show model": r"the folder of a model: maxstack train quickstart model\.from=model",
    "config show gpt2": "is a preset of model, not a whole .* quickstart model=gpt2",
    "config show Qwen/Qwen3-0.6B": r"model\.from=Qwen/Qwen3-0\.6B",
    "config show quickstart model=run": r"a run's; model\.from=run starts from it",
    "config show quickstart model.from=runs": "is a folder of runs; give one: a",
    "sft d.jsonl": r"for that: maxstack train sft model\.from=FOLDER",
    "chat run": "for that: maxstack generate MODEL --chat",
    "config show quickstart --lr 1e-4": r"--lr: here that is optimizer\.learning_rate.*key=value",
    "config show --model x": "settings are given as key=value",
    "generate run --max_tokens 3": "did you mean --max-tokens",
    "serve run --api-key abc": "did you mean --api-key-file",
    "generate a --prompt b": "did you mean runs/a",
    "eval run --tasks mmlu": "published ones, such as mmlu: --tasks-path FOLDER",
    "config show quickstart epochs=3": r"here that is train\.epochs",
    "config show quickstart num_generations=8": r"here that is rollout\.samples",
    "config show quickstart chat_template=x": r"here that is data\.template",
    f"config|show|quickstart|{DATA % '{kind: alpaca}'}": r"write record: \{preset: alpaca\}",
    f"config|show|quickstart|{DATA % '{preset: Alpaca}'}": "did you mean alpaca",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    for name in ("folder", "model", "run", "runs/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("run", "runs/a"):
        (tmp_path / name / "config.yml").write_text("extends: quickstart\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "said"), GUESSES.items(), ids=[*GUESSES])
def test_a_guess_is_told_what_to_write(here, capsys, words, said):
    assert cli.main(words.split("|" if "|" in words else None)) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in err
    assert re.search(said, err), err


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"instruction": "a", "output": "b"}, r"set record: \{preset: alpaca\}"),
        ({"prompt": "a", "response": "b"}, r"columns: \{completion: response\}"),
        ({"messages": [{"role": "user", "text": "a"}]}, "content is missing; it has role, text"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "content is empty, and a message without calls needs it",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "content=3: must be text"),
    ],
)
def test_a_record_of_another_shape_is_told_which_it_is(record, said):
    with pytest.raises(DataError, match=said):
        read_example(record)


def test_a_prompt_does_not_show_its_answer():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="ends with an answer of the assistant"):
        read_prompt({"messages": messages})


def test_a_json_array_is_told_how_to_become_lines():
    assert "jq -c" in _remedy(json.dumps([{"a": 1}]).encode())


def test_rewards_of_other_programs_are_told_how_ours_are_called():
    def of_verl(data_source, solution_str, ground_truth, extra_info=None):
        return 0.0

    with pytest.raises(
        ConfigError, match=r"data_source belongs to another program's .* \(prompt, com"
    ):
        _check_takes("rewards:of_verl", of_verl, ARGUMENTS[""])


def test_fields_of_other_servers_are_told_with_ours():
    with pytest.raises(Refusal, match="max_new_tokens=5.*here it is max_tokens"):
        parse_body(CompletionBody, b'{"model": "a", "prompt": "b", "max_new_tokens": 5}')


def test_samples_without_a_signal_are_told_once():
    meter = Meter(tiny.make_run(tiny.config()), SimpleNamespace(waited=0.0))
    silent, loud = {"groups_without_signal": 1.0}, {"groups_without_signal": 0.5}
    rows = [silent] * (PATIENCE - 1) + [loud] + [silent] * 3 * PATIENCE
    told = [[*meter.warnings(row)] for row in rows]
    ((line,),) = [lines for lines in told if lines]
    assert "no group of samples had a signal" in line
    assert told.index([line]) == 2 * PATIENCE - 1
