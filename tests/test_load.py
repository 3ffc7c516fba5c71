"""The record of a run that somebody sent: what it names that would run code is neither taken nor
called."""

import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from maxstack import cli
from maxstack.config import Section, plain_data, trust
from maxstack.errors import ConfigError
from maxstack.inference.trained_model import config_of
from maxstack.load import INSTEAD, load, load_alone, load_record
from maxstack.report import run_folder
from maxstack.schema.config import Config

POLICY = {
    "objective": "grpo",
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 8},
    "eval": {"every": 0, "baselines": False},
    "train": {"batch_size": 8},
    "data": {
        "sources": [{"kind": "jsonl", "files": ["x.jsonl"], "record": {"kind": "prompts"}}],
        "template": "plain",
        "packing": "fit",
        "overlong": "drop",
        "seq_len": 128,
    },
}
GRAIN = {"kind": "grain", "call": "evil:made"}
KEYS = {
    "run.executable": {"run": {"executable": "sent/step"}},
    "run.compilation_cache": {"run": {"compilation_cache": "sent/xla"}},
    "xla.flags": {"xla": {"platform": "gpu", "flags": {"xla_gpu_cuda_data_dir": "sent"}}},
    "data.sources.0.call": {"data": {"sources": [{"kind": "function", "call": "evil:text"}]}},
    "data.sources.1.call": {"data": {"sources": [{"kind": "synthetic"}, GRAIN]}},
    "eval.data.sources.0.call": {"eval": {"data": {"sources": [GRAIN]}}},
    "rewards.0.call": POLICY | {"rewards": [{"kind": "function", "call": "evil:reward"}]},
    "rollout.environment.call": POLICY
    | {"rollout": POLICY["rollout"] | {"environment": {"call": "evil:Game"}}},
}
"""A key that names code -> a record with it."""


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """A function that writes the record of a run into sent/, whose code must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    (tmp_path / "evil.py").write_text("raise SystemExit('the code has run')")

    def write(sections, **files):
        folder = tmp_path / "sent"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        for name, content in {"config": sections, **files}.items():
            (folder / f"{name}.yml").write_text(yaml.safe_dump(content))
        return folder

    return write


def quickstart(sections):
    """A whole configuration with these sections."""
    Path("whole.yml").write_text(yaml.safe_dump({"extends": "quickstart", **sections}))
    return load("whole.yml")


def record(sections):
    """What a run of it writes."""
    return plain_data(quickstart(sections))


def at(part, key):
    for name in key.split("."):
        part = part[int(name)] if isinstance(part, tuple) else getattr(part, name)
    return part


@pytest.mark.parametrize("key", KEYS)
def test_code_that_a_record_names_is_refused_where_it_would_run(key, sent):
    folder = sent(record(KEYS[key]))
    for read in (lambda: load("sent/config.yml"), lambda: load_record(folder, runs_code=True)):
        with pytest.raises(ConfigError) as refusal:
            read()
        place = rf"^sent/config\.yml:\d+: {key}: "
        assert refusal.match(place) and refusal.match("--trust-code")


@pytest.mark.parametrize("key", KEYS)
def test_a_model_is_opened_without_the_code_of_its_record(key, sent, caplog):
    folder = sent(record(KEYS[key]))
    with caplog.at_level(logging.WARNING):
        cfg, own = config_of("sent", [])
    assert own.samefile(folder)
    assert re.search(rf"left out: sent/config\.yml:\d+: {key}: ", caplog.text)
    if key.endswith(".call"):
        assert at(cfg, key) == "maxstack.config.trust:refused"
    else:
        assert at(cfg, key) == at(load("quickstart"), key)


def test_what_stands_in_for_code_says_how_to_run_it():
    with pytest.raises(ConfigError, match="--trust-code"):
        trust.refused("prompt", "completion", {})


def test_a_record_that_extends_another_file_is_refused(sent):
    sent({"extends": "more.yml"}, more=record(KEYS["run.executable"]))
    with pytest.raises(ConfigError, match=r"^sent/config.yml: names sent/more.yml, .*--trust-code"):
        load("sent/config.yml")
    sent({"model": {"preset": "./more.yml"}}, more={})
    with pytest.raises(ConfigError, match=r"names sent/more.yml"):
        load("sent/config.yml")


def test_a_record_that_is_a_link_is_refused(sent):
    folder = sent({}, settings=record(KEYS["run.executable"]))
    (folder / "config.yml").unlink()
    (folder / "config.yml").symlink_to("settings.yml")
    for place in (".", "/"):
        os.chdir(place)
        with pytest.raises(ConfigError, match="config.yml: is a link|settings.yml: is a link"):
            load(str(folder / "config.yml"))


def test_a_file_that_extends_a_record_gets_its_code_from_the_user_alone(sent, tmp_path):
    sent(record(KEYS["run.executable"]))
    (tmp_path / "mine.yml").write_text("extends: sent/config.yml\ntrain: {steps: 9}")
    with pytest.raises(ConfigError, match=r"^sent/config\.yml:\d+: run\.executable"):
        load("mine.yml")
    (tmp_path / "mine.yml").write_text("extends: sent/config.yml\nrun: {executable: my.step}")
    assert load("mine.yml").run.executable == "my.step"
    assert load_alone("mine.yml").run.executable == "my.step"


def test_trust_code_takes_all(sent, monkeypatch, capsys):
    sent({"extends": "more.yml"}, more=record(KEYS["run.executable"]))
    monkeypatch.setitem(os.environ, trust.VARIABLE, "")
    assert cli.run(cli.main, ["config", "show", "sent/config.yml", "--trust-code"]) == 0
    assert os.environ[trust.VARIABLE]
    assert "executable: sent/step" in capsys.readouterr().out
    assert load("sent/config.yml").run.executable == "sent/step"
    assert config_of("sent", [])[0].run.executable == "sent/step"


def test_a_run_of_this_user_is_not_asked(sent, tmp_path):
    mine = quickstart(KEYS["run.compilation_cache"])
    folder = sent({})
    run_folder.write_records(mine, [], folder)
    assert load("sent/config.yml") == mine
    assert config_of("sent", [])[0] == mine
    with (folder / "config.yml").open("a") as file:
        file.write("# changed by somebody else\n")
    with pytest.raises(ConfigError, match="run.compilation_cache"):
        load("sent/config.yml")


def test_a_run_of_this_user_that_was_unpacked_elsewhere_is_asked(sent, tmp_path):
    mine = quickstart(KEYS["run.compilation_cache"])
    folder = sent({})
    run_folder.write_records(mine, [], folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="run.compilation_cache"):
        load("moved/config.yml")


def test_notes_that_others_may_write_vouch_for_nothing(sent, tmp_path):
    mine = quickstart(KEYS["run.compilation_cache"])
    run_folder.write_records(mine, [], sent({}))
    (tmp_path / "state/maxstack/runs").chmod(0o777)
    with pytest.raises(ConfigError, match="run.compilation_cache"):
        load("sent/config.yml")


def test_every_key_that_names_a_function_is_known_as_code():
    """The pattern of module:name, and paths to programs."""

    def below(section):
        yield section
        for each in section.__subclasses__():
            yield from below(each)

    assert Config  # which imports all sections
    named = {
        (section, name)
        for section in below(Section)
        for name, field in section.model_fields.items()
        if any(getattr(each, "pattern", None) == r"^[\w.]+:\w+$" for each in field.metadata)
    }
    assert len(named) == 4
    assert {name for _, name in named} <= INSTEAD.keys()


@pytest.mark.parametrize("command", ["train", "serve", "generate", "eval", "plan", "submit"])
def test_a_command_that_opens_a_run_takes_trust_code(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert "--trust-code" in capsys.readouterr().out
