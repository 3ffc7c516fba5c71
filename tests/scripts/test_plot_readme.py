"""scripts/plot_readme.py: the pictures of README.md from the data beside them."""

import json
import runpy
import shlex
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from maxstack.commands import plan as plan_cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "plot_readme.py"


@pytest.fixture
def plot(monkeypatch, tmp_path):
    """The script, run in this process on a copy of the pictures -> what it left with."""
    shutil.copytree(ROOT / "docs" / "pictures", tmp_path / "pictures")
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])

    def run(*words):
        given = [str(SCRIPT), "--pictures", str(tmp_path / "pictures"), *map(str, words)]
        monkeypatch.setattr(sys, "argv", given)
        try:
            return runpy.run_path(str(SCRIPT), run_name="__main__") and 0
        except SystemExit as left:
            return left.code

    return run


def words(path):
    """The texts of a picture."""
    root = xml.etree.ElementTree.parse(path).getroot()
    return [element.text for element in root.iter() if element.text]


def test_the_pictures_are_up_to_date_and_shown(plot):
    assert plot("--check") == 0
    assert "(docs/pictures/loss.svg)" in (ROOT / "README.md").read_text()
    assert "(pictures/plan.svg)" in (ROOT / "docs" / "PLAN.md").read_text()
    assert "(pictures/tasks.svg)" in (ROOT / "docs" / "EVALUATION.md").read_text()


def test_the_page_about_profiles_shows_its_pictures():
    page = (ROOT / "docs" / "PROFILE.md").read_text()
    assert "(pictures/profile.svg)" in page and "(pictures/layers.svg)" in page


@pytest.mark.release
def test_a_trace_makes_new_pictures_of_a_profile(plot, tmp_path):
    from processes import train, write_config

    traced = ("train.profile={start: 2, steps: 2}", "train.steps=4", "checkpoint.every=0")
    train(write_config(tmp_path), *traced)
    assert plot("--profile", tmp_path / "run") == 0 and plot("--check") == 0
    assert f"$ maxstack profile {tmp_path / 'run'}" in "".join(
        words(tmp_path / "pictures" / "profile.svg")
    ).replace("    ", " ")
    assert {"forward", "backward", "optimizer"} <= {*words(tmp_path / "pictures" / "layers.svg")}


def test_new_metrics_make_a_new_curve(plot, tmp_path):
    rows = [{"step": n, "loss": 2.0 * n} for n in range(1, 31)]
    rows += [{"step": 1, "goodput": 0.5}, {"step": 30, "eval_loss": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot("--metrics", tmp_path / "metrics.jsonl") == 0 and plot("--check") == 0
    found = json.loads((tmp_path / "pictures" / "loss.json").read_text())
    assert found["training"] == [[10, 11.0], [20, 31.0], [30, 51.0]]
    assert found["held_out"] == [[30, 1.5]]


def test_tasks_are_drawn_by_step(plot, tmp_path):
    rows = [{"step": n, "tasks_seconds": 1, "tasks/a/acc": n / 9, "tasks/a/x": 1} for n in (0, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot("--tasks", tmp_path / "metrics.jsonl") == 0 and plot("--check") == 0
    found = json.loads((tmp_path / "pictures" / "tasks.json").read_text())
    assert found == {"a": [[0, 0.0], [9, 1.0]]}


def test_a_changed_screen_is_drawn_line_by_line(plot, tmp_path):
    (tmp_path / "pictures" / "plan.txt").write_text("$ maxstack plan x\n  a <b>\n\nFITS: all\n")
    assert "plan.svg" in plot("--check")
    assert plot() == 0 and {"  a <b>", "FITS: all"} <= {*words(tmp_path / "pictures" / "plan.svg")}


def test_the_command_of_the_screen_is_the_one_that_the_script_runs(plot, monkeypatch):
    shown = (ROOT / "docs" / "pictures" / "plan.txt").read_text().splitlines()[0]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import plot_readme

    assert shown == f"$ {plot_readme.PLAN}"
    assert plan_cli.configured(plan_cli.main.parse(shlex.split(shown)[3:])).train.batch_size == 256
