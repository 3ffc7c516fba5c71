"""The server's process: its socket, its protocol, and its end by a signal."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxstack.errors import ConfigError
from maxstack.inference.server.connections import (
    ANSWER,
    BODY,
    HEAD,
    IDLE,
    INVALID,
    READING,
    SECONDS,
    Listener,
)
from maxstack.inference.server.framing import TURN, Requests

log = logging.getLogger(__name__)
GRACE = 30
"""Seconds in which clients may read their last answers once all are computed."""
CANCEL = 5
"""Seconds after which requests whose connections were ended are cancelled."""


def bound_socket(host: str, port: int) -> Listener:
    """A socket that does not listen yet. ConfigError where the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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
    """Answer requests until SIGTERM or SIGINT; then `drain`, which refuses new ones and returns
    when those that run have finished, for `grace` seconds at most, and end. A SIGINT meanwhile ends
    at once. `said` makes the line that is printed at the start of the server's address."""
    Server(app, listener, said, drain, grace).run([listener])


class Protocol(H11Protocol):
    """uvicorn's protocol, which tells a connection what it waits for, and lets other connections
    have their turn while a client sends many small parts."""

    def __init__(self, listener: Listener, **given: Any):
        super().__init__(**given)
        self.conn: Requests = Requests()
        self._listener, self._more = listener, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection = self._listener.of(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._settle()

    def handle_events(self) -> None:
        if self.transport.is_closing():
            return
        self.conn.turn = TURN
        super().handle_events()
        if not self.conn.turn:
            self.flow.read_paused = False  # a request that is answered would resume reading
            self.transport.pause_reading()
            if not self._more:
                self._more = True
                self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._more = False
        self.transport.resume_reading()
        if self.cycle and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.handle_events()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 has just raised, where no answer has begun, and close."""
        error = sys.exc_info()[1]
        assert isinstance(error, h11.RemoteProtocolError)
        self._listener.closed[INVALID] += 1
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = f"{error}\n".encode()
            headers = [("Connection", "close"), ("Content-Type", "text/plain")]
            answer = h11.Response(status_code=error.error_status_hint, headers=headers)
            for event in (answer, h11.Data(data=text), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._settle()

    def _settle(self) -> None:
        cycle, begun = self.cycle, self.conn.their_state is h11.SEND_BODY
        if self.flow.write_paused:
            state = READING
        elif cycle and not cycle.response_complete:
            state = BODY if cycle.more_body else ANSWER
        elif cycle and not begun and not self.conn.trailing_data[0]:
            state = IDLE
        else:
            state = HEAD
        self._connection.enter(state)


class Server(uvicorn.Server):
    """uvicorn's server, which a signal drains before it ends."""

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
            loop="asyncio",  # which asks the listener for each connection
            ws="none",
            log_config=None,
            log_level=logging.ERROR,  # warnings are of what clients send, and without end
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a header is no address: clients would be as many as they say
            timeout_keep_alive=int(SECONDS[IDLE]) + 5,  # the listener's comes first
            timeout_graceful_shutdown=GRACE + CANCEL,
        )
        config.load()
        config.ssl = listener.tls
        super().__init__(config)
        self._listener, self._said, self._drained, self._grace = listener, said, drain, grace
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
        again = self._draining is not None and sig == signal.SIGINT
        if again or not self.started:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it leaves undone
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
            _tell(f"{name}: new requests are refused; the server ends with those that run")

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._drained(), self._grace)
        except TimeoutError:
            _tell(f"what still runs after {self._grace:g} s is cut short")
            self._listener.end_all()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = self._loop.call_later(0 if self.force_exit else GRACE, self._listener.end_all)
        await super().shutdown(sockets)
        ending.cancel()


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # who read the output may be gone
        print(line, flush=True)
