"""The roll call over real sockets: each process a thread."""

import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxstack.cluster import connections
from maxstack.cluster import roll_call as roll_call_module
from maxstack.cluster.connections import Acceptor, connect
from maxstack.cluster.roll_call import PURPOSE, Card, Missing, roll_call
from maxstack.errors import ConfigError

KEY = b"k" * 32
ALIKE = {"packages": {"jax": "1"}, "configuration": {"train": {"steps": 10}}}


def find_key():
    return KEY


def process(at, card):
    """A connection to process 0 at `at`, which has sent its card."""
    connection = connect(_when_open(at), KEY, PURPOSE)
    connection.send_bytes(json.dumps(dataclasses.asdict(card)).encode())
    return connection


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(*calls):
    """Call each in a thread of its own, to their ends."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def called(cards, wait=20.0, between=0.2, late=0.0):
    """Each process's error or None, and the lines that it said; those after the first come
    `late`."""
    at, ends, said = f"127.0.0.1:{free_port()}", [None] * len(cards), [[] for _ in cards]

    def come(i):
        time.sleep(late if i else 0)
        try:
            assert roll_call(cards[i], at, wait, between, said[i].append, find_key) == KEY
        except Exception as error:
            ends[i] = error

    together(*(functools.partial(come, i) for i in range(len(cards))))
    return ends, said


def test_all_start_together_and_missing_ones_are_named():
    ends, said = called([Card(i, 4, f"host{i % 2}", ALIKE) for i in range(4)], late=0.7)
    assert ends == [None] * 4
    assert said[0][0] == "processes 1-3 of 4 are missing, after 0 s of at most 20; here: 0 on host0"


def test_missing_processes_are_named_in_every_process():
    cards = [Card(i, 12, "host", ALIKE) for i in (0, 1, 3)]
    ends, said = called(cards, wait=2.5, between=0.6)
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


def test_a_missing_process_0_is_reported():
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
        (
            Card(1, 2, "b", ALIKE | {"configuration": {"train": {"steps": 20}}}),
            "were started differently: train.steps 10 and 20; give all the same",
        ),
        (Card(1, 2, "b", ALIKE | {"packages": {"jax": "2"}}), "jax '1' and '2'"),
    ],
)
def test_processes_started_differently_are_refused_by_all(other, says):
    ends, _ = called([Card(0, 2, "a", ALIKE), other])
    assert all(isinstance(end, ConfigError) and says in str(end) for end in ends), ends


@contextlib.contextmanager
def led():
    """The address and the lines of process 0 of two; process 1 joins after the block."""
    at, ends, said = f"127.0.0.1:{free_port()}", [], []
    card = Card(0, 2, "host", ALIKE)
    first = threading.Thread(
        target=lambda: ends.append(roll_call(card, at, 20.0, 5.0, said.append, find_key))
    )
    first.start()
    yield at, said
    roll_call(Card(1, 2, "host", ALIKE), at, 20.0, 5.0, print, find_key)
    first.join(30)
    assert ends == [KEY]


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
def test_a_restarted_process_replaces_itself(closes, monkeypatch):
    """Closed by its kernel, or not at all, as where its host has lost its power."""
    monkeypatch.setattr(roll_call_module, "ALIVE", 1.0)
    at, ends, said = f"127.0.0.1:{free_port()}", [], []
    cards = [Card(i, 3, "host", ALIKE) for i in range(3)]
    first = threading.Thread(
        target=lambda: ends.append(roll_call(cards[0], at, 60.0, 0.1, said.append, find_key))
    )
    first.start()
    connection = process(at, cards[1])
    _until(said, "here: 0-1 on host")
    if closes:
        connection.close()
        said.clear()
        _until(said, "here: 0 on host")
    others = [
        threading.Thread(target=roll_call, args=(card, at, 60.0, 5.0, print, find_key))
        for card in cards[1:]
    ]
    others[0].start()
    if not closes:  # it is told to leave, should it come back
        words = iter(lambda: json.loads(connection.recv_bytes()), None)
        told = (word for word in words if "missing" not in word)
        assert [next(told), next(told)] == [{"again": True}, {"replaced": "host"}]
    others[1].start()
    for thread in (first, *others):
        thread.join(60)
    assert ends == [KEY] and not any(thread.is_alive() for thread in others)
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


ATTACKS = {
    "silent": b"",
    "a page": b"GET / HTTP/1.1\r\n\r\n" * 8,
    "a card": b'{"process": 1, "processes": 3, "host": "b", "alike": {}}\n' * 2,
}


@pytest.mark.parametrize("words", ATTACKS.values(), ids=ATTACKS)
def test_a_stranger_is_told_nothing_and_ends_nothing(words, monkeypatch):
    monkeypatch.setattr(connections, "PROVING", 0.5)
    told = b""
    with led() as (at, said):
        with socket.create_connection(_when_open(at)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            while more := stranger.recv(4096):
                told += more
        assert len(told) <= 32, "a nonce alone"
    assert said[0].startswith("closed a connection from 127.0.0.1 without the job's key")
    assert len(said) <= 2 and "connections without the job's key were closed" in said[-1]


def test_slow_bytes_hold_nothing_past_the_deadline(monkeypatch):
    monkeypatch.setattr(connections, "PROVING", 0.6)
    with led() as (at, _):
        began = time.monotonic()
        with socket.create_connection(_when_open(at)) as stranger, contextlib.suppress(OSError):
            while time.monotonic() < began + 10:
                stranger.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 5


def test_a_flood_of_silent_strangers_does_not_keep_a_process_out(monkeypatch):
    monkeypatch.setattr(connections, "STRANGERS", 16)
    with contextlib.ExitStack() as open_sockets, led() as (at, said):
        for _ in range(100):
            open_sockets.enter_context(socket.create_connection(_when_open(at)))
    assert len(said) == 2


def test_a_wrong_key_is_rejected_by_both_sides():
    at, said = f"127.0.0.1:{free_port()}", []
    ends = []

    def come(number, key):
        with pytest.raises(Missing) as error:
            roll_call(Card(number, 2, "host", ALIKE), at, 1.5, 0.5, said.append, lambda: key)
        ends.append(str(error.value))

    together(lambda: come(0, KEY), lambda: come(1, b"o" * 32))
    assert "process 1 of 2 is missing" in ends[0] + ends[1]


def test_a_false_process_0_gets_no_card():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port, heard = stranger.getsockname()[1], []

        def pretend():
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"n" * 32)
                heard.append(connection.recv(4096))
                connection.sendall(b"p" * 32)
                with contextlib.suppress(OSError):
                    heard.append(connection.recv(4096))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Missing, match="does not know the job's key"):
            roll_call(Card(1, 2, "host", ALIKE), f"127.0.0.1:{port}", 0.3, 5.0, print, find_key)
        thread.join(30)
    assert len(heard[0]) == 64 and heard[1:] in ([], [b""])


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 200_000,
        b"\xff\xfe",
        b'{"process": [1], "processes": 2, "host": "b", "alike": {}}',
        b'{"process": 1}',
        b"x" * (roll_call_module.LONGEST + 1),
    ],
    ids=lambda message: message[:20],
)
def test_a_message_that_is_no_card_ends_its_connection_alone(message):
    with led() as (at, _), connect(_when_open(at), KEY, PURPOSE) as connection:
        with contextlib.suppress(OSError):
            connection.send_bytes(message)
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()


def test_process_0_listens_on_the_coordinators_interface_only():
    assert roll_call_module.bind_address("localhost:1234") == "127.0.0.1:1234"
    assert roll_call_module.bind_address("127.0.0.1:7") == "127.0.0.1:7"
    assert roll_call_module.own_address("192.0.2.1") is None, "of no interface here"


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_stranger_gets_at_most_a_nonce(parts):
    admitted = []
    listener = socket.create_server(("127.0.0.1", 0))
    with Acceptor(listener, KEY, PURPOSE, admitted.append, lambda line: None):
        told = b""
        with socket.create_connection(listener.getsockname()) as stranger:
            with contextlib.suppress(OSError):
                for part in (*parts, b"x" * 64):
                    stranger.sendall(part)
                while more := stranger.recv(4096):
                    told += more
        assert len(told) <= 32 and not admitted
