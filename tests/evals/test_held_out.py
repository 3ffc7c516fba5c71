"""Evaluation inside training, on a tiny run."""

import threading

import numpy as np
import pytest
import tiny

from maxstack.data.feed import Feed
from maxstack.evals.held_out import Evaluator
from maxstack.report.log import Log
from maxstack.report.metrics import Writer

DOCUMENTS = {
    "kind": "synthetic",
    "documents": 64,
    "length": 50,
    "vocab": tiny.VOCAB,
    "holdout": 0.5,
}


@pytest.mark.slow
def test_an_evaluation_reads_the_same_each_time_and_leaves_nothing_running(tmp_path):
    run = tiny.make_run(
        tiny.config(data={"sources": [DOCUMENTS], "seq_len": 48}, eval={"every": 10, "steps": 1})
    )
    evaluator, state = (
        Evaluator(run, Log(tmp_path, 20, True), Writer(tmp_path, first=True)),
        run.init(),
    )
    before = {*threading.enumerate()}
    first, second = (evaluator(1, state.params) for _ in "12")
    assert first | {"eval_seconds": 0} == second | {"eval_seconds": 0}
    assert not [thread for thread in {*threading.enumerate()} - before if "prefetch" in thread.name]


def test_bytes_that_are_not_known_leave_bits_per_byte_out_and_say_why(tmp_path, monkeypatch):
    run = tiny.make_run(
        tiny.config(data={"sources": [DOCUMENTS], "seq_len": 48}, eval={"every": 10, "steps": 1})
    )
    log, writer = Log(tmp_path, 20, True), Writer(tmp_path, first=True)
    evaluator, state = Evaluator(run, log, writer), run.init()
    plain = Feed.__next__
    monkeypatch.setattr(
        Feed,
        "__next__",
        lambda feed: plain(feed) | {"bytes": np.full((8, 48), np.nan, np.float32)},
    )
    evaluator(1, state.params)
    writer.close()
    assert (
        "eval_loss" in (row := (tmp_path / "metrics.jsonl").read_text())
        and "eval_bits_per_byte" not in row
    )
    assert (
        "no bits per byte: held-out token shards of an older version"
        in (tmp_path / "log.txt").read_text()
    )
