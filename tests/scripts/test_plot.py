"""scripts/plot.py: pictures of the docs, and tables of docs/PERFORMANCE.md, from figures."""

import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from maxstack.commands import plan as plan_cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "plot.py"


@pytest.fixture
def plot(monkeypatch, tmp_path):
    """Run the script on a copy of the docs -> its exit code."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])

    def run(*words):
        given = [str(SCRIPT), "--docs", str(tmp_path / "docs"), *map(str, words)]
        monkeypatch.setattr(sys, "argv", given)
        try:
            return runpy.run_path(str(SCRIPT), run_name="__main__") and 0
        except SystemExit as left:
            return left.code

    return run


def test_the_tables_of_the_page_are_up_to_date(plot, tmp_path):
    assert plot("--check") == 0
    figures = tmp_path / "docs/performance/step-cpu.json"
    figures.write_text(figures.read_text().replace('"rounds": 7', '"rounds": 8'))
    assert "PERFORMANCE.md" in plot("--check")


def test_pictures_are_drawn_from_the_figures(plot, tmp_path):
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    pages = {path: path.read_text() for path in docs.glob("*.md")}
    drawn = {*docs.glob("p*/*.svg")}
    for path in drawn:
        path.unlink()
    assert plot() == 0
    assert {*docs.glob("p*/*.svg")} == drawn
    assert {path: path.read_text() for path in pages} == pages
    assert "blockwise" in (docs / "performance/cpu-attention-causal-64.svg").read_text()
    assert "model.head/cross_entropy" in (docs / "pictures/layers.svg").read_text()


def test_new_metrics_make_new_figures(plot, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": n, "loss": 2.0 * n} for n in range(1, 31)]
    rows += [{"step": 1, "goodput": 0.5}, {"step": 30, "eval_loss": 1.5}]
    rows += [{"step": n, "tasks_seconds": 1, "tasks/a/acc": n / 9, "tasks/a/x": 1} for n in (0, 9)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot("--metrics", metrics, "--tasks", metrics) == 0
    pictures = tmp_path / "docs/pictures"
    found = json.loads((pictures / "loss.json").read_text())
    assert found["training"] == [[10, 11.0], [20, 31.0], [30, 51.0]]
    assert found["held_out"] == [[30, 1.5]]
    assert json.loads((pictures / "tasks.json").read_text()) == {"a": [[0, 0.0], [9, 1.0]]}


def test_the_screen_shows_the_command_that_the_script_runs(monkeypatch):
    shown = (ROOT / "docs" / "pictures" / "plan.txt").read_text().splitlines()[0]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import plot

    assert shown == f"$ {plot.PLAN}"
    args = plan_cli.main.parse(shlex.split(shown)[3:])
    assert plan_cli.load_for(args.topology, args.config, args.overrides).train.batch_size == 256
