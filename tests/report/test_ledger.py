"""The books of a process, kept as train keeps them, and read back."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
from processes import until

from maxstack.report.goodput import FILE, so_far, summary
from maxstack.report.ledger import Ledger


def rows(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


class Clock:
    """A clock that goes on only where a test sleeps: other work on the machine costs no time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return 1.7e9 + self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("maxstack.report.ledger.time", found)
    return found


def a_process(folder, begin, steps, clock, end=True, every=1.0):
    """Start-up of 0.2 s, restore of 0.05 s, compile of 0.1 s, then steps that took 0.01 s, a save
    of 0.02 s after each tenth."""
    ledger = Ledger(folder, True, clock.monotonic(), every)
    clock.sleep(0.2)
    with ledger.spent("restore"):
        clock.sleep(0.05)
    ledger.resume(begin)
    with ledger.spent("compile"):
        clock.sleep(0.1)
    ledger.begin_steps()
    for step in steps:
        clock.sleep(0.01)
        ledger.step(step, 0.01, 0.002)
        if step % 10 == 0:
            with ledger.spent("save"):
                clock.sleep(0.02)
    return ledger.close() if end else ledger


def test_a_run_of_two_processes_adds_up_to_the_time_from_the_first_beginning_to_the_last_end(
    tmp_path, clock
):
    began = clock.monotonic()
    a_process(tmp_path, 0, range(1, 21), clock)
    clock.sleep(0.3)
    found = a_process(tmp_path, 10, range(11, 31), clock)
    assert found == summary(tmp_path)
    assert found.wall == pytest.approx(clock.monotonic() - began)
    assert sum(found.seconds.values()) == pytest.approx(found.wall)
    assert (found.steps, found.lost_steps, found.restarts) == (30, 10, 1)
    wanted = {
        "useful": 30 * 0.008, "data wait": 30 * 0.002, "lost work": 10 * 0.01, "start-up": 0.4,
        "restore": 0.1, "compile": 0.2, "save": 4 * 0.02, "idle": 0.3,
    }  # fmt: skip
    assert {name: found.seconds[name] for name in wanted} == pytest.approx(wanted)


def test_what_is_nested_is_spent_once(tmp_path, clock):
    ledger = Ledger(tmp_path, True)
    with ledger.spent("restore"):
        clock.sleep(0.1)
        with ledger.spent("compile"):
            clock.sleep(0.3)
        clock.sleep(0.1)
    found = ledger.close()
    wanted = {"compile": 0.3, "restore": 0.2, "start-up": 0.0}
    assert {name: found.seconds[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)


def test_a_long_wait_leaves_signs_of_life_and_is_booked_to_its_cause_though_it_never_ended(
    tmp_path,
):
    ledger = Ledger(tmp_path, True, every=0.05)
    with ledger.spent("compile"):
        until(lambda: summary(tmp_path).seconds.get("compile", 0.0) > 0.3)
    assert "end" not in {row["event"] for row in rows(tmp_path)}
    ledger.close()


def test_steps_are_written_in_bulk_by_another_thread(tmp_path, monkeypatch):
    writers = set()
    written = Ledger._write_rows
    monkeypatch.setattr(
        Ledger,
        "_write_rows",
        lambda self: (writers.add(threading.current_thread().name), written(self)),
    )
    ledger = Ledger(tmp_path, True, every=0.1)
    ledger.begin_steps()
    writers.clear()
    started = time.monotonic()
    for step in range(1, 501):
        time.sleep(0.001)
        ledger.step(step, 0.001, 0.0)
    most = (time.monotonic() - started) / 0.1 + 1
    assert writers == {"ledger"}
    ledger.close()
    bulks = [row["steps"] for row in rows(tmp_path) if "steps" in row]
    assert (
        1 < len(bulks) <= most + 1
        and bulks[0][0] == 1
        and bulks[-1][1] == 500
        and all(b[0] == a[1] + 1 for a, b in pairwise(bulks))
    )


def test_news_comes_once_each_time_it_is_written(tmp_path):
    past = a_process(tmp_path, 0, range(1, 11), time)
    ledger = a_process(tmp_path, 10, range(11, 21), time, end=False, every=0.3)
    while (share := ledger.news()) is None:
        time.sleep(0.01)
    assert ledger.news() is None
    assert 0 < share < past.share + ledger.close().share


def test_other_processes_than_the_first_keep_no_books(tmp_path):
    ledger = Ledger(tmp_path, False)
    with ledger.spent("restore"):
        ledger.resume(0)
    ledger.begin_steps()
    ledger.step(1, 0.1, 0.0)
    assert ledger.close() is None and ledger.news() is None and not list(tmp_path.iterdir())


def test_a_batch_that_is_passed_over_is_a_sign_of_life(tmp_path):
    told = []
    ledger = Ledger(tmp_path, False, doing=lambda *what: told.append(what))
    ledger.begin_steps()
    ledger.passed_over(7)
    assert told == [("first step",), ("steps", 7)]


def test_a_torn_last_line_is_left_and_the_next_process_begins_on_its_own(tmp_path, clock):
    first = a_process(tmp_path, 0, range(1, 11), clock)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "spent", "ti')
    found = a_process(tmp_path, 10, range(11, 21), clock)
    assert (found.steps, found.restarts) == (20, 1) and found.seconds["useful"] == pytest.approx(
        2 * first.seconds["useful"]
    )


KILLED = """
import sys, time
from pathlib import Path
from maxstack.report.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), True, every=0.1)
ledger.resume(0)
ledger.begin_steps()
for step in range(1, 1000):
    time.sleep(0.01)
    ledger.step(step, 0.01, 0.0)
"""


def test_a_killed_process_has_lived_until_its_last_row(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as process:
        until(lambda: so_far(tmp_path).steps >= 80)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done, first, last = summary(tmp_path).steps, rows(tmp_path)[0], rows(tmp_path)[-1]
    time.sleep(0.8)
    found = a_process(tmp_path, 40, range(41, 61), time)
    assert (found.lost_steps, found.steps) == (done - 40, 60)
    lived = first["monotonic"] + last["time"] - first["time"]
    (_, again) = (row["monotonic"] for row in rows(tmp_path) if row["event"] == "begin")
    assert found.seconds["idle"] == pytest.approx(again - lived) and again - lived >= 0.8
    assert math.isclose(sum(found.seconds.values()), found.wall, abs_tol=1e-6)
    assert found.wall <= time.monotonic() - first["monotonic"]


FULL = """
import resource, sys, time
from pathlib import Path
from maxstack.report.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), True, every=0.05)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
ledger.begin_steps()
for step in range(1, 61):
    time.sleep(0.01)
    ledger.step(step, 0.01, 0.0)
size = (Path(sys.argv[1]) / "goodput.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger.close()
print(size)
"""


def test_a_file_that_cannot_grow_for_a_while_loses_no_row_and_is_told_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (
        int(done.stdout) <= 300
        and done.stderr.count("goodput.jsonl") == 1
        and "the run continues" in done.stderr
    )
    found = summary(tmp_path)
    assert found.steps == 60 and found.seconds["useful"] == pytest.approx(0.6) and not found.remarks


def test_a_run_that_ended_in_an_error_leaves_no_thread_behind(tmp_path):
    ledger = Ledger(tmp_path, True, every=0.01)
    ledger.stop()
    ledger._thread.join(5)
    assert not ledger._thread.is_alive()
