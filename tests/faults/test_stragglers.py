"""Which process is named as slow: by given numbers, and among real ones, of which one is stopped
again and again."""

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import pytest
from processes import environment

from maxstack.cluster.peers import Peers
from maxstack.faults.stragglers import (
    Speed,
    Stragglers,
    _medians,
    find_slow_devices,
    find_slow_hosts,
)

CHECKS = 6
JOINED = f"""
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from maxstack.cluster.peers import Peers
from maxstack.faults.stragglers import Lag, Stragglers
watched = Stragglers(1.5, 1, Peers())
for step in range(1, {CHECKS + 1}):
    report = watched.compare_speeds(step, Lag(1, 1.0, 0.01, 0.0))
    print(*report.lines, f"checked {{step}}: {{report.numbers}}", sep="\\n", flush=True)
    if step == 1:
        sys.stdin.readline()
"""


def speeds(*seconds, late=(), starved=0.0, step=1.0):
    late = late or [0.01] * len(seconds)
    return [
        Speed(
            f"host{i}",
            {str(2 * i + j): s for j, s in enumerate(mine if isinstance(mine, tuple) else (mine,))},
            step,
            late[i],
            starved,
        )
        for i, mine in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    "several, process, text",
    [
        (speeds(0.05, 0.07, 0.05, 0.06), None, ""),
        (speeds(0.05, 0.05, 0.09, 0.06), 2, "its devices need 90 ms for .* in 50 ms, 1.8 times"),
        (speeds(0.05, 0.01), 0, "its devices need 50 ms for .* in 10 ms, 5.0 times"),
        (speeds((0.1, 0.1), (0.1, 0.2)), 1, "its device 3 needs 200 ms for .* 2.0 times as long"),
    ],
)
def test_a_device_is_slow_by_the_median_of_all_others(several, process, text):
    found = find_slow_devices(several, 1.5)
    assert found.keys() == ({(process, "devices")} if text else set())
    assert all(re.match(text, reason) for reason in found.values())


@pytest.mark.parametrize(
    "late, starved, found",
    [
        ((0.1, 0.42, 0.1), 0.0, {}),
        (
            (0.1, 0.44, 0.1),
            0.4,
            {
                1: "all wait for its batches; its devices have nothing to do for 0.44 s of "
                "a step's 1 s, the others' for 0.1 s"
            },
        ),
        (
            (0.5, 0.0, 0.02),
            0.1,
            {
                0: "all wait for its Python thread; its devices have nothing to do for 0.5 "
                "s of a step's 1 s, the others' for 0.01 s"
            },
        ),
        ((0.9, 0.9, 0.9), 0.9, {}),
    ],
)
def test_a_host_is_slow_where_steps_wait_for_it(late, starved, found):
    assert find_slow_hosts(speeds(1, 1, 1, late=late, starved=starved), 1.5) == {
        (p, "host"): f"{text} (their median)" for p, text in found.items()
    }


def test_medians_of_others_equal_leave_one_out_medians():
    for values in ([3.0, 1.0], [2.0, 2.0, 5.0], [1.0, 4.0, 4.0, 2.0, 9.0, 4.0]):
        assert _medians(values) == [
            statistics.median(values[:i] + values[i + 1 :]) for i in range(len(values))
        ]


def test_a_process_is_named_after_two_comparisons_in_a_row():
    watched, good, slow = Stragglers(1.5, 10, Peers()), speeds(0.05, 0.05), speeds(0.05, 0.1)
    late = speeds(0.05, 0.05, late=(0.0, 0.9))
    named = [
        bool(watched.judge(10 * i, one).lines)
        for i, one in enumerate([slow, good, slow, late, late, slow, slow, slow, good])
    ]
    assert named == [False, False, False, False, True, False, True, True, False]
    watched.judge(10, slow)
    report = watched.judge(20, slow)
    assert report.lines[0].startswith("step 20: process 1 (host1) is slow: its devices need 100 ms")
    assert report.numbers == {"device_skew": 2.0, "host_skew": 0.0}


def test_a_single_device_is_not_compared():
    assert not Stragglers(1.5, 1, Peers()).due(1)


def test_the_slower_of_two_real_processes_is_named():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        at = f"localhost:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOINED, at, str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        for i in range(2)
    ]
    try:
        assert started[0].stdout.readline().startswith("checked 1")
        threading.Thread(target=_hinder, args=(started[1],), daemon=True).start()
        for process in started:
            process.stdin.write("go on\n")
            process.stdin.flush()
        told = started[0].communicate(timeout=60)[0].splitlines()
    finally:
        for process in started:
            process.kill()
            process.wait()
    named = [line for line in told if "is slow" in line]
    assert len(named) >= CHECKS - 3 and all(
        f"process 1 ({socket.gethostname()}) is slow: its devices need" in line for line in named
    ), told


def _hinder(process, on=0.005, off=0.045):
    """Let it run a tenth of the time only, so that other load does not hide it."""
    while process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(off)
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(on)
