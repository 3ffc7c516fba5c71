"""A connection to a server on this machine, for scripts that write HTTP by hand."""

import asyncio


class Opened:
    """A connection, open inside `async with`; any error of it is an OSError or EOFError."""

    def __init__(self, port: int):
        self._port = port

    async def __aenter__(self):
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
