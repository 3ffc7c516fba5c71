"""Declarations of commands, and what those of maxstack share."""

import os

import pytest

from maxstack import cli
from maxstack.command import (
    ALLOW_NONFINITE,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    check_writable,
    command,
    group,
    model_overrides,
    write,
)
from maxstack.errors import ConfigError

MEMBERS = {
    "checkpoint": ("list", "verify", "show", "copy", "prune"),
    "config": ("show", "diff", "schema"),
    "data": ("tokenizer", "prepare", "show"),
    "lora": ("export", "merge", "unmerge"),
    "quantize": ("show",),
}
WORDS = [
    *([name] for name in cli.COMMANDS),
    *([name, member] for name, members in MEMBERS.items() for member in members),
]


@command(
    "try",
    "Try.",
    "try MODEL",
    MODEL,
    OVERRIDES,
    WEIGHTS,
    ALLOW_NONFINITE,
    argument("--code", type=int),
)
def attempt(args):
    return args.code


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_help_describes_the_command_and_ends_with_an_example_of_it(words, capsys):
    assert cli.main([*words, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: maxstack {' '.join(words)} ")
    assert f" maxstack {words[0]} " in text[text.index("example") :]


def test_overrides_may_stand_before_and_after_options():
    args = attempt.parse(["m", "a=1", "--code", "3", "b=2"])
    assert args.overrides == ["a=1", "b=2"] and args.argv[0] == "m"


def test_overrides_of_one_call_are_not_those_of_the_next():
    given = ["m", "--allow-nonfinite", "--weights", "train"]
    assert model_overrides(attempt.parse(given)) == [
        "checkpoint.allow_nonfinite=true",
        "checkpoint.weights=train",
    ]
    assert model_overrides(attempt.parse(["m"])) == []


@pytest.mark.parametrize(("given", "used"), [(None, "cpu"), ("cuda", "cuda")])
def test_on_cpu_hides_accelerators_unless_a_platform_is_named(monkeypatch, given, used):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if given:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    seen = []
    command("x", "X.", "x", on_cpu=True)(lambda _: seen.append(os.environ["JAX_PLATFORMS"]))([])
    assert seen == [used]


def test_a_group_gives_its_member_the_other_words():
    members = group("top", "Top.", "top try m", attempt)
    assert members(["try", "m", "--code", "4"]) == 4


@pytest.mark.parametrize("words", [[], ["tr"], ["--code", "4"], ["--", "try", "m"]])
def test_a_group_refuses_other_words(words, capsys):
    assert cli.run(group("top", "Top.", "top try m", attempt), words) == 1
    assert "usage: maxstack top" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "problem"),
    [(".", "is a folder"), ("no/x", "the folder no does not exist"), ("x", None)],
)
def test_a_file_that_could_not_be_written_is_refused_before_the_work(
    file, problem, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if problem is None:
        check_writable("--out", file)
    else:
        with pytest.raises(ConfigError, match=f"--out {file}: {problem}; give a file"):
            check_writable("--out", file)


def test_a_file_that_the_system_refuses_is_a_users_error(tmp_path):
    with pytest.raises(ConfigError, match="--out .*: cannot be written: Is a directory"):
        write("--out", str(tmp_path), "text")
