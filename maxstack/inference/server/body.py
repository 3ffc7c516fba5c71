"""Bodies of requests, of bounded size and time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from maxstack.inference.server.refusal import Refusal

BODY_SECONDS = 60
"""How long a body may take to arrive."""
DISCARDED = 16
"""A body that is too large is read to its end, so that the client sees the refusal, up to so many
times the size that is allowed."""
CLOSE = {"Connection": "close"}
"""Header of an answer to a body that was not read to its end."""

JOINED = 1 << 20
"""Bytes from which on parts are joined beside the event loop."""


async def read_bytes(request: Request, most: int) -> bytes:
    """The body of a request. Refusal for one that is larger than `most` bytes, or too slow."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > most * DISCARDED:
                    break
    except ClientDisconnect:
        raise Refusal(499, "the client left") from None
    except TimeoutError:
        why = f"the body took more than {BODY_SECONDS} seconds"
        raise Refusal(408, why, headers=CLOSE) from None
    if size > most:
        why = f"the body is larger than {most} bytes; send less at a time"
        raise Refusal(413, why, headers=CLOSE if size > most * DISCARDED else None)
    return b"".join(parts) if size < JOINED else await asyncio.to_thread(b"".join, parts)
