import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError

import pytest
from rewards.cases import awaited, case, function, marked, parent

from maxstack.errors import ConfigError
from maxstack.rewards.runner import check_reward

FAILURES = {
    "raises": r"LookupError: no\nluck (",
    "hangs_in_c": "took longer than timeout=0.5 s",
    "ignores_signals": "took longer than timeout=0.5 s",
    "reads_stdin": "EOFError: EOF when reading a line (",
    "eats": "MemoryError: memory=2 GiB exceeded (",
    "eats_in_c": "ended its process by signal SIGSEGV",
    "dies_and_leaves_a_daemon": "ended its process with exit code 5",
    "crashes": "ended its process by signal SIGSEGV, and once more on a new worker",
    "kills_its_worker": "its worker did not answer (EOFError, exit code -9), and once more",
    "closes_all_and_hangs": "closed the socket of its worker",
    "begins_again": "answered with too much, or wrote to the socket of its worker",
    "writes_everywhere": "answered with too much, or wrote to the socket of its worker",
}
SUCCESSES = ["forks", "leaves_a_daemon", "sets_an_alarm", "leaves_a_thread"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_reward_that_does_harm_fails_alone(name, pool, mark):
    timeout = 0.5 if "took longer" in FAILURES[name] else 60.0
    rewards = pool(function(name, name="harm", timeout=timeout), function("good"))
    for _ in range(2):
        harm, good = rewards.submit(case()).result(30)
        assert harm[:2] == (0.0, {})
        assert harm.failure.startswith(f"reward harm, rows.jsonl:7: {FAILURES[name]}")
        assert good == (4.0, {}, None)
    assert len(marked(mark)) <= 2


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (math.nan, ValueError, "returned nan, which is not finite"),
        (1e39, ValueError, "returned 1e[+]39, which float32 cannot hold"),
        ({"a": 3e38, "b": 3e38}, ValueError, "returned, in sum, 6"),
        ({}, ValueError, "returned a mapping without a component"),
        (None, TypeError, "returned None, which is not a number"),
    ],
)
def test_a_reward_is_a_finite_number_or_a_mapping_of_them(given, error, says):
    with pytest.raises(error, match=says):
        check_reward(given)


@pytest.mark.parametrize("name", SUCCESSES)
def test_what_a_reward_leaves_behind_is_removed(name, pool, mark):
    rewards = pool(function(name), function("good"))
    for _ in range(2):
        assert rewards.submit(case()).result(30) == [(1.0, {}, None), (4.0, {}, None)]
    assert awaited(lambda: len(marked(mark)) <= 2)
    time.sleep(0.3 if name == "sets_an_alarm" else 0)
    assert rewards.submit(case()).result(30)[1].value == 4.0


@pytest.mark.slow
def test_output_is_lost_without_harm(pool):
    rewards = pool(function("prints", timeout=60))
    assert rewards.submit(case()).result(60) == [(1.0, {}, None)]


def test_an_exception_is_told_with_the_last_line_of_the_users_code(pool):
    (harm,) = pool(function("raises")).submit(case()).result(30)
    line = r"hostile\.py:\d+, in raises: raise LookupError\(\"no\\nluck\"\)\)$"
    assert re.search(line, harm.failure), harm.failure


def test_a_mapping_is_a_sum_of_components(pool):
    (outcome,) = pool(function("parts")).submit(case()).result(30)
    assert outcome == (5.5, {"length": 4.0, "true": 1.0, "half": 0.5}, None)


def test_a_row_that_json_cannot_hold_fails(pool):
    rewards = pool(function("good"))
    (outcome,) = rewards.submit(case(when=object())).result(30)
    assert "rows.jsonl:7: the row holds a value that JSON cannot" in outcome.failure
    assert rewards.submit(case()).result(30)[0].value == 4.0


def test_values_do_not_depend_on_the_number_of_workers(pool):
    found = []
    for workers in (1, 3):
        rewards = pool(function("lucky"), function("good"), workers=workers)
        futures = [rewards.submit(case("x" * n)) for n in range(30)]
        found.append([future.result(30) for future in futures])
    assert found[0] == found[1]
    assert len({outcomes[0].components["random"] for outcomes in found[0]}) == 30


def test_a_process_that_keeps_memory_is_replaced(pool):
    rewards = pool(function("keeps", memory=0.1))
    outcomes = [rewards.submit(case()).result(30)[0] for _ in range(6)]
    assert [outcome.failure for outcome in outcomes] == [None] * 6
    assert len({outcome.value for outcome in outcomes}) == 3


def test_workers_ignore_sigterm(pool, mark):
    rewards = pool(function("good"))
    rewards.submit(case()).result(30)
    before = marked(mark)
    for number in before:
        os.kill(number, signal.SIGTERM)
    time.sleep(0.1)
    assert rewards.submit(case()).result(30)[0].value == 4.0
    assert marked(mark) == before


@pytest.mark.parametrize("victims", ["runner", "both"])
def test_a_case_whose_process_was_killed_is_computed_again(victims, pool, mark, tmp_path):
    """By nobody of ours: the value is the same, and it is told once."""
    rewards, file = pool(function("waits_to_be_killed", timeout=60)), tmp_path / "begun"
    future = rewards.submit(case(file=str(file)))
    assert awaited(file.exists, 30)
    (worker,) = (number for number in marked(mark) if parent(number) == os.getpid())
    (runner,) = (number for number in marked(mark) if parent(number) == worker)
    for number in [runner] if victims == "runner" else [runner, worker]:
        os.kill(number, signal.SIGKILL)
    (outcome,) = future.result(30)
    assert outcome.failure is None
    assert [outcome] == rewards.submit(case(file=str(file))).result(30)
    (line,) = rewards.news()
    assert "was killed: 1; the last of these " in line and rewards.news() == []


def test_a_worker_that_is_killed_as_it_starts_is_started_again(pool, mark):
    rewards = pool(function("good"))
    future = rewards.submit(case())
    assert awaited(lambda: marked(mark))
    os.kill(marked(mark)[0], signal.SIGKILL)
    assert future.result(30) == [(4.0, {}, None)]


def test_close_ends_what_runs_and_what_waits_at_once(pool, mark):
    rewards = pool(function("hangs_in_c", timeout=60))
    running, waiting = rewards.submit(case()), rewards.submit(case())
    assert awaited(lambda: len(marked(mark)) == 2)
    began = time.monotonic()
    rewards.close()
    assert time.monotonic() - began < 2
    assert not marked(mark)
    with pytest.raises(RuntimeError, match="is closed"):
        running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(RuntimeError, match="is closed"):
        rewards.submit(case())


PARENT = """
import sys, time
from rewards.cases import case, function
from maxstack.rewards.pool import Pool
pool = Pool([function("hangs_with_a_sleeper", timeout=60)], 1)
pool.submit(case(file=sys.argv[1]))
time.sleep(60)
"""


def test_nothing_outlives_a_parent_that_is_killed(mark, tmp_path):
    file = tmp_path / "begun"
    tests = os.path.dirname(os.path.dirname(__file__))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(file)], env=os.environ | {"PYTHONPATH": tests}
    )
    assert awaited(file.exists, 30)
    assert awaited(lambda: len(marked(mark)) == 5)
    parent.kill()
    parent.wait()
    assert awaited(lambda: not marked(mark))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            "rewards.nowhere:good",
            r"no module rewards.nowhere; rewards.nowhere:good is imported from the working folder",
        ),
        ("rewards.hostile:godo", "rewards.hostile has no godo; did you mean good"),
        ("rewards.hostile:Echo", "rewards.hostile:Echo is a class; name a function"),
        ("rewards.hostile:waits", "rewards.hostile:waits is async"),
        ("rewards.hostile:alone", r"rewards.hostile:alone\(prompt\) must take \(prompt, comp"),
    ],
)
def test_check_names_a_function_that_cannot_be_called(call, reason, pool):
    rewards = pool(function("good"), function("good").model_copy(update={"call": call}))
    with pytest.raises(ConfigError, match=f"^rewards.1: {reason}"):
        rewards.check()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoStep", "rewards.hostile:NoStep has no method step"),
        ("NoSeed", r"rewards.hostile:NoSeed.reset\(self, row\) must take \(row, seed\)"),
    ],
)
def test_check_names_what_an_environment_lacks(name, reason, pool):
    with pytest.raises(ConfigError, match=f"^rollout.environment: {reason}"):
        pool().check(f"rewards.hostile:{name}")


def test_a_function_is_found_in_the_working_folder(pool, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def two(prompt, completion, row): return 2")
    monkeypatch.chdir(tmp_path)
    reward = function("good").model_copy(update={"call": "my_rewards:two"})
    assert pool(reward).submit(case()).result(30) == [(2.0, {}, None)]
