"""The books of a process, kept as train keeps them, and read back."""

import collections
import json
import math
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from maxstack.report.goodput import FILE, summary
from maxstack.report.ledger import Ledger


def rows(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def near(value):
    return pytest.approx(value, abs=0.15)


def slept(seconds):
    """The seconds that a sleep really took: on a busy machine more."""
    begin = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - begin


def a_process(folder, begin, steps, end=True, every=1.0, took=None):
    """Start-up, restore and compile of 0.05 s and more each, then steps that took 0.01 s, a save
    after each tenth; `took` counts the real seconds of each."""
    took = collections.Counter() if took is None else took
    ledger = Ledger(folder, True, time.monotonic() - 0.2, every)
    with ledger.spent("restore"):
        took["restore"] += slept(0.05)
    ledger.resume(begin)
    with ledger.spent("compile"):
        took["compile"] += slept(0.1)
    ledger.begin_steps()
    for step in steps:
        time.sleep(0.01)
        ledger.step(step, 0.01, 0.002)
        if step % 10 == 0:
            with ledger.spent("save"):
                took["save"] += slept(0.02)
    return ledger.close() if end else ledger


def test_a_run_of_two_processes_adds_up_to_the_time_from_the_first_beginning_to_the_last_end(
    tmp_path,
):
    started, took = time.monotonic() - 0.2, collections.Counter()
    a_process(tmp_path, 0, range(1, 21), took=took)
    took["idle"] = slept(0.3) - 0.2
    found = a_process(tmp_path, 10, range(11, 31), took=took)
    wall = time.monotonic() - started
    assert found == summary(tmp_path)
    assert found.wall == near(wall) and math.isclose(
        sum(found.seconds.values()), found.wall, abs_tol=1e-6
    )
    assert found.seconds["useful"] == pytest.approx(30 * 0.008) and found.seconds[
        "data wait"
    ] == pytest.approx(30 * 0.002)
    assert found.seconds["lost work"] == pytest.approx(0.1) and (
        found.steps,
        found.lost_steps,
        found.restarts,
    ) == (30, 10, 1)
    assert {*took} == {"restore", "compile", "save", "idle"}
    assert {name: found.seconds[name] for name in took} == near(took)
    assert found.seconds["start-up"] == near(0.4)


def test_what_is_nested_is_spent_once(tmp_path):
    ledger = Ledger(tmp_path, True)
    with ledger.spent("restore"):
        time.sleep(0.1)
        with ledger.spent("compile"):
            time.sleep(0.3)
        time.sleep(0.1)
    found = ledger.close()
    assert (
        found.seconds["compile"] == near(0.3)
        and found.seconds["restore"] == near(0.2)
        and found.seconds["start-up"] == near(0.0)
    )


def test_a_long_wait_leaves_signs_of_life_and_is_booked_to_its_cause_though_it_never_ended(
    tmp_path,
):
    ledger = Ledger(tmp_path, True, every=0.05)
    with ledger.spent("compile"):
        time.sleep(0.5)
        found = summary(tmp_path)
    assert found.seconds["compile"] > 0.3 and "end" not in {row["event"] for row in rows(tmp_path)}
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
    past = a_process(tmp_path, 0, range(1, 11))
    ledger = a_process(tmp_path, 10, range(11, 21), end=False, every=0.3)
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


def test_a_torn_last_line_is_left_and_the_next_process_begins_on_its_own(tmp_path):
    first = a_process(tmp_path, 0, range(1, 11))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "spent", "ti')
    found = a_process(tmp_path, 10, range(11, 21))
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
    print(step, flush=True)
"""


def test_a_killed_process_has_lived_until_its_last_row(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        began = time.monotonic()
        while int(process.stdout.readline()) < 100:
            pass
        process.kill()
        assert process.wait() == -signal.SIGKILL
    killed = time.monotonic()
    time.sleep(0.8)
    found = a_process(tmp_path, 40, range(41, 61))
    assert 30 < found.lost_steps <= 60 + 20 and found.steps == 60
    assert (
        0.5 < found.seconds["idle"] < time.monotonic() - killed
        and found.wall < time.monotonic() - began + 5
    )
    assert math.isclose(sum(found.seconds.values()), found.wall, abs_tol=1e-6)


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
        and "the run goes on" in done.stderr
    )
    found = summary(tmp_path)
    assert found.steps == 60 and found.seconds["useful"] == pytest.approx(0.6) and not found.remarks


def test_a_run_that_ended_in_an_error_leaves_no_thread_behind(tmp_path):
    ledger = Ledger(tmp_path, True, every=0.01)
    ledger.stop()
    ledger._thread.join(5)
    assert not ledger._thread.is_alive()
