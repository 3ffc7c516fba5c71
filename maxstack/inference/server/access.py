"""Who may ask a server: clients with a key, and without keys those of this machine."""

import dataclasses
import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.requests import Request

from maxstack.inference.server.refusal import Refusal


@dataclasses.dataclass(frozen=True)
class Access:
    """The keys of clients, and names of the host."""

    keys: Sequence[bytes] = ()
    """Those that clients may show; none: all clients may ask."""
    hosts: Sequence[str] = ()
    """Names of the host that requests may have; none: any."""

    def check(self, request: Request) -> str:
        """The client that asks, by its key, or its address where there are no keys. Refusal for a
        wrong key; without keys, for a name of the host that another site could have given to this
        machine."""
        if self.keys:
            return self._check_key(request.headers.get("authorization", ""))
        if self.hosts and _host(request) not in self.hosts:
            raise Refusal(403, "Host: must name this machine; see --host and --api-key-file")
        return _network(request.client.host) if request.client else ""

    def _check_key(self, header: str) -> str:
        """The key's number. Refusal with status 401 for a request without a key. Takes as long for
        each key."""
        scheme, _, given = header.partition(" ")
        key = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
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
    """The header's name, without port and brackets."""
    return re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()


def _network(host: str) -> str:
    """An address, of IPv6 the network of 64 bits that one client is given whole."""
    if ":" not in host or host.startswith(("::ffff:", "fe80:")):  # IPv4's, or of one link
        return host
    try:
        return str(ipaddress.ip_network(f"{host}/64", strict=False))
    except ValueError:  # a proxy wrote something else
        return host
