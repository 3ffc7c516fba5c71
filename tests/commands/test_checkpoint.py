"""`maxstack checkpoint` on the real checkpoints of a tiny run."""

import os
import shutil

import pytest
import tiny

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


@pytest.mark.slow
def test_list_names_every_step_in_every_tier(run, maxstack):
    told = maxstack(f"checkpoint list {run}")
    assert [line.split()[0] for line in told.splitlines()[1:]] == ["1", "2", "2", "3"]
    assert "2.5000" in told and "far/tiny/2" in told


def test_verify_says_what_is_damaged_and_leaves_with_1(run, maxstack):
    assert "4 places of 3 steps: all intact" in maxstack(f"checkpoint verify {run}")
    files = [path for path in (run / "checkpoints" / "2").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    os.truncate(victim, 10)
    told = maxstack(f"checkpoint verify {run} --step 2", code=1)
    assert f"DAMAGED: {victim}: has 10 bytes" in told
    assert "2 places of 1 step: 1 damaged file" in told
    told = maxstack(f"checkpoint copy {run} {run.parent}/copy --step 2", code=1)
    assert "is damaged and was not copied" in told


def test_show_tells_the_arrays_of_a_step_and_the_batches_it_passed_over(run, maxstack):
    told = maxstack(f"checkpoint show {run}")
    assert told.startswith("step 3 of") and "batches 4 to 6 were skipped" in told
    assert "params/embed" in told and "float32[320, 32]" in told


def test_verify_names_a_step_that_lost_its_manifest(run, maxstack):
    step = run / "checkpoints" / "3"
    (step / "manifest.json").unlink()
    told = maxstack(f"checkpoint verify {run}", code=1)
    assert f"DAMAGED: {step / 'manifest.json'}: is missing" in told
    (run / "checkpoints" / "3.unfinished").touch()  # as of a run that is saving just now
    assert f"unfinished: {step}: is being written" in maxstack(f"checkpoint verify {run}")


def test_verify_names_shards_of_different_saves(run, maxstack):
    for number, save in enumerate(("7 000001", "7 000002")):
        part = run / "checkpoints" / "host_0" / "9" / f"of_{number}"
        part.mkdir(parents=True)
        manifest.write(part, {}, {"save": save})
    assert "DAMAGED: step 9: shards of different saves" in maxstack(
        f"checkpoint verify {run}", code=1
    )


def test_the_tiers_of_the_run_that_it_was_copied_from_are_not_a_copy_s(run, maxstack):
    assert "far/tiny" in maxstack(f"checkpoint list {run}")
    shutil.copytree(run, run.parent / "copy")
    assert "far/tiny" not in maxstack(f"checkpoint list {run.parent}/copy")


def test_a_run_is_named_by_a_relative_path_too(run, maxstack, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert maxstack("checkpoint show tiny").startswith("step 3 of tiny")


def test_a_copy_is_whole_and_can_be_started_from(run, maxstack):
    copy = f"checkpoint copy {run} {run.parent}/copy --step 1"
    assert "checkpoint.restore=" in maxstack(copy)
    made, own = (
        {p.name for p in (folder / "1").iterdir()}
        for folder in (run.parent / "copy", run / "checkpoints")
    )
    assert made == own
    for place in (f"{run.parent}/copy", f"{run.parent}/copy/1"):
        assert "1 place of 1 step: all intact" in maxstack(f"checkpoint verify {place}")
    told = maxstack(f"checkpoint copy {run} {run}/checkpoints/kept", code=1)
    assert "which holds the run's own steps" in told
    assert "exists already" in maxstack(copy, code=1)


def test_prune_keeps_the_newest(run, maxstack):
    assert "would delete 2 steps" in maxstack(f"checkpoint prune {run} --keep 1 --dry-run")
    assert "deleted 2 steps" in maxstack(f"checkpoint prune {run} --keep 1")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]
    assert "must be 1 or more" in maxstack(f"checkpoint prune {run} --keep 0", code=1)


def test_prune_deletes_nothing_of_a_run_that_a_link_leads_to(run, tmp_path, maxstack):
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "checkpoints").symlink_to(run / "checkpoints")
    (run / "config.yml").touch()
    assert "links to another run" in maxstack(f"checkpoint prune {sent} --keep 1", code=1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list nowhere", "nowhere: no such folder"),
        ("verify /etc/passwd", "/etc/passwd: is a file; give a run's folder"),
        ("list .", "holds no finished checkpoint"),
    ],
)
def test_mistakes_are_told(words, told, tmp_path, monkeypatch, maxstack):
    monkeypatch.chdir(tmp_path)
    assert told in maxstack(f"checkpoint {words}", code=1)


def test_a_step_that_is_not_there_is_told(run, maxstack):
    assert "holds no step 7; it holds 1, 2, 3" in maxstack(
        f"checkpoint show {run} --step 7", code=1
    )


def test_verify_names_a_file_that_the_manifest_does_not_list_and_counts_it_apart(run, maxstack):
    odd = run / "checkpoints" / "2" / "state" / "odd"
    odd.write_text("x")
    told = maxstack(f"checkpoint verify {run} --step 2", code=1)
    assert f"UNLISTED: {odd}: is not in manifest.json" in told and "DAMAGED" not in told
    assert "2 places of 1 step: all intact, 1 file that no manifest lists" in told


def test_verify_prints_names_with_escapes_and_names_what_lies_beside_the_steps(run, maxstack):
    (run / "checkpoints" / "2" / "od\x1b[31md").write_text("x")
    (run / "checkpoints" / "notes\n.txt").write_text("x")
    (run / "checkpoints" / "9.unfinished").touch()
    told = maxstack(f"checkpoint verify {run}", code=1)
    assert "/2/od\\x1b[31md: is not in" in told and "\x1b" not in told
    strays = [line for line in told.splitlines() if line.startswith("stray")]
    assert strays == [f"stray: {run}/checkpoints/notes\\n.txt: belongs to no step"]
