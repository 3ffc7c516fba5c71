"""Who may ask a server: clients with a key, and without keys those of this machine."""

import dataclasses
import hmac
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

    def check(self, request: Request) -> None:
        """Refusal for a wrong key; without keys, for a name of the host that another site could
        have given to this machine."""
        if self.keys:
            self._check_key(request.headers.get("authorization", ""))
        elif self.hosts and _host(request) not in self.hosts:
            raise Refusal(403, "Host: must name this machine; see --host and --api-key-file")

    def client(self, request: Request) -> str:
        """Whose request it is, of those that take turns: by its key, or by its address."""
        if self.keys:
            return request.headers.get("authorization", "")
        return request.client.host if request.client else ""

    def _check_key(self, header: str) -> None:
        """Refusal with status 401 for a request without a key. Takes as long for each wrong key."""
        scheme, _, given = header.partition(" ")
        key = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not any([hmac.compare_digest(key, own) for own in self.keys]):
            raise Refusal(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _host(request: Request) -> str:
    """The header's name, without port and brackets."""
    return re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
