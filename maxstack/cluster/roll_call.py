"""The roll call before jax joins the processes: process 0 waits for every other one, names the
missing, and checks that all were started alike.

jax itself prints nothing while it waits, and aborts in the end. Process 0 listens where jax's
service will afterwards. Each other process calls it, and once both have proved that they know the
job's key, sends its `Card` as JSON. Process 0 answers with messages: `{"missing": [...]}` now and
then, `{"again": true}` to ask for the card once more, and at last `{"go": true}`, `{"replaced":
host}` or `{"error": "..."}`. A process that died and was started again takes the place of its
first connection, which is asked for its card: two that both answer have one number by mistake.
"""

import contextlib
import errno
import ipaddress
import json
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from maxstack.cluster.connections import Acceptor, connect
from maxstack.config import difference
from maxstack.errors import ConfigError, TransientError

OFTEN = 0.3
"""Seconds between two attempts to reach process 0."""
NAMED = 8
"""Most missing processes, or keys that differ, in a message."""
ALIVE = 5.0
"""Seconds that a process has to answer where another one comes with its number; its host may have
lost power."""
LOOPBACK = "localhost", "127.0.0.1", "::1"
PURPOSE = "roll call"
LONGEST = 1 << 20
"""Bytes of a message."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Card:
    """A process's description of itself."""

    process: int
    processes: int
    host: str
    alike: dict[str, Any] = field(default_factory=dict)
    """Plain data that must be the same in all processes."""

    @staticmethod
    def read(fields: dict[str, Any]) -> "Card":
        """Make a card of a message; ValueError where it is none."""
        kinds = {"process": int, "processes": int, "host": str, "alike": dict}
        if {name: type(value) for name, value in fields.items()} != kinds:
            raise ValueError("is no card of a process")
        return Card(**fields)


class Missing(TransientError):
    """Not all processes came; the message names those that did not."""


def roll_call(
    card: Card, at: str, wait: float, between: float, say: Say, find_key: Callable[[], bytes]
) -> bytes:
    """Wait until all processes are there; return the job's key, as `find_key` found it. ConfigError
    where two have one number, or were started differently; Missing after `wait` seconds. `at`:
    host:port of process 0; every `between` seconds `say` is called with the missing."""
    host, _, port = at.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + wait
    if card.process:
        return _answer(card, host, int(port), deadline, between, say, find_key)
    key = find_key()
    _Leader(card, deadline, between, say).call(host, int(port), key)
    return key


def bind_address(at: str) -> str | None:
    """Return the address for jax's service in process 0 to listen at: that of the interface by
    which the others reach it; None: every interface, where there is none such."""
    host, _, port = at.rpartition(":")
    address = own_address(host.strip("[]"))
    return address and f"{f'[{address}]' if ':' in address else address}:{port}"


def own_address(host: str) -> str | None:
    """Return this machine's address for a host's name, IPv4 before IPv6, as the watchdogs need it.
    None where there is none: the address is translated on the way (NAT), or this machine resolves
    the name to loopback, as Debian does with its own."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    for address in sorted(map(str, found), key=lambda each: (":" in each, each)):
        if host in LOOPBACK or not ipaddress.ip_address(address).is_loopback:
            with contextlib.suppress(OSError):
                # Bound for a moment: only that tells whether the address is one of this machine's.
                socket.create_server((address, 0), family=_family(address)).close()
                return address
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class _Leader:
    """The roll call in process 0."""

    def __init__(self, card: Card, deadline: float, between: float, say: Say):
        self._card = card
        self._deadline, self._between = deadline, between
        self._say = say
        self._here: dict[int, tuple[Connection, Card]] = {}
        self._begin = time.monotonic()
        self._arrived: queue.SimpleQueue[tuple[Connection, Card]] = queue.SimpleQueue()

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(1, self._card.processes) if number not in self._here]

    def call(self, host: str, port: int, key: bytes) -> None:
        # 1,024 callers take 2.4 s, 4,096 take 8.2, on 2 cores that they share (EXPERIMENTS.md).
        with (
            contextlib.ExitStack() as ending,
            Acceptor(self._listen(host, port), key, PURPOSE, self._hear, self._say),
        ):
            reported = time.monotonic()
            while self._missing:
                try:
                    connection, card = self._arrived.get(timeout=OFTEN)
                    self._add(ending.enter_context(connection), card)
                except queue.Empty:  # input that nobody asked for means a closed connection
                    here = self._here.items()
                    self._here = {number: each for number, each in here if not each[0].poll()}
                if (now := time.monotonic()) > self._deadline:
                    # The others leave at the same time, with the same names.
                    self._send_all({"missing": self._missing, "over": True})
                    raise Missing(_describe(self._missing, self._card.processes))
                if now - reported >= self._between:
                    reported = now
                    self._say(
                        f"{_describe(self._missing, self._card.processes)}, after "
                        f"{now - self._begin:.0f} s of at most "
                        f"{self._deadline - self._begin:.0f}; here: {self._present()}"
                    )
                    self._send_all({"missing": self._missing})
            # The acceptor closes next: jax's service then listens on the same port.
            self._send_all({"go": True})

    def _listen(self, host: str, port: int) -> socket.socket:
        address = own_address(host)
        if address is None:
            self._say(
                f"{host} is not an address of this machine, so process 0 listens on every interface"
            )
        while True:
            try:
                if address is None and socket.has_dualstack_ipv6():
                    return socket.create_server(
                        ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
                    )
                at = address or ""
                # Thousands of processes may call at once.
                return socket.create_server((at, port), family=_family(at), backlog=1024)
            except OSError as error:
                what = f"process 0 cannot listen on port {port}: {error.strerror}"
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"distributed.coordinator: {what}; choose another port"
                    ) from error
                if time.monotonic() > self._deadline:
                    raise Missing(f"{what}; end its process, or choose another port") from error
                time.sleep(OFTEN)  # the last run's process may not have ended yet

    def _hear(self, connection: Connection) -> None:
        """Read the card of a process that knows the key, in a thread of the acceptor."""
        try:
            self._arrived.put((connection, Card.read(_read(connection, ALIVE))))
        except (OSError, ValueError):
            connection.close()

    def _add(self, connection: Connection, card: Card) -> None:
        # All are told, so that each host's log has the reason.
        if fault := self._fault(card):
            _send(connection, {"error": fault})
            self._send_all({"error": fault})
            raise ConfigError(fault)
        if card.process in self._here:  # its host froze, and may come back
            _send(self._here[card.process][0], {"replaced": card.host})
        self._here[card.process] = connection, card

    def _fault(self, card: Card) -> str | None:
        own = self._card
        if card.processes != own.processes:
            return (
                f"distributed.processes: {card.processes} for process {card.process} on "
                f"{card.host}, but {own.processes} for process 0 on {own.host}; give all the same"
            )
        connection, other = self._here.get(card.process, (None, own))
        # A process that was started again is no mistake, and its first connection may not be closed
        # yet: where a host lost its power it never is.
        if card.process == 0 or (connection and _alive(connection)):
            return (
                f"distributed.process: two processes have number {card.process}, on "
                f"{other.host} and on {card.host}; give each its own"
            )
        if odd := difference(own.alike, card.alike):
            pairs = "; ".join(
                f"{key.removeprefix('configuration.').removeprefix('packages.')} "
                f"{old!r} and {new!r}"
                for key, old, new in odd[:NAMED]
            )
            return (
                f"distributed: process 0 on {own.host} and process {card.process} on {card.host} "
                f"were started differently: {pairs}; give all the same configuration, "
                "packages, files and settings"
            )
        return None

    def _present(self) -> str:
        hosts = {self._card.host: [0]}
        for number, (_, card) in sorted(self._here.items()):
            hosts.setdefault(card.host, []).append(number)
        return ", ".join(f"{_ranges(numbers)} on {host}" for host, numbers in hosts.items())

    def _send_all(self, word: dict[str, Any]) -> None:
        for connection, _ in self._here.values():
            _send(connection, word)


def _answer(
    card: Card,
    host: str,
    port: int,
    deadline: float,
    between: float,
    say: Say,
    find_key: Callable[[], bytes],
) -> bytes:
    """Take part in the roll call: call process 0, again if it goes away, until it says go."""
    begin = reported = time.monotonic()
    why = "nobody answers"
    while time.monotonic() < deadline:
        try:
            # Anew each time: process 0 may have been started again, with another key, or not have
            # written it yet.
            key = find_key()
            with connect((host, port), key, PURPOSE) as connection:
                _send(connection, asdict(card))
                # Process 0 speaks every `between` seconds: three times in silence, and it is gone.
                while "go" not in (word := _read(connection, 3 * between)):
                    if "again" in word:
                        _send(connection, asdict(card))
                        continue
                    if "replaced" in word:
                        raise Missing(
                            f"this process did not answer for {ALIVE:.0f} s, and one on "
                            f"{word['replaced']} has its number now"
                        )
                    if "error" in word:
                        raise ConfigError(word["error"])
                    if word.get("over"):
                        raise Missing(_describe(word["missing"], card.processes))
                    say(
                        f"{_describe(word['missing'], card.processes)}, says process 0 at "
                        f"{host}:{port}"
                    )
                    reported = time.monotonic()
                return key
        # Both are ValueErrors, which below mean that another program answers.
        except (ConfigError, Missing):
            raise
        except ValueError:
            why = "another program answers"
        except OSError as error:
            why = error.strerror or str(error) or "nobody answers"
        if (now := time.monotonic()) - reported >= between:
            reported = now
            say(
                f"process 0 cannot be reached at {host}:{port} ({why}), after "
                f"{now - begin:.0f} s of at most {deadline - begin:.0f}"
            )
        time.sleep(OFTEN)
    raise Missing(f"process 0 was not reached at {host}:{port} ({why})")


def _alive(connection: Connection) -> bool:
    """Return whether the other side answers."""
    _send(connection, {"again": True})
    try:
        return bool(_read(connection, ALIVE))
    except (OSError, ValueError):
        return False


def _read(connection: Connection, seconds: float) -> dict[str, Any]:
    """Read the next message. OSError where none comes in time, ValueError for no JSON object."""
    if not connection.poll(seconds):
        raise TimeoutError("it is silent")
    try:
        word = json.loads(connection.recv_bytes(LONGEST))
    except EOFError:
        raise ConnectionError("the connection was closed") from None
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(word, dict):
        raise ValueError("a message is not an object")
    return word


def _send(connection: Connection, word: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(word).encode())


def _describe(missing: list[int], processes: int) -> str:
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    noun, verb = ("processes", "are") if len(missing) > 1 else ("process", "is")
    return f"{noun} {_ranges(missing[:NAMED])}{more} of {processes} {verb} missing"


def _ranges(numbers: list[int]) -> str:
    """Write 1, 2, 3, 7 as `1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
