"""Traces of jobs that run: asked for by a command, a signal and a file; refused, dropped, ended
early."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import processes
import pytest
import tiny
from forked import Forked
from processes import command, environment, rows, until, write_config

from maxstack import cli
from maxstack.compiled_steps import CompiledSteps
from maxstack.profile import trace_files
from maxstack.profile.analysis import summary
from maxstack.profile.tracer import Tracer
from maxstack.report import trace_requests
from maxstack.report.log import Log

ENDLESS = ("train.steps=1000000", "checkpoint.every=1000000")


def state_of(run, name):
    return trace_requests.answered(run, name)["state"]


@pytest.fixture
def job(tmp_path):
    """A run that trains until it is signalled, and its process; SIGUSR1 came before it compiled."""
    process = Forked(command(write_config(tmp_path), *ENDLESS), environment(), tmp_path / "output")
    until(lambda: (tmp_path / "run" / ".lock").exists())
    process.send_signal(signal.SIGUSR1)
    try:
        yield tmp_path / "run", process
    finally:
        process.kill()


@pytest.mark.release
def test_a_running_job_traces_when_it_is_asked_and_only_one_at_a_time(job, maxstack, capsys):
    run, process = job
    until(lambda: trace_files.traces(run))  # that of the signal
    assert cli.main(f"profile {run} --live --steps 2".split()) == 0
    assert "1 x cpu" in (told := capsys.readouterr()).out and "steps" in told.err
    first, second = trace_files.traces(run)
    assert len(summary(run, first).steps) == trace_requests.STEPS
    profile = summary(run)
    assert profile.steps == (second, second + 1) and profile.attributed > 0.99

    name = trace_requests.ask(run, 100_000, waits=True)
    until(lambda: state_of(run, name) == "tracing")
    assert "is in progress" in maxstack(f"profile {run} --live", code=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 42
    third = trace_requests.answered(run, name)["first"]
    assert summary(run, third).steps[-1] == rows(run)[-1]["step"]
    assert "no job is training this run" in maxstack(f"profile {run} --live", code=1)


@pytest.fixture
def tracer(tmp_path):
    """A tracer of a run of 9 steps, in the same process."""
    (tmp_path / "run").mkdir()
    run = tiny.make_run(tiny.config(train={"steps": 9, "profile": {"start": 3, "steps": 2}}))
    tracer = Tracer(CompiledSteps(run).at(1), tmp_path / "run", Log(tmp_path / "run", 9, True))
    yield tracer
    tracer.close()


@pytest.mark.slow
def test_a_trace_of_steps_that_are_undone_is_dropped(tracer, tmp_path):
    tracer.before(3)
    assert tracer.tracing and not tracer.after(3, True)
    tracer.drop()
    told = (tmp_path / "run" / "log.txt").read_text()
    assert not tracer.tracing and "the run was rewound to a step before it" in told
    assert trace_files.traces(tmp_path / "run") == {}
    tracer.before(3)  # and taken when the steps are done again
    assert tracer.tracing


def test_a_step_that_passes_its_batch_over_is_no_step_of_a_trace(tracer, tmp_path):
    tracer.before(3)
    tracer.after(3, False)
    tracer.before(4)
    assert tracer.after(4, True)
    tracer.end()
    tracer.wait()
    _, facts = trace_files.read(trace_files.traces(tmp_path / "run")[3])
    assert facts.steps == [4] and facts.memory["needed"] > 0 and facts.allocations


def test_a_profiler_that_fails_does_not_end_the_job(tracer, tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def fails():
        stop()
        raise RuntimeError("no space left")

    tracer.before(3)
    tracer.after(3, True)
    monkeypatch.setattr(jax.profiler, "stop_trace", fails)
    tracer.end()
    told = (tmp_path / "run" / "log.txt").read_text()
    assert not tracer.tracing and "could not write it: no space left" in told


def test_a_request_waits_until_steps_run_and_may_be_withdrawn(tracer, tmp_path):
    run = tmp_path / "run"
    name = trace_requests.ask(run, 2, waits=True)
    time.sleep(1.2)
    assert state_of(run, name) == "asked"  # no step has begun
    trace_requests.withdraw(run, name)
    assert trace_requests.take(run) is None
    refused = trace_requests.ask(run, 0, waits=True)
    for step in (5, 6, 7, 8):
        tracer.before(step)
        tracer.after(step, True)
    until(lambda: state_of(run, refused) == "refused")


def test_requests_wait_side_by_side_and_one_that_nobody_holds_is_dropped(tmp_path):
    names = [trace_requests.ask(tmp_path, steps, waits=True) for steps in (1, 2, 3)]
    trace_requests.ask(tmp_path, 4)  # as a signal does, which nobody waits for
    folder = tmp_path / trace_requests.FOLDER
    for file in folder.iterdir():
        os.utime(file, (time.time() - trace_requests.STALE - 9,) * 2)
    trace_requests.hold(tmp_path, names[1])
    trace_requests.answer(tmp_path, names[1], "tracing", first=5)
    assert trace_requests.answered(tmp_path, names[0]) == {"state": "asked"}
    steps = [(trace_requests.take(tmp_path) or {}).get("steps") for _ in range(3)]
    assert steps == [4, 2, None]


def test_a_job_that_ends_or_dies_while_it_is_asked_is_told(tmp_path, monkeypatch, maxstack):
    run = tmp_path / "run"
    run.mkdir()
    ledger = run / "goodput.jsonl"
    ledger.write_text(json.dumps({"event": "begin", "time": 1.0}) + "\n")
    monkeypatch.setattr("maxstack.profile.live.SILENT", 0.5)
    assert "no more signs of life" in maxstack(f"profile {run} --live", code=1)
    assert not [*(run / "profile").glob("*.json")]
    time.sleep(0.1)
    assert "its last sign of life is" in maxstack(f"profile {run} --live", code=1)


def test_a_thread_looks_for_requests_so_that_no_step_does(tracer, monkeypatch):
    looked = []
    for name in ("take", "signalled"):
        monkeypatch.setattr(trace_requests, name, lambda *_: looked.append(threading.get_ident()))
    for step in range(5, 10):
        tracer.before(step)
        tracer.after(step, True)
    until(lambda: len(looked) > 1)
    assert threading.get_ident() not in looked


@pytest.mark.release
def test_processes_agree_on_the_step_from_which_on_they_trace(tmp_path, maxstack):
    mesh = ("run.virtual_devices=4", "mesh.data=4", "train.steps=100000", "eval.every=0")
    words = ["submit", write_config(tmp_path), "--target", "local", "--processes", 2, *mesh]
    submitted = subprocess.Popen(
        [sys.executable, "-m", "maxstack.cli", *map(str, words)],
        env=environment() | {"XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.DEVNULL,
    )
    run = tmp_path / "run"
    try:
        until(lambda: rows(run), 240)
        os.kill(processes.training(submitted.pid, 1), signal.SIGUSR1)
        first = until(lambda: [*trace_files.traces(run)])[0]
        of = [summary(run, first, process) for process in range(2)]
        assert of[0].steps == of[1].steps == (first, first + 1, first + 2)
        assert [profile.devices for profile in of] == [2, 2]
        assert "process 1 of 2" in maxstack(f"profile {run} --process 1")
    finally:
        submitted.terminate()
        assert submitted.wait(120) == 42
    assert "learned too late" not in Path(run / "log.txt").read_text()
