"""The refusals that errors become."""

import logging

from maxstack.errors import ConfigError, DataError
from maxstack.inference.server.refusal import Refusal
from maxstack.inference.service import Closed, Failed, Full

log = logging.getLogger(__name__)
RETRY_AFTER = 1
"""Seconds after which a client may ask a full server again."""


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that a client gets for an error; logs those that are the server's."""
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
