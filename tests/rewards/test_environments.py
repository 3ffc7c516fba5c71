import os
import signal

import pytest
from rewards.cases import awaited, case, function, marked, parent

from maxstack.rewards.pool import Turn


def turn(*texts, call="Echo", session="s", timeout=0.5, seed=1, **row):
    tools = tuple({"n": n} for n in range(len(texts)))
    return Turn(
        f"rewards.hostile:{call}", session, row, seed, texts, timeout, 1.0, "rows.jsonl:7", tools
    )


def test_an_environment_answers_turn_by_turn(pool):
    environments = pool()
    assert environments.turn(turn()).result(30) == ("begin 137", 0.0, False, {}, None)
    assert environments.turn(turn(session="other", own=True)).result(30).messages is None
    first = environments.turn(turn("a")).result(30)
    assert first[1:] == (1.0, False, {"steps": 1.0}, None)
    assert first.messages[0]["content"].startswith("[('a', {'n': 0}, 582, ")
    second = environments.turn(turn("a", "b", turns=2)).result(30)
    assert (second.reward, second.done) == (2.0, False)
    environments.turn(turn(session="short", turns=1)).result(30)
    assert environments.turn(turn("a", session="short", turns=1)).result(30).done


def test_a_killed_worker_loses_nothing(pool):
    def played(disturbed):
        environments = pool(function("ends"))
        found = []
        for length in range(5):
            found.append(environments.turn(turn(*"abcd"[:length])).result(30))
            if disturbed:
                environments.submit(case()).result(30)
        return found

    assert played(True) == played(False)


@pytest.mark.parametrize("which", ["runner", "worker"])
def test_a_session_whose_process_was_killed_goes_on(which, pool, mark, tmp_path):
    def played(file):
        environments, texts = pool(), ["a", "wait to be killed", "b"]
        for length in range(4):
            given = turn(*texts[:length], timeout=60, file=str(file))
            kills = length == 2 and not file.exists()  # the turn makes the file
            future = environments.turn(given)
            if kills:
                assert awaited(file.exists, 30)
                (worker,) = (number for number in marked(mark) if parent(number) == os.getpid())
                runners = [number for number in marked(mark) if parent(number) == worker]
                os.kill(worker if which == "worker" else runners[0], signal.SIGKILL)
            last = future.result(30)
        environments.close()
        return last

    file = tmp_path / "begun"
    killed = played(file)
    assert killed.failure is None and killed == played(file)


def test_other_sessions_outlive_one_that_kills_their_worker(pool):
    environments = pool()
    for session in ("s", "other"):
        environments.turn(turn(session=session)).result(30)
    lost = environments.turn(turn("die")).result(30)
    assert lost[:4] == (None, 0.0, True, {})
    assert lost.failure == (
        "environment rewards.hostile:Echo, turn 1, rows.jsonl:7: ended its process with exit code 9"
    )
    assert environments.turn(turn("a", session="other")).result(30).reward == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "took longer than timeout=0.5 s"),
        ("raise", "ValueError: cannot go on"),
        ("wrong", "TypeError: step returned 'no tuple', not (observation, reward, done)"),
    ],
)
def test_an_environment_that_fails_is_over(text, reason, pool):
    environments = pool()
    environments.turn(turn()).result(30)
    failed = environments.turn(turn(text)).result(30)
    assert failed.done
    assert f"turn 1, rows.jsonl:7: {reason}" in failed.failure


def test_processes_of_an_environment_live_as_long_as_it_does(pool, mark):
    environments = pool(function("leaves_a_sleeper"))
    play = {"call": "Shell", "timeout": 2.0}
    for session in ("s", "other"):
        environments.turn(turn(session=session, **play)).result(30)
    assert awaited(lambda: len(marked(mark)) == 4)
    environments.submit(case()).result(30)
    assert environments.turn(turn("a", **play)).result(30).messages == "a"
    assert environments.turn(turn("a", "bye", **play)).result(30).done
    assert awaited(lambda: len(marked(mark)) == 3)
    environments.forget("other")
    assert awaited(lambda: len(marked(mark)) == 2)
