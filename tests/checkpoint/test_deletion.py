"""Steps that are really deleted, as a run's retention does, while a command reads them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from maxstack import cli
from maxstack.checkpoint import manifest, survey
from maxstack.checkpoint.weights import WeightsReader, with_newest_step
from maxstack.commands import convert
from maxstack.errors import ConfigError
from maxstack.hf.contents import Contents

LLAMA = Path(__file__).parents[1] / "goldens" / "llama"
HOOKS = {
    "after the listing": (manifest, "steps", 1),
    "while files are verified": (manifest, "_fault", 2),
    "after the files were verified": (WeightsReader, "config", 1),
    "between two weights": (WeightsReader, "_read", 2),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run with steps 3 and 5, of the same weights."""
    run = tmp_path_factory.mktemp("imported") / "run"
    assert cli.run(convert.import_model, [str(LLAMA), "--out", str(run)]) == 0
    (run / "checkpoints/0").rename(run / "checkpoints/3")
    shutil.copytree(run / "checkpoints/3", run / "checkpoints/5")
    return run


@pytest.fixture
def run(imported, tmp_path):
    return Path(shutil.copytree(imported, tmp_path / "run"))


def delete_at(monkeypatch, step, module, name, turn, after=True):
    """Delete the step at a function's call of that number, before or after what it does."""
    plain, calls = getattr(module, name), []

    def hooked(*args, **kwargs):
        calls.append(name)
        due = len(calls) == turn
        if due and not after:
            manifest.delete(step)
        found = plain(*args, **kwargs)
        if due and after:
            manifest.delete(step)
        return found

    monkeypatch.setattr(module, name, hooked)


@pytest.mark.parametrize("when", HOOKS)
def test_an_export_whose_step_is_deleted_takes_the_next_newest(when, run, monkeypatch, capsys):
    step, out = run / "checkpoints/5", run.parent / "out"
    delete_at(monkeypatch, step, *HOOKS[when], after=when == "after the listing")
    assert cli.run(convert.export_model, [str(run), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{step}: was deleted meanwhile; looking for the newest step" in said.err
    assert f"{run} step 3 -> {out}" in said.out
    wanted, found = Contents(LLAMA).tensors, Contents(out).tensors
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name].array(), tensor.array())


@pytest.mark.parametrize("when", [*HOOKS][1:])
def test_a_named_step_that_is_deleted_is_an_error(when, run, monkeypatch, capsys):
    step = run / "checkpoints/5"
    delete_at(monkeypatch, step, *HOOKS[when], after=False)
    out = run.parent / "out"
    assert cli.run(convert.export_model, [str(step), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"error: {step}: was deleted meanwhile" in said and "checkpoints holds 3; name" in said
    assert "Traceback" not in said and not out.exists()


def test_other_errors_are_raised_unchanged(run):
    def fail(step):
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        with_newest_step(run, fail)

    def lose(step):
        manifest.delete(step)
        raise KeyError(step.name)

    with pytest.raises(ConfigError, match="holds no checkpoint"):
        with_newest_step(run, lose)


def said(capsys, *words):
    code = cli.main(["checkpoint", *map(str, words)])
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "hook", "says", "code"),
    [
        (["verify"], (manifest, "damages"), "1 place of 2 steps: all intact", 0),
        (["verify", "--step", "5"], (manifest, "damages"), "checkpoints holds 3; name one", 1),
        (["show"], (survey, "step_of"), "step 3 of", 0),
        (["show", "--step", "5"], (survey, "step_of"), "holds no step 5; it holds 3", 1),
        (["copy", "TO"], (manifest, "damages"), "step 3, verified", 0),
        (["copy", "TO", "--step", "5"], (manifest, "damages"), "holds no step 5; it holds 3", 1),
    ],
)
def test_checkpoint_commands_tell_a_deleted_step_from_a_damaged_one(
    words, hook, says, code, run, monkeypatch, capsys
):
    plain, calls = getattr(*hook), []

    def hooked(path, *args, **kwargs):
        found = plain(path, *args, **kwargs)
        found = [*found] if hook[1] == "damages" else found
        if not calls and (hook[1] == "step_of" or path.name == "5"):
            calls.append(manifest.delete(run / "checkpoints/5"))
        return found

    monkeypatch.setattr(*hook, hooked)
    verb, *more = [word.replace("TO", str(run.parent / "copy")) for word in words]
    found, told = said(capsys, verb, run, *more)
    assert (found, says in told) == (code, True), told
    assert "DAMAGED" not in told and "Traceback" not in told
    assert (
        "5: was deleted meanwhile" in told
        or f"deleted during verification: {run}/checkpoints/5" in told
    )


def test_a_list_leaves_out_what_is_deleted_meanwhile(run, monkeypatch, capsys):
    delete_at(monkeypatch, run / "checkpoints/5", survey, "find_steps", 1)
    code, told = said(capsys, "list", run)
    assert code == 0 and [line.split()[0] for line in told.splitlines()] == ["step", "3"]
