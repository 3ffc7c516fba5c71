"""The server's process: its socket, and its end by a signal.

SIGTERM or SIGINT refuses new requests and waits for the running ones, up to a grace period; then
clients have 30 s to read what is left before their connections are aborted. Requests that hold on
are cancelled 5 s later. A second SIGINT ends at once.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from maxstack.errors import ConfigError
from maxstack.inference.server.connections import IDLE, SECONDS, Listener
from maxstack.inference.server.protocol import Protocol

log = logging.getLogger(__name__)
# 16 streams of 4,000 tokens that nobody reads: the server ended after 38 s with 30 s to read, after
# more than 60 s with 60.
GRACE = 30
"""Seconds for clients to read their last answers once all are computed."""
# With 300 bodies that do not end, cancelling in the same moment printed 241 tracebacks. After an
# abort handlers end by themselves.
CANCEL = 5
"""Seconds after which requests whose connections were aborted are cancelled."""


def bound_socket(host: str, port: int) -> Listener:
    """Bind a socket that does not listen yet. ConfigError where the address is not available."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Bound before the model loads, so that a port in use is told at once; listening comes
        # later, or clients would wait in the backlog for minutes.
        sock = Listener(family, kind, number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror or error}; give "
            "another port, or 0 for any that is free"
        ) from error
    return sock


def serve(
    app: Starlette,
    listener: Listener,
    said: Callable[[str], str],
    drain: Callable[[], Coroutine[Any, Any, None]],
    grace: float,
) -> None:
    """Serve until SIGTERM or SIGINT, then wait up to `grace` seconds for `drain`, which refuses new
    requests and returns when the running ones have finished. A SIGINT meanwhile ends at once.
    `said` formats the line that announces the server's address."""
    Server(app, listener, said, drain, grace).run([listener])


class Server(uvicorn.Server):
    """uvicorn's server, which drains on a signal before it ends."""

    def __init__(
        self,
        app: Starlette,
        listener: Listener,
        said: Callable[[str], str],
        drain: Callable[[], Coroutine[Any, Any, None]],
        grace: float,
    ):
        app.state.listener = listener
        config = uvicorn.Config(
            app,
            http=functools.partial(Protocol, listener),  # type: ignore[arg-type]
            # uvloop does not ask Python for each connection, which `Listener.accept` counts.
            loop="asyncio",
            ws="none",
            log_config=None,
            log_level=logging.ERROR,  # any client could fill the log with warnings
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client could claim any number of addresses
            timeout_keep_alive=int(SECONDS[IDLE]) + 5,  # the listener closes them first
            timeout_graceful_shutdown=GRACE + CANCEL,
        )
        config.load()
        config.ssl = listener.tls
        super().__init__(config)
        self._listener = listener
        self._said = said
        self._drained = drain
        self._grace = grace
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        origin = f"{'https' if self._listener.tls else 'http'}://{shown}:{port}"
        print(self._said(origin), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second SIGTERM changes nothing: some send it to a process and to its group.
        again = self._draining is not None and sig == signal.SIGINT
        if again or not self.started:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(
                logging.CRITICAL
            )  # it would list open requests
        else:
            # A signal handler may run anywhere in Python code; this wakes the loop.
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
            _tell(f"{name}: refusing new requests; the server ends when running ones have finished")

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._drained(), self._grace)
        except TimeoutError:
            _tell(f"requests still running after {self._grace:g} s are cut off")
            self._listener.end_all()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = self._loop.call_later(0 if self.force_exit else GRACE, self._listener.end_all)
        await super().shutdown(sockets)
        ending.cancel()


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of the output may be gone
        print(line, flush=True)
