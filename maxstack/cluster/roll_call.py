"""The roll call before jax joins the processes: process 0 waits for every other one, names the
missing, and checks that all were started alike.

jax itself says nothing while it waits, and in the end aborts. Each other process sends one line of
JSON, its `Card`; process 0 answers with lines: `{"missing": [...]}` now and then, `{"again": true}`
for the same card once more, and at last `{"go": true}`, `{"replaced": host}` or
`{"error": "..."}`. It listens where jax's service will afterwards.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from maxstack.config import difference
from maxstack.errors import ConfigError, Passing

OFTEN = 0.3
"""Seconds between two attempts to reach process 0."""
LONGEST = 1 << 20
"""Bytes of a line."""
NAMED = 8
"""Missing processes, or keys that differ, that a message names at most."""
ALIVE = 5.0
"""Seconds that a process has to answer where another one comes with its number: its host may have
lost its power."""
LOOPBACK = "localhost", "127.0.0.1", "::1"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Card:
    """The description of itself that a process sends."""

    process: int
    processes: int
    host: str
    alike: dict[str, Any] = field(default_factory=dict)
    """Plain data that must be the same in all processes."""


class Missing(Passing):
    """Not all processes came; the message names those that did not."""


def roll_call(card: Card, at: str, wait: float, between: float, say: Say) -> None:
    """Wait until all processes are there. ConfigError where two have one number, or were started
    otherwise; Missing after `wait` seconds. `at`: host:port of process 0; every `between` seconds
    `say` is called with the missing."""
    host, _, port = at.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + wait
    if card.process == 0:
        _Caller(card, deadline, between, say).call(host, int(port))
    else:
        _answer(card, host, int(port), deadline, between, say)


def bind_address(at: str) -> str | None:
    """The address for jax's service of process 0 to listen at: loopback where the others reach it
    there; None: every interface."""
    host, _, port = at.rpartition(":")
    return f"127.0.0.1:{port}" if host in LOOPBACK else None


class _Caller:
    """The roll call in process 0."""

    def __init__(self, card: Card, deadline: float, between: float, say: Say):
        self._card, self._deadline, self._between, self._say = card, deadline, between, say
        self._here: dict[int, tuple[socket.socket, Card]] = {}
        self._replaced: list[socket.socket] = []
        self._begin = time.monotonic()

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(1, self._card.processes) if number not in self._here]

    def call(self, host: str, port: int) -> None:
        with contextlib.ExitStack() as ending, selectors.DefaultSelector() as ready:
            listener = ending.enter_context(self._listen(host, port))
            ready.register(listener, selectors.EVENT_READ)
            reported = time.monotonic()
            while self._missing:
                for key, _ in ready.select(OFTEN):
                    if key.fileobj is listener:
                        ending.enter_context(connection := listener.accept()[0])
                        connection.settimeout(ALIVE)
                        ready.register(connection, selectors.EVENT_READ)
                    elif not self._read(key.fileobj):  # type: ignore[arg-type]
                        ready.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                if (now := time.monotonic()) > self._deadline:
                    self._send_all({"missing": self._missing, "over": True})
                    raise Missing(_absent(self._missing, self._card.processes))
                if now - reported >= self._between:
                    reported = now
                    self._say(
                        f"{_absent(self._missing, self._card.processes)}, after "
                        f"{now - self._begin:.0f} s of at most "
                        f"{self._deadline - self._begin:.0f}; here: {self._present()}"
                    )
                    self._send_all({"missing": self._missing})
            self._send_all({"go": True})

    def _listen(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                if host not in LOOPBACK and socket.has_dualstack_ipv6():
                    return socket.create_server(
                        ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
                    )
                address = "127.0.0.1" if host in LOOPBACK else ""
                return socket.create_server((address, port), backlog=1024)
            except OSError as error:
                what = f"process 0 cannot listen on port {port}: {error.strerror}"
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"distributed.coordinator: {what}; choose another port of its host"
                    ) from error
                if time.monotonic() > self._deadline:
                    raise Missing(f"{what}; end what has it, or choose another port") from error
                time.sleep(OFTEN)  # the process before this one may not have ended

    def _read(self, connection: socket.socket) -> bool:
        """Read a card -> True; False where the caller has gone, or is none of this run's."""
        if connection in self._replaced:  # its host froze, and is back
            return False
        try:
            card = Card(**json.loads(connection.makefile("rb").readline(LONGEST)))
        except (ValueError, TypeError, OSError):
            self._here = {
                number: entry for number, entry in self._here.items() if entry[0] is not connection
            }
            return False
        if fault := self._fault(card):
            _send(connection, {"error": fault})
            self._send_all({"error": fault})
            raise ConfigError(fault)
        if card.process in self._here and (old := self._here[card.process][0]) is not connection:
            _send(old, {"replaced": card.host})
            self._replaced.append(old)
        self._here[card.process] = connection, card
        return True

    def _fault(self, card: Card) -> str | None:
        own = self._card
        if card.processes != own.processes:
            return (
                f"distributed.processes: {card.processes} for process {card.process} on "
                f"{card.host}, but {own.processes} for process 0 on {own.host}; give all the same"
            )
        connection, other = self._here.get(card.process, (None, own))
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
                f"were started otherwise: {pairs}; give all the same configuration, "
                "packages, files and settings"
            )
        return None

    def _present(self) -> str:
        hosts = {self._card.host: [0]}
        for number, (_, card) in sorted(self._here.items()):
            hosts.setdefault(card.host, []).append(number)
        return ", ".join(f"{_numbers(numbers)} on {host}" for host, numbers in hosts.items())

    def _send_all(self, word: dict[str, Any]) -> None:
        for connection, _ in self._here.values():
            _send(connection, word)


def _answer(card: Card, host: str, port: int, deadline: float, between: float, say: Say) -> None:
    """The roll call in the other processes: call process 0, again if it goes away, until it says
    go."""
    begin = reported = time.monotonic()
    why = "nobody answers"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, between)) as connection:
                _send(connection, asdict(card))
                connection.settimeout(3 * between)
                for line in connection.makefile("rb"):
                    word = json.loads(line)
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
                    if "go" in word:
                        return
                    if word.get("over"):
                        raise Missing(_absent(word["missing"], card.processes))
                    say(
                        f"{_absent(word['missing'], card.processes)}, says process 0 at "
                        f"{host}:{port}"
                    )
                    reported = time.monotonic()
        except (ConfigError, Missing):
            raise
        except ValueError:
            why = "what answers is not process 0 of this run"
        except OSError as error:
            why = error.strerror or str(error) or "nobody answers"
        if (now := time.monotonic()) - reported >= between:
            reported = now
            say(
                f"process 0 is not reached at {host}:{port} ({why}), after "
                f"{now - begin:.0f} s of at most {deadline - begin:.0f}"
            )
        time.sleep(OFTEN)
    raise Missing(f"process 0 was not reached at {host}:{port} ({why})")


def _alive(connection: socket.socket) -> bool:
    """True where the other side answers."""
    _send(connection, {"again": True})
    try:
        return bool(connection.makefile("rb").readline(LONGEST))
    except OSError:
        return False


def _send(connection: socket.socket, word: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(word).encode() + b"\n")


def _absent(missing: list[int], processes: int) -> str:
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return (
        f"process{'es' * (len(missing) > 1)} {_numbers(missing[:NAMED])}{more} of "
        f"{processes} {'are' if len(missing) > 1 else 'is'} missing"
    )


def _numbers(numbers: list[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
