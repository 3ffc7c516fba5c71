"""What a request must pass before its body is used: the client's key or address, and the size and
time of the body."""

import asyncio
import dataclasses
import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request

from maxstack.inference.server.refusal import Refusal

BODY_SECONDS = 60
"""Time for a body to arrive."""
DISCARDED = 16
"""A body that is too large is read to its end, so that the client sees the refusal, up to this many
times the size limit."""
CLOSE = {"Connection": "close"}
"""Header of an answer to a body that was not read to its end."""
JOINED = 1 << 20
"""Bytes from which on parts are joined outside the event loop."""


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may ask."""

    keys: Sequence[bytes] = ()
    """Keys that clients may show; none: no key is needed."""
    hosts: Sequence[str] = ()
    """Names that the Host header may have; none: any."""

    def check(self, request: Request) -> str:
        """Return the client that asks, by its key, or its address where there are no keys. Refusal
        for a wrong key, and without keys for a foreign Host: a page of another site could have
        given that name to this machine (DNS rebinding)."""
        if self.keys:
            return self._check_key(request.headers.get("authorization", ""))
        if self.hosts and _host(request) not in self.hosts:
            raise Refusal(403, "Host: must name this machine; see --host and --api-key-file")
        return _network(request.client.host) if request.client else ""

    def _check_key(self, header: str) -> str:
        """Return the number of the key. Takes as long for each key."""
        scheme, _, given = header.partition(" ")
        key = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        # A list, not `any` of a generator: comparing all keys tells nothing by its time.
        same = [hmac.compare_digest(key, own) for own in self.keys]
        if not any(same):
            raise Refusal(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key {same.index(True)}"


def _host(request: Request) -> str:
    """Return the name in the Host header, without port and brackets."""
    return re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()


def _network(host: str) -> str:
    """Return an address, or of IPv6 the network of 64 bits that one client owns whole."""
    # IPv4, also written as IPv6, and addresses of one link, where the first 64 bits are equal.
    if ":" not in host or host.startswith(("::ffff:", "fe80:")):
        return host
    try:
        return str(ipaddress.ip_network(f"{host}/64", strict=False))
    except ValueError:
        # A proxy wrote something else.
        return host


async def read_bytes(request: Request, most: int) -> bytes:
    """Read the body of a request. Refusal for one that is larger than `most` bytes, or too slow."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                # Read on without keeping: a client that is still sending does not see an answer.
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
    # Joining 8 MB would hold the event loop.
    return b"".join(parts) if size < JOINED else await asyncio.to_thread(b"".join, parts)
