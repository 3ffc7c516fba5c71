"""One parent a host: what it starts again and what not, with real processes, signals and a real
terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from processes import until

from maxstack.faults.supervisor import run
from maxstack.report import trace_requests

CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from maxstack.faults.supervisor import follow_parent

folder = Path(sys.argv[1])
def note(name, text):
    with (folder / name).open("a") as file:
        file.write(f"{text}\\n")

lives = json.loads((folder / "lives").read_text())
number = len((folder / "started").read_text().split()) if (folder / "started").exists() else 0
life = lives[min(number, len(lives) - 1)]
def leave(number, frame):
    note("signals", signal.Signals(number).name)
    if not life.get("deaf"):
        time.sleep(0.2)
        sys.exit(42)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
follow_parent()
note("started", os.getpid())
for event in life.get("books", []):
    note("goodput.jsonl", json.dumps({"time": time.time()} | event))
if "signal" in life:
    os.kill(os.getpid(), life["signal"])
while "code" not in life:
    time.sleep(0.02)
sys.exit(life["code"])
"""
PARENT = """
import sys
from pathlib import Path
from maxstack.faults.supervisor import run
sys.exit(run([sys.executable, sys.argv[1] + "/child.py", sys.argv[1]], Path(sys.argv[1]), pause=0.01))
"""  # noqa: E501


@pytest.fixture
def lives(tmp_path):
    """Writes what the child does in each of its lives, the last one for ever -> the command that
    starts it."""

    def write(*lives):
        (tmp_path / "child.py").write_text(CHILD)
        (tmp_path / "lives").write_text(json.dumps(lives))
        return [sys.executable, str(tmp_path / "child.py"), str(tmp_path)]

    return write


def started(folder):
    return len(wait_for(folder / "started").read_text().split())


def wait_for(path):
    return until(lambda: path.exists() and path.read_text().endswith("\n") and path, 20)


def steps(first, last):
    return [
        {"event": "resume", "step": first - 1},
        {"event": "spent", "steps": [first, last], "stepping": 1.0},
    ]


@pytest.mark.parametrize(
    ("codes", "code", "count"),
    [
        ([0], 0, 1),
        ([1], 1, 1),
        ([2, 0], 2, 1),
        ([-signal.SIGKILL, -signal.SIGSEGV, 0], 0, 3),
        ([134, 137, 70, 0], 0, 4),
    ],
)
def test_a_mistake_ends_it_and_a_stop_or_a_crash_is_started_again(
    codes, code, count, lives, tmp_path
):
    started_by = lives(*({"signal": -code} if code < 0 else {"code": code} for code in codes))
    assert (run(started_by, tmp_path, most=4, pause=0.01), started(tmp_path)) == (code, count)


@pytest.mark.parametrize(
    ("life", "code", "words"),
    [
        ({"code": 42}, 42, "left with 42: stopped, hung or lost a peer"),
        ({"signal": signal.SIGKILL}, 137, "killed by SIGKILL (out of memory?)"),
        ({"code": 139}, 139, "left with 139, as after SIGSEGV"),
        ({"code": 42, "books": steps(1, 5)}, 42, "goodput"),
    ],
)
def test_it_gives_up_after_restarts_without_progress(life, code, words, lives, tmp_path, capfd):
    assert (run(lives(life), tmp_path, most=3, pause=0.01), started(tmp_path)) == (code, 4)
    *restarts, last = capfd.readouterr().err.splitlines()
    assert (
        all(words in line for line in [*restarts, last])
        and last.startswith("supervise: gave up: ")
        and "3 restarts in a row" in last
    )
    for number, (line, pause) in enumerate(zip(restarts, ("0.01", "0.02", "0.04"), strict=True), 1):
        assert f"in {pause} s, {number} of at most 3 in a row without progress" in line


def test_new_steps_reset_the_count_of_restarts(lives, tmp_path, capfd):
    further = [{"code": 42, "books": steps(1 + 5 * i, 5 + 5 * i)} for i in range(5)]
    assert run(lives(*further, {"code": 0}), tmp_path, most=1, pause=0.01) == 0
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 6 and all(
        f"restart {i} in 0.01 s, 1 of at most 1" in line for i, line in enumerate(told[:5], 1)
    )
    assert (
        told[-1].startswith("supervise: done, after 5 restarts; goodput ")
        and "25 steps that count" in told[-1]
    )


@pytest.fixture
def parent(lives, tmp_path):
    """Starts a parent whose child does as told -> the process, once the child has begun."""
    running = []

    def start(*doings, **options):
        lives(*doings)
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", PARENT, str(tmp_path)],
                stderr=subprocess.PIPE,
                text=True,
                **options,
            )
        )
        wait_for(tmp_path / "started")
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_no_restart_follows(number, parent, tmp_path):
    process = parent({})
    for _ in range(2 if number == signal.SIGTERM else 1):
        process.send_signal(number)
        time.sleep(0.05)
    assert (
        "no restart follows: left with 42" in process.communicate(timeout=20)[1]
        and process.returncode == 42
    )
    assert (tmp_path / "signals").read_text().split() == [signal.Signals(number).name] and started(
        tmp_path
    ) == 1


def test_sigusr1_requests_a_trace(parent, tmp_path):
    process = parent({})
    process.send_signal(signal.SIGUSR1)
    until(lambda: [*(tmp_path / trace_requests.FOLDER).glob("request-*.json")], 20)
    assert process.poll() is None
    assert (trace_requests.take(tmp_path) or {})["steps"] == trace_requests.STEPS
    assert not (tmp_path / "signals").exists()


def test_a_second_interrupt_kills_the_child(parent, tmp_path):
    process = parent({"deaf": True})
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "signals")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 137 and started(tmp_path) == 1


def test_a_signal_while_no_child_runs_ends_the_pause(lives, tmp_path):
    lives({"code": 42})
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("pause=0.01", "pause=50"), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "restart 1 in 50 s" in process.stderr.readline()
    process.terminate()
    assert process.wait(timeout=20) == 42 and started(tmp_path) == 1
    process.communicate()


def test_an_interrupt_from_the_terminal_reaches_the_child_once(lives, tmp_path):
    lives({})
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", PARENT, str(tmp_path)])
    wait_for(tmp_path / "started")
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    os.close(terminal)
    assert (tmp_path / "signals").read_text().split() == ["SIGINT"]


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told by Linux")
def test_a_child_whose_parent_is_killed_is_asked_to_save_and_leave(parent, tmp_path):
    process = parent({})
    process.kill()
    assert wait_for(tmp_path / "signals").read_text() == "SIGTERM\n"
