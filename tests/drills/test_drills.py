"""Every drill once, by `make test-release` each kind of its fault, from fixed seeds; `make drills`
draws others, many times. docs/RELIABILITY.md has their promises, word for word."""

import random
import re
import signal
from pathlib import Path

import processes
import pytest
import tiers

from drills import disks, runs
from drills.table import DRILLS
from maxstack.checkpoint import manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def beside(tmp_path_factory):
    """One folder for all drills, of all of pytest's processes, so that they share what is made
    once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if own.name.startswith("popen") else own) / "drills"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "number", tiers.of(DRILLS, slow=[number for number, drill in DRILLS.items() if drill.once])
)
def test_drill(number, beside, request):
    drill = DRILLS[number]
    if number == 4 and not disks.can_mount():
        pytest.skip("a full file system needs a mount of one's own")
    count = drill.once if "not release" in request.config.option.markexpr else drill.kinds
    found = drill.function(beside / f"{number}", count, random.Random(f"suite {number}"))
    assert found.injected >= count and found.lost == 0, "\n".join(found.notes)


def test_every_promise_is_documented():
    page = (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    rows = [f"| {drill.fault} | {drill.promise} |" for drill in DRILLS.values()]
    assert [row for row in rows if row not in page] == []


def test_every_row_of_what_ends_how_is_shown_by_a_drill_or_a_test():
    page = (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    table = page.partition("### How each failure ends")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) > 15
    for failure, *_, shown in rows:
        drills = re.findall(r"\d+", shown) if "drill" in shown else []
        named = re.findall(r"`(test_\w+)`", shown)
        assert drills or named, failure
        assert {*map(int, drills)} <= DRILLS.keys(), failure
        assert all(f"def {name}(" in tests for name in named), failure


@pytest.mark.release
def test_a_resume_that_one_process_refuses_ends_both_with_its_words(beside):
    config = runs.across(beside / "refused", checkpoint={"every": 4})
    runs.complete(config, "run", "train.steps=8", count=2)
    with runs.Started(config, "run", count=2, fault={"kind": "refuse"}, at=1) as started:
        codes = started.wait(60)
        assert codes == [1, 1], started.output()
        assert all("this process alone refuses" in started.output(i) for i in range(2))


@pytest.mark.release
def test_a_last_evaluation_that_was_cut_short_is_made_once_and_kept_with_its_step(beside):
    config = runs.settings(beside / "owed", checkpoint={"every": 8}, faults={"grace": 8.0})
    fault = {"kind": "stand", "where": "evaluation", "after": 2}  # at 0, 20 and 40
    with runs.Started(config, "run", fault=fault) as started:
        assert started.reach(20) and started.until(lambda: "stands still" in started.output())
        started.send(signal.SIGTERM)
        assert started.wait(60) == [42], started.output()
    folder = config.parent / "run"
    assert manifest.read(folder / "checkpoints" / "40")[0]["owed"]
    runs.complete(config, "run")
    assert "nothing left to do" in runs.complete(config, "run")
    figures = processes.rows(folder, "eval_loss")
    assert [row["step"] for row in figures] == [0, 20, 40]
    facts = manifest.read(folder / "checkpoints" / "40")[0]
    assert facts["eval_loss"] == figures[-1]["eval_loss"] and not facts["owed"]
    assert list(manifest.damages(folder / "checkpoints" / "40")) == []
