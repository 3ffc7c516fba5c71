"""The watchdog beside real processes of one run, which need no devices for it: what ends whom, with
which code, and what is in the log."""

import json
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import sys
import time

import processes
import pytest

from maxstack import cli, train
from maxstack.faults import heartbeat, watchdog

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from maxstack import cli
from maxstack.errors import DataError
from maxstack.schema.faults import WatchdogConfig
from maxstack.faults.heartbeat import Heartbeat

number, count, folder, fault, who = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
turn = iter(range(9))

def exchange(topic, value, wait_ms=0):
    at = next(turn)
    for path in (folder / f"{at}-{number}.tmp",):
        path.write_text(json.dumps(value))
        path.rename(path.with_suffix(".value"))
    while not all((folder / f"{at}-{n}.value").exists() for n in range(count)):
        time.sleep(0.01)
    return [json.loads((folder / f"{at}-{n}.value").read_text()) for n in range(count)]

def hang_here():
    while True:
        time.sleep(1)

def main(_):
    others = SimpleNamespace(number=number, count=count, exchange=exchange, own_address=lambda: "127.0.0.1", key=b"k" * 32)
    with Heartbeat(WatchdogConfig(step=3.0), folder / "log.txt", others) as heart:
        for step in range(1, 21 if fault == "none" else 10_000):
            heart.doing("steps", step, 0.01)
            time.sleep(0.05)
            if step == 8:
                (folder / f"at-{number}").touch()
            if fault == "orphan" and step == 8:
                os.kill(heart._process.pid, 9)
                time.sleep(0.5)
                heart.doing("steps", step + 1, 0.01)
                return 0
            if step > 8 and who == number and all((folder / f"at-{n}").exists() for n in range(count)):
                if fault == "error":
                    raise DataError("line 7 of x.jsonl is not JSON")
                if fault == "hang":
                    heart.doing("save")
                    heart.doing("steps")
                    hang_here()
    return 0

sys.exit(cli.run(main, []))
"""  # noqa: E501


def run(folder, count, fault="none", who=-1):
    """The processes, once each has done some steps."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"{i}", f"{count}", str(folder), fault, f"{who}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    processes.until(lambda: all((folder / f"at-{i}").exists() for i in range(count)), 60)
    return started


def ended(started):
    """Exit codes and outputs."""
    outputs = [process.communicate(timeout=60)[0] for process in started]
    return [process.returncode for process in started], outputs


@pytest.mark.slow
def test_a_run_that_ends_is_left_alone(tmp_path):
    assert ended(run(tmp_path, 3)) == ([0] * 3, [""] * 3)
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.slow
def test_a_process_that_outlives_its_run_is_not_watched(tmp_path):
    """As a notebook does, or this one, which would be ended an hour later."""
    path = processes.write_config(tmp_path, eval={"every": 0}, checkpoint={"every": 0})
    assert cli.run(train.main, [str(path), "train.steps=1"]) == 0
    assert heartbeat._current._process.poll() == -signal.SIGKILL


def test_a_watchdog_without_a_process_exits(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    given = {
        "line": theirs.fileno(),
        "pid": process.pid,
        "process": 0,
        "processes": 1,
        "log": str(tmp_path / "log.txt"),
        "stacks": str(tmp_path / "stacks"),
        "step": 3.0,
        "retry": 42,
    }
    done = subprocess.run(
        [sys.executable, watchdog.__file__, json.dumps(given)],
        pass_fds=[theirs.fileno()],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (
        f"process 0 (pid {process.pid} on " in done.stderr
        and "ended without a message" in done.stderr
    )
    line.close()


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_code_and_says_where(tmp_path, who):
    started = run(tmp_path, 3, "error", who)
    while started[0].poll() is None:
        time.sleep(0.005)
    assert all(process.poll() is not None for process in started), (
        "process 0, whose loss jax answers with an abort, leaves last"
    )
    codes, outputs = ended(started)
    assert codes == [2] * 3 and "error: line 7 of x.jsonl is not JSON\n" in outputs[who]
    assert all(
        f"process {who}" in output and "ended with an error: DataError: line 7 of x.jsonl" in output
        for output in outputs
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.slow
def test_a_hang_ends_all_with_42_and_logs_every_stack(tmp_path, count):
    codes, _ = ended(run(tmp_path, count, "hang", who=0))
    log = (tmp_path / "log.txt").read_text()
    assert (
        codes == [42] * count and "no sign of life from process 0" in log and "in hang_here" in log
    )
    assert log.count("stacks of process") == count
    if count > 1:
        assert all(re.search(rf"  process {i} .*: steps, step \d+\n", log) for i in range(3))


@pytest.mark.parametrize("who", [0, 1])
def test_where_one_is_killed_the_others_leave_at_once(tmp_path, who):
    started = run(tmp_path, 3, "wait")
    began = time.monotonic()
    started[who].kill()
    codes, outputs = ended(started)
    assert time.monotonic() - began < 10
    assert codes == [-signal.SIGKILL if i == who else 42 for i in range(3)]
    assert all(
        f"process {who}" in output and "ended without a message" in output for output in outputs
    )


@pytest.fixture
def still(tmp_path, monkeypatch):
    """(A process of two that sleeps, its watchdog here, its log); 5 s are 0.2."""
    monkeypatch.setattr(watchdog, "PAUSED", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    log = tmp_path / "log.txt"
    given = {"pid": process.pid, "process": 1, "processes": 2, "log": str(log), "step": 600.0}
    yield process, watchdog.Watchdog(line, given), log
    process.kill()
    process.wait()
    line.close()
    theirs.close()


def test_a_stopped_and_continued_process_is_named(still, capfd):
    process, watching, log = still
    watching._look()
    process.send_signal(signal.SIGSTOP)
    for _ in range(6):
        time.sleep(0.1)
        watching._look()
    assert not log.exists()
    process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    watching._look()
    watching._look()
    told = rf"process 1 \(pid {process.pid} on \S+\) stood still for 1 s \(stopped by a signal\)\n"
    assert re.fullmatch(f"[-0-9]+ [:0-9]+ {told}", log.read_text())
    assert re.fullmatch(told, capfd.readouterr().err)


def test_a_paused_machine_is_named(still):
    process, watching, log = still
    watching._look()
    time.sleep(0.6)  # no turn of the watchdog's either
    watching._look()
    watching._look()
    (line,) = log.read_text().splitlines()
    assert re.search(rf"process 1 \(pid {process.pid} on .*stood still for 1 s \(its whole", line)


@pytest.mark.slow
def test_a_run_of_one_process_that_is_stopped_goes_on_when_it_is_continued(tmp_path):
    started = run(tmp_path, 1)
    started[0].send_signal(signal.SIGSTOP)
    time.sleep(4)
    assert started[0].poll() is None
    os.kill(started[0].pid, signal.SIGCONT)
    assert ended(started) == ([0], [""])


@pytest.mark.slow
def test_a_process_that_lost_its_watchdog_says_so_once(tmp_path):
    codes, outputs = ended(run(tmp_path, 1, "orphan"))
    assert codes == [0] and outputs[0].count("the watchdog is gone") == 1


def test_connections_are_handed_over_to_the_watchdog(tmp_path):
    """As process 0's gets those of more processes than one message of the system carries."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    given = {"pid": os.getppid(), "process": 0, "processes": 3, "log": "", "step": 3.0, "retry": 42}
    own = watchdog.Watchdog(theirs, given)
    pairs = [socket.socketpair() for _ in range(2)]
    socket.send_fds(line, [b"{}"], [each.fileno() for each, _ in pairs])
    own._read_process()
    ends = [multiprocessing.connection.Connection(each.detach()) for _, each in pairs]
    for number, end in enumerate(ends, 1):
        end.send_bytes(json.dumps({"status": {"process": number}}).encode())
    for link in [*own._heard]:
        own._read_watchdog(link)
    assert sorted(status["process"] for status in own._others.values()) == [1, 2]
    for each in (line, theirs, *ends, *own._heard, *(ours for ours, _ in pairs)):
        each.close()
