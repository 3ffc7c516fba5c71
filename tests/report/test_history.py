"""What metrics.jsonl says of a run: rows that count, thinned, and the index of large files."""

import json
import math
import random

import pytest

from maxstack.report import history
from maxstack.report.history import History
from maxstack.report.metrics import Writer


def row(step, loss=None, **more):
    return {"step": step, "loss": 1 / step if loss is None else loss, **more}


def write(folder, rows, end=""):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows)
    (folder / history.FILE).write_text(text + end)


def read(folder):
    found = History(folder)
    found.update()
    return found


def points(found, key="loss"):
    return dict(zip(*found.series()[0][key], strict=True))


def test_rows_of_steps_that_were_done_again_count_once_and_what_follows_them_is_undone(tmp_path):
    write(
        tmp_path,
        [
            *(row(step, step) for step in range(1, 9)),
            {"step": 6, "eval_loss": 0.5},
            *(row(step, 10 * step) for step in range(5, 7)),
            {"step": 7, "passed_over": 1},
            row(9, 90),
        ],
    )
    found = read(tmp_path)
    assert points(found) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 50, 6: 60, 9: 90}
    assert "eval_loss" not in found.series()[0] and found.rows == 13


def test_refused_and_passed_over_steps_are_told_even_where_they_are_undone(tmp_path):
    rows = [row(1), row(2, skipped=2.0), row(3, math.nan, skipped=1.0), row(2), row(3)]
    write(tmp_path, [*rows, {"step": 4, "passed_over": 1}])
    found = read(tmp_path)
    assert [*found.events] == [(2, "spike"), (3, "not finite"), (4, "passed over")]
    assert points(found) == {1: 1, 2: 1 / 2, 3: 1 / 3}


def test_damaged_lines_are_counted_and_an_unfinished_one_waits(tmp_path):
    lines = [row(1), '{"ste\n', "[1]\n", '{"step": "2"}\n', "\n", row(3)]
    write(tmp_path, lines, end='{"step": 4, "lo')
    found = read(tmp_path)
    assert (points(found), found.damaged) == ({1: 1, 3: 1 / 3}, 3)
    write(tmp_path, lines, end='{"step": 4, "loss": 4.0}\n')
    assert found.update() and points(found)[4] == 4 and not found.update()


def test_another_file_is_read_from_its_beginning(tmp_path):
    write(tmp_path, [row(step) for step in range(1, 9)])
    found = read(tmp_path)
    write(tmp_path, [row(1, 7.0)])
    assert found.update() and points(found) == {1: 7}


def test_many_points_are_thinned_to_two_thousand_with_extremes_and_means(tmp_path):
    dice = random.Random(0)
    losses = [dice.gauss(2, 0.1) for _ in range(7000)]
    losses[1234], losses[4321] = 50.0, -50.0
    write(tmp_path, [row(step, loss) for step, loss in enumerate(losses, 1)])
    thinned, means = read(tmp_path).series()
    steps, values = thinned["loss"]
    assert 1000 < len(steps) <= history.POINTS and (steps[0], steps[-1]) == (1, 7000)
    assert all(losses[step - 1] == value for step, value in zip(steps, values, strict=True))
    assert {(1235, 50.0), (4322, -50.0)} <= {*zip(steps, values, strict=True)}
    assert len(means["loss"][0]) == history.MEANS
    assert means["loss"][1][100] == pytest.approx(sum(losses[1750:1768]) / 18, abs=0.01)


@pytest.fixture
def small(monkeypatch):
    """Blocks of few rows, and a limit for large files that short ones exceed."""
    monkeypatch.setattr(history, "ROWS", 16)
    monkeypatch.setattr(history, "SMALL", 4000)


def train(folder, count, begin=1, scale=1.0):
    writer = Writer(folder, True)
    for step in range(begin, begin + count):
        writer.write(row(step, scale * (step % 97), skipped=2.0 * (step == 333)))
        if step % 50 == 0:
            writer.write({"step": step, "eval_loss": scale / step})
        if step % 100 == 0:
            writer.write({"step": step, "samples": [f"text of {step}"]})
    writer.close()


def test_a_large_file_keeps_the_extremes_events_and_texts_of_its_rows(tmp_path, small, monkeypatch):
    train(tmp_path, 1000)
    found = read(tmp_path)
    assert len(points(found)) < 500 and found.rows == 1030
    assert [*found.events] == [(333, "spike")]
    assert points(found, "eval_loss") == {step: 1 / step for step in range(50, 1001, 50)}
    assert max(points(found).values()) == 96 and min(points(found).values()) == 0
    assert found.texts(2) == [(900, "text of 900"), (1000, "text of 1000")]
    monkeypatch.setattr(history, "SMALL", 1 << 30)
    whole = read(tmp_path)
    assert points(found).items() <= points(whole).items() and whole.events == found.events


def test_a_run_that_went_back_within_a_block_of_a_large_file_is_read_exactly(tmp_path, small):
    train(tmp_path, 500)
    train(tmp_path, 400, begin=301, scale=1000.0)
    found = points(read(tmp_path))
    assert all(value == step % 97 for step, value in found.items() if step <= 300)
    assert all(value == 1000 * (step % 97) for step, value in found.items() if step > 300)
    assert 300 in found and 301 in found
