"""The roll call over real sockets: each process a thread."""

import dataclasses
import json
import socket
import threading
import time

import pytest

from maxstack.cluster import roll_call as roll_call_module
from maxstack.cluster.roll_call import Card, Missing, roll_call
from maxstack.errors import ConfigError

ALIKE = {"packages": {"jax": "1"}, "configuration": {"train": {"steps": 10}}}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def called(cards, wait=20.0, between=0.2, late=0.0):
    """Each process's error or None, and the lines that it said; those after the first come
    `late`."""
    at, ends, said = f"127.0.0.1:{free_port()}", [None] * len(cards), [[] for _ in cards]

    def come(i):
        time.sleep(late if i else 0)
        try:
            roll_call(cards[i], at, wait, between, said[i].append)
        except Exception as error:
            ends[i] = error

    threads = [threading.Thread(target=come, args=(i,)) for i in range(len(cards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends, said


def test_all_go_once_all_are_there_and_those_who_wait_are_told_who_is_missing():
    ends, said = called([Card(i, 4, f"host{i % 2}", ALIKE) for i in range(4)], late=0.7)
    assert ends == [None] * 4
    assert said[0][0] == "processes 1-3 of 4 are missing, after 0 s of at most 20; here: 0 on host0"


def test_who_never_comes_is_named_in_every_process():
    ends, said = called([Card(i, 12, "host", ALIKE) for i in (0, 1, 3)], wait=1.5)
    assert all(
        isinstance(end, Missing)
        and str(end) == "processes 2, 4-10 and 1 more of 12 are missing"
        and end.exit_code == 42
        for end in ends
    )
    assert (
        "processes 2, 4-10 and 1 more of 12 are missing, says process 0 at 127.0.0.1" in said[1][-1]
    )
    assert "here: 0-1, 3 on host" in said[0][-1]


def test_that_process_0_is_not_there_is_told():
    (end,), (said,) = called([Card(1, 2, "host", ALIKE)], wait=1.0)
    assert (
        isinstance(end, Missing)
        and "process 0 was not reached at 127.0.0.1" in str(end)
        and "Connection refused" in said[0]
    )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            Card(1, 3, "b", ALIKE),
            "distributed.processes: 3 for process 1 on b, but 2 for process 0 on a",
        ),
        (Card(0, 2, "b", ALIKE), "two processes have number 0, on a and on b"),
        (
            Card(1, 2, "b", ALIKE | {"configuration": {"train": {"steps": 20}}}),
            "were started otherwise: train.steps 10 and 20; give all the same",
        ),
        (Card(1, 2, "b", ALIKE | {"packages": {"jax": "2"}}), "jax '1' and '2'"),
    ],
)
def test_processes_that_were_started_otherwise_are_refused_by_all(other, says):
    if other.process == 0:
        at, ends = f"127.0.0.1:{free_port()}", []

        def first():
            with pytest.raises(ConfigError, match=says):
                roll_call(Card(0, 2, "a", ALIKE), at, 20.0, 5.0, print)
            ends.append(True)

        thread = threading.Thread(target=first)
        thread.start()
        with socket.create_connection(_when_open(at)) as connection:
            connection.sendall(b'{"process": 0, "processes": 2, "host": "b"}\n')
            thread.join(30)
        assert ends
        return
    ends, _ = called([Card(0, 2, "a", ALIKE), other])
    assert all(isinstance(end, ConfigError) and says in str(end) for end in ends), ends


def _when_open(at):
    host, _, port = at.rpartition(":")
    for _ in range(200):
        try:
            socket.create_connection((host, int(port))).close()
            return host, int(port)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_that_died_and_came_again_is_the_same_one(closes, monkeypatch):
    """Closed by its kernel, or not at all, as where its host has lost its power."""
    monkeypatch.setattr(roll_call_module, "ALIVE", 1.0)
    at, ends, said = f"127.0.0.1:{free_port()}", [], []
    cards = [Card(i, 3, "host", ALIKE) for i in range(3)]
    first = threading.Thread(
        target=lambda: ends.append(roll_call(cards[0], at, 60.0, 0.1, said.append))
    )
    first.start()
    connection = socket.create_connection(_when_open(at))
    connection.sendall(json.dumps(dataclasses.asdict(cards[1])).encode() + b"\n")
    _until(said, "here: 0-1 on host")
    if closes:
        connection.close()
        said.clear()
        _until(said, "here: 0 on host")
    others = [
        threading.Thread(target=roll_call, args=(card, at, 60.0, 5.0, print)) for card in cards[1:]
    ]
    others[0].start()
    if not closes:  # it is told to leave, should it come back
        words = iter(connection.makefile("rb").readline, b"")
        assert json.loads(next(word for word in words if b"missing" not in word)) == {"again": True}
        assert json.loads(next(word for word in words if b"missing" not in word)) == {
            "replaced": "host"
        }
    others[1].start()
    for thread in (first, *others):
        thread.join(60)
    assert ends == [None] and not any(thread.is_alive() for thread in others)
    connection.close()


def _until(said, words):
    while not any(words in line for line in said):
        time.sleep(0.05)


def test_two_living_processes_of_one_number_are_refused():
    cards = [Card(i, 3, f"host{j}", ALIKE) for j, i in enumerate((0, 1, 1))]
    ends, _ = called(cards)
    assert all(
        isinstance(end, ConfigError) for end in ends
    ) and "two processes have number 1, on host1 and on host2" in str(ends[0]).replace(
        "on host2 and on host1", "on host1 and on host2"
    )


def test_strangers_do_not_disturb():
    at, ends = f"127.0.0.1:{free_port()}", []
    first = threading.Thread(
        target=lambda: ends.append(roll_call(Card(0, 2, "host", ALIKE), at, 20.0, 5.0, print))
    )
    first.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\n", b"\xff\xfe\n"):
        with socket.create_connection(_when_open(at)) as stranger:
            stranger.sendall(words)
    roll_call(Card(1, 2, "host", ALIKE), at, 20.0, 5.0, print)
    first.join(30)
    assert ends == [None]
