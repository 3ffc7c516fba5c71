"""`maxstack generate` in the terminal, over files, and after a kill."""

import io
import json
import signal
import subprocess
import sys
import time

import parity
import processes
import pytest
import served
from engines import SMALL

from maxstack import cli
from maxstack.commands.generate import main
from maxstack.errors import ConfigError, DataError

F32 = ("model.dtype=float32", f"run.compilation_cache={processes.COMPILED}", *SMALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(served.make(tmp_path_factory.mktemp("generate") / "model"))


def generate(model, *words):
    return cli.main(["generate", model, *F32, *words])


def generate_raising(model, *words):
    return main([model, *F32, *words])


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_prompt_is_gone_on_from_the_same_way_each_time(model, capsys):
    texts = []
    for _ in range(2):
        assert generate(model, "--prompt", "Hello", "--max-tokens", "12", "--seed", "3") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 3


@pytest.mark.slow
def test_several_answers_to_a_prompt_differ(model, capsys):
    assert generate(model, "--prompt", "Hello", "--n", "2", "--max-tokens", "12") == 0
    first, second = capsys.readouterr().out.split("--- 1 ---")
    assert first.removeprefix("--- 0 ---") != second


@pytest.mark.slow
def test_the_terminal_holds_a_conversation(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nMore\n"))
    assert generate(model, "--chat", "--system", "Be brief.", "--max-tokens", "4") == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_a_file_of_prompts_is_answered_in_its_order_with_tokens_and_logprobs(model, tmp_path):
    rows = [
        {"id": "a", "prompt": "Once"},
        {"id": 7, "tokens": [5, 6, 7]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    prompts, out = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl"
    words = ["--prompts", prompts, "--out", str(out), "--max-tokens", "5", "--ignore-eos"]
    assert generate(model, *words, "--n", "2") == 0
    answers = read(out)
    assert [(row["id"], row["choice"]) for row in answers] == [
        (key, choice) for key in ("a", 7, 2) for choice in (0, 1)
    ]
    for row in answers:
        assert len(row["tokens"]) == len(row["logprobs"]) == 5
        assert isinstance(row["text"], str) and row["finish_reason"] == "length"


@pytest.mark.slow
def test_a_stop_string_ends_an_answer_and_is_not_in_it(model, tmp_path):
    prompts, out = write_prompts(tmp_path / "p.jsonl", [{"prompt": "Once"}]), tmp_path / "o.jsonl"
    words = ["--prompts", prompts, "--max-tokens", "20", "--temperature", "0", "--ignore-eos"]
    assert generate(model, *words, "--out", str(out)) == 0
    whole = read(out)[0]["text"]
    out.unlink()
    assert generate(model, *words, "--out", str(out), "--stop", whole[3:5]) == 0
    (cut,) = read(out)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: whole.index(whole[3:5])]


@pytest.mark.release
def test_a_killed_command_goes_on_to_the_same_bytes(model, tmp_path):
    rows = [{"id": i, "prompt": f"Text {i}"} for i in range(24)]
    prompts, out = write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl"
    words = ["--prompts", prompts, "--max-tokens", "40", "--ignore-eos"]
    words += ["serve.max_requests=2", "serve.identical=strict"]
    assert generate(model, *words, "--out", str(tmp_path / "whole.jsonl")) == 0
    command = [sys.executable, "-m", "maxstack.cli", "generate", model, *F32, *words]
    unfinished = tmp_path / "o.jsonl.unfinished"
    process = subprocess.Popen([*command, "--out", str(out)])
    while not unfinished.exists() or unfinished.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with unfinished.open("ab") as file:
        file.write(b'[[3, 0], {"id": 3, "te')
    begun = unfinished.read_bytes().count(b"\n")
    assert 5 <= begun < 25
    with pytest.raises(ConfigError, match="was begun with another model, other prompts or other"):
        generate_raising(model, *words, "--out", str(out), "--seed", "1")
    assert generate(model, *words, "--out", str(out)) == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not unfinished.exists()


@pytest.mark.parametrize(
    "lines, message",
    [
        ("", "holds no prompt"),
        ("{", "p.jsonl:1: not JSON"),
        ('{"id": 1}', "p.jsonl:1: holds no prompt"),
        ('{"prompt": "a", "tokens": [1]}', "holds prompt and tokens"),
        ('{"prompt": 3}', "p.jsonl:1: prompt is 3, and must be text"),
        ('{"tokens": [1.5]}', "p.jsonl:1: tokens must be a list of whole numbers"),
        ('{"messages": []}', "p.jsonl:1: messages must be a list"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}',
            r"p.jsonl:1: messages\[0\].content: a part 'image'; only text can be read",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "add"}]}]}',
            r"p.jsonl:1: messages\[0\].tool_calls: .* is no call; wanted",
        ),
        (
            '{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}',
            "p.jsonl:2: line 1 has the id 1 too",
        ),
    ],
)
def test_a_file_of_prompts_with_a_mistake_is_refused_by_its_line(model, tmp_path, lines, message):
    (tmp_path / "p.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message):
        generate_raising(
            model, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o.jsonl")
        )


def test_a_prompt_that_the_engine_refuses_is_named_by_its_line(model, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", [{"tokens": [1]}, {"tokens": [1] * 99_999}])
    with pytest.raises(DataError, match="p.jsonl:2: the prompt is 99999 tokens long"):
        generate_raising(model, "--prompts", prompts, "--out", str(tmp_path / "o.jsonl"))


@pytest.fixture
def bare(tmp_path):
    """A model's folder without tokenizer and template, whose weights are not numbers."""
    parity.poisoned(parity.GOLDENS / "llama", tmp_path / "bare", float("nan"))
    return str(tmp_path / "bare")


def test_a_missing_chat_template_is_named_before_weights_are_read(bare, tmp_path):
    rows = write_prompts(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    for words in (["--chat"], ["--prompts", rows, "--out", str(tmp_path / "o.jsonl")]):
        with pytest.raises(ConfigError, match="bare: has no chat template"):
            generate_raising(bare, *words)


def test_a_missing_tokenizer_and_wrong_tokens_are_named_before_weights_are_read(bare, tmp_path):
    with pytest.raises(ConfigError, match="bare has no tokenizer"):
        generate_raising(bare, "--prompt", "a")
    rows = write_prompts(tmp_path / "p.jsonl", [{"tokens": [1]}, {"tokens": [99_999]}])
    with pytest.raises(DataError, match="p.jsonl:2: token 99999 is outside"):
        generate_raising(bare, "--prompts", rows, "--out", str(tmp_path / "o.jsonl"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompts", "p.jsonl"], "--prompts needs --out"),
        (["--prompt", "a", "--prompts", "p.jsonl"], "give --prompt or --prompts, not both"),
        (["--system", "a"], "--system: needs --chat"),
        (["--prompt", ""], "--prompt: is empty"),
        (["--prompts", "p.jsonl", "--out", "none/o.jsonl"], "the folder none does not exist"),
    ],
)
@pytest.mark.slow
def test_options_that_do_not_fit_are_refused(model, words, message):
    with pytest.raises(ConfigError, match=message):
        generate_raising(model, *words)
