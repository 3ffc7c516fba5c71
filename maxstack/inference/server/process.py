"""The server's process: its socket, and its end by a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from maxstack.errors import ConfigError

log = logging.getLogger(__name__)
GRACE = 30
"""Seconds in which clients may read their last answers once all are computed."""
KEEP_ALIVE = 75
"""Seconds for which an idle connection is kept."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. ConfigError where the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
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
    sock: socket.socket,
    said: Callable[[str], str],
    drain: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Answer requests until SIGTERM or SIGINT; then `drain`, which refuses new ones and returns
    when those that run have finished, and end. A SIGINT meanwhile ends at once. `said` makes the
    line that is printed at the start of the server's address."""
    Server(app, said, drain).run([sock])


class Server(uvicorn.Server):
    """uvicorn's server, which a signal drains before it ends."""

    def __init__(
        self,
        app: Starlette,
        said: Callable[[str], str],
        drain: Callable[[], Coroutine[Any, Any, None]],
    ):
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._said, self._drained = said, drain
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        origin = f"http://{shown}:{port}"
        print(self._said(origin), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._draining is not None and sig == signal.SIGINT
        if again or not self.started:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        if self._draining is None:
            print(
                f"{name}: new requests are refused; the server ends with those that run", flush=True
            )
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._drained()
        self.should_exit = True
