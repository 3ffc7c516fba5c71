"""`maxstack checkpoint` on the real checkpoints of a tiny run."""

import os
import shutil

import pytest
import tiny

from maxstack import cli
from maxstack.checkpoint import manifest
from maxstack.checkpoint.store import Checkpoints
from maxstack.config import dump
from maxstack.data.feed import Feed


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder with steps 1 to 3, and all of them in another tier."""
    top = tmp_path_factory.mktemp("made")
    tiers = [{"path": str(top / "far"), "every": 2}]
    cfg = tiny.config(run={"name": "tiny"}, checkpoint={"every": 1, "keep": 9, "tiers": tiers})
    made, folder = tiny.make_run(cfg), top / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(dump(cfg))
    feed, state = Feed(cfg.data, made.batches.rows(8), 8), made.init()
    saves = Checkpoints(made, folder / "checkpoints", print)
    for step in (1, 2, 3):
        saves.save(step, state, feed, {"skipped": [[4, 6]]}, {"eval_loss": 2.5})
    saves.close()
    return top


@pytest.fixture
def run(made, tmp_path):
    """A copy of it that knows its own place."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "runs" / "tiny" / "config.yml", tmp_path / "far" / "tiny" / "run.json"):
        path.write_text(path.read_text().replace(str(made), str(tmp_path)))
    return tmp_path / "runs" / "tiny"


def said(capsys, *words, code=0):
    assert cli.main(["checkpoint", *map(str, words)]) == code
    out = capsys.readouterr()
    return out.err if code and not out.out else out.out


@pytest.mark.slow
def test_list_names_every_step_in_every_tier(run, capsys):
    told = said(capsys, "list", run)
    assert (
        [line.split()[0] for line in told.splitlines()[1:]] == ["1", "2", "2", "3"]
        and "2.5000" in told
        and "far/tiny/2" in told
    )


def test_verify_says_what_is_damaged_and_leaves_with_1(run, capsys):
    assert "4 places of 3 steps: all intact" in said(capsys, "verify", run)
    victim = max(
        (run / "checkpoints" / "2").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    os.truncate(victim, 10)
    told = said(capsys, "verify", run, "--step", 2, code=1)
    assert (
        f"DAMAGED: {victim}: has 10 bytes" in told and "2 places of 1 step: 1 damaged file" in told
    )
    assert "is damaged and was not copied" in said(
        capsys, "copy", run, run.parent / "copy", "--step", 2, code=1
    )


def test_show_tells_the_arrays_of_a_step_and_the_batches_it_passed_over(run, capsys):
    told = said(capsys, "show", run)
    assert (
        told.startswith("step 3 of")
        and "batches 4 to 6 were skipped" in told
        and "params/embed" in told
        and "float32[320, 32]" in told
    )


def test_verify_names_a_step_that_lost_its_manifest(run, capsys):
    (run / "checkpoints" / "3" / "manifest.json").unlink()
    assert f"DAMAGED: {run / 'checkpoints' / '3' / 'manifest.json'}: is missing" in said(
        capsys, "verify", run, code=1
    )
    (run / "checkpoints" / "3.unfinished").touch()
    assert f"unfinished: {run / 'checkpoints' / '3'}: is being written" in said(
        capsys, "verify", run
    ), "of a run that is saving just now"


def test_verify_names_shards_of_different_saves(run, capsys):
    for number, save in enumerate(("7 000001", "7 000002")):
        part = run / "checkpoints" / "host_0" / "9" / f"of_{number}"
        part.mkdir(parents=True)
        manifest.write(part, {}, {"save": save})
    assert "DAMAGED: step 9: shards of different saves" in said(capsys, "verify", run, code=1)


def test_the_tiers_of_the_run_that_it_was_copied_from_are_not_a_copy_s(run, capsys):
    assert "far/tiny" in said(capsys, "list", run)
    shutil.copytree(run, run.parent / "copy")
    assert "far/tiny" not in said(capsys, "list", run.parent / "copy")


def test_a_run_is_named_by_a_relative_path_too(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert said(capsys, "show", "tiny").startswith("step 3 of tiny")


def test_a_copy_is_whole_and_can_be_started_from(run, capsys):
    told = said(capsys, "copy", run, run.parent / "copy", "--step", 1)
    assert "checkpoint.restore=" in told
    assert {p.name for p in (run.parent / "copy" / "1").iterdir()} == {
        p.name for p in (run / "checkpoints" / "1").iterdir()
    }
    assert "1 place of 1 step: all intact" in said(capsys, "verify", run.parent / "copy")
    assert "1 place of 1 step: all intact" in said(capsys, "verify", run.parent / "copy" / "1")
    assert "which holds the run's own steps" in said(
        capsys, "copy", run, run / "checkpoints" / "kept", code=1
    )
    assert "exists already" in said(capsys, "copy", run, run.parent / "copy", "--step", 1, code=1)


def test_prune_keeps_the_newest(run, capsys):
    assert "would delete 2 steps" in said(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert "deleted 2 steps" in said(capsys, "prune", run, "--keep", 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]
    assert "must be 1 or more" in said(capsys, "prune", run, "--keep", 0, code=1)


def test_prune_deletes_nothing_of_a_run_that_a_link_leads_to(run, tmp_path, capsys):
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "checkpoints").symlink_to(run / "checkpoints")
    (run / "config.yml").touch()
    assert "links to another run" in said(capsys, "prune", sent, "--keep", 1, code=1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "nowhere"], "nowhere: no such folder"),
        (["verify", "/etc/passwd"], "/etc/passwd: is a file; give a run's folder"),
        (["list", "."], "holds no finished checkpoint"),
    ],
)
def test_mistakes_are_told(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told in said(capsys, *words, code=1)


def test_a_step_that_is_not_there_is_told(run, capsys):
    assert "holds no step 7; it holds 1, 2, 3" in said(capsys, "show", run, "--step", 7, code=1)


def test_verify_names_a_file_that_the_manifest_does_not_list_and_counts_it_apart(run, capsys):
    odd = run / "checkpoints" / "2" / "state" / "odd"
    odd.write_text("x")
    told = said(capsys, "verify", run, "--step", 2, code=1)
    assert f"UNLISTED: {odd}: is not in manifest.json" in told and "DAMAGED" not in told
    assert "2 places of 1 step: all intact, 1 file that no manifest lists" in told


def test_verify_prints_names_with_escapes_and_names_what_lies_beside_the_steps(run, capsys):
    (run / "checkpoints" / "2" / "od\x1b[31md").write_text("x")
    (run / "checkpoints" / "notes\n.txt").write_text("x")
    (run / "checkpoints" / "9.unfinished").touch()
    told = said(capsys, "verify", run, code=1)
    assert "/2/od\\x1b[31md: is not in" in told and "\x1b" not in told
    strays = [line for line in told.splitlines() if line.startswith("stray")]
    assert strays == [f"stray: {run}/checkpoints/notes\\n.txt: belongs to no step"]
