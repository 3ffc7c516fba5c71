"""Evaluation inside training, on a tiny run."""

import threading

import tiny

from maxstack.evaluate import Evaluator
from maxstack.metrics import Log, Writer

DOCUMENTS = {"kind": "synthetic", "documents": 64, "length": 50, "vocab": tiny.VOCAB, "holdout": 0.5}


def test_an_evaluation_reads_the_same_each_time_and_leaves_nothing_running(tmp_path):
    run = tiny.make_run(tiny.config(data={"sources": [DOCUMENTS], "seq_len": 48}, eval={"every": 10, "steps": 1}))
    evaluator, state = Evaluator(run, Log(tmp_path, 20, True), Writer(tmp_path, False, True)), run.init()
    before = {*threading.enumerate()}
    assert evaluator(1, state) == evaluator(2, state)
    assert not [thread for thread in {*threading.enumerate()} - before if "prefetch" in thread.name]
