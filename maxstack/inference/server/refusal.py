"""Refusals of requests, as OpenAI's API writes them."""

import logging
from typing import Any

from maxstack.errors import ConfigError, DataError, shortened
from maxstack.inference.service import Closed, Failed, Full

log = logging.getLogger(__name__)
RETRY_AFTER = 1
"""Seconds after which a client may ask a full server again."""


class Refusal(Exception):
    """An answer with an HTTP status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        error = {"message": shortened(message, 1000), "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal that a client gets for an error; log those that are the server's fault."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Full):
        wait = {"Retry-After": str(RETRY_AFTER)}
        return Refusal(429, str(error), kind="rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, Closed | Failed):
        return Refusal(503, str(error), kind="service_unavailable_error")
    if isinstance(error, ConfigError | DataError):
        return Refusal(400, str(error))
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed; its log says why", kind="server_error")


HANDLED = (Refusal, Full, Closed, Failed, ConfigError, DataError, Exception)
"""Errors that become refusals."""
