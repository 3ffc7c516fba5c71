"""The chips' peaks, and the writers."""

import io
import json
import sys

from maxstack.report.log import Log
from maxstack.report.metrics import Writer


def row(step):
    return {
        "step": step,
        "loss": 0.1 + 0.2,
        "tokens_per_second": 1234.5,
        "data_wait": 0.25,
        "mfu": 0.41,
    }


def test_metrics_keep_every_digit_and_survive_a_torn_last_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    writer = Writer(tmp_path, first=True)
    writer.write(row(2))
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"ste']
    assert json.loads(lines[2])["loss"] == 0.1 + 0.2


def console(tmp_path, monkeypatch, terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    log = Log(tmp_path, 3, first=True)
    for step in (1, 2, 3):
        log.step(row(step), 61.0)
    log.say("done")
    log.close()
    return out.getvalue()


def test_a_terminal_shows_one_live_line(tmp_path, monkeypatch):
    shown = console(tmp_path, monkeypatch, terminal=True)
    assert shown.count("\n") == 2 and shown.count("\r") == 3
    assert (
        "step 3/3 100%  loss 0.3000  1,234 tokens/s  mfu 41.0%  data wait 25%  1:01 left\ndone\n"
        in shown
    )


def test_elsewhere_the_first_and_last_step_are_plain_lines(tmp_path, monkeypatch):
    shown = console(tmp_path, monkeypatch, terminal=False)
    assert "\r" not in shown and [line.split()[1] for line in shown.splitlines()[:-1]] == [
        "1/3",
        "3/3",
    ]
    assert (tmp_path / "log.txt").read_text().count("\n") == 3


def test_only_the_first_process_writes(tmp_path):
    writer, log = Writer(tmp_path, first=False), Log(tmp_path, 3, first=False)
    writer.write(row(1))
    log.say("hello")
    assert not list(tmp_path.iterdir())
