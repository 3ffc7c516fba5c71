"""Evaluation inside training, on a tiny run."""

import threading

import numpy as np
import pytest
import tiny

from maxstack.data.feed import Feed
from maxstack.evals.held_out import Evaluator
from maxstack.report.log import Log
from maxstack.report.metrics import Writer

SOURCE = {"kind": "synthetic", "documents": 64, "length": 50, "holdout": 0.5}
DATA = {"sources": [SOURCE | {"vocab": tiny.VOCAB}], "seq_len": 48}


@pytest.fixture
def evaluate(tmp_path):
    """Evaluates the first weights of a run, logged to this folder."""
    run = tiny.make_run(tiny.config(data=DATA, eval={"every": 10, "steps": 1}))
    writer = Writer(tmp_path, first=True)
    evaluator = Evaluator(run, Log(tmp_path, 20, True), writer)
    yield lambda: evaluator(1, run.init().params)
    writer.close()


@pytest.mark.slow
def test_an_evaluation_reads_the_same_each_time_and_leaves_nothing_running(evaluate):
    before = {*threading.enumerate()}
    first, second = evaluate(), evaluate()
    assert first | {"eval_seconds": 0} == second | {"eval_seconds": 0}
    assert not [thread for thread in {*threading.enumerate()} - before if "prefetch" in thread.name]


def test_bytes_that_are_not_known_leave_bits_per_byte_out_and_say_why(
    evaluate, tmp_path, monkeypatch
):
    plain, unknown = Feed.__next__, np.full((8, 48), np.nan, np.float32)
    monkeypatch.setattr(Feed, "__next__", lambda feed: plain(feed) | {"bytes": unknown})
    evaluate()
    (row,) = tiny.metrics(tmp_path)
    assert "eval_loss" in row and "eval_bits_per_byte" not in row
    said = "no bits per byte: held-out token shards of an older version"
    assert said in (tmp_path / "log.txt").read_text()
