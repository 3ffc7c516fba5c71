"""Retries for stores and disks that do not answer, on top of the drivers' own.

An error is transient if it, or one of its causes, is of the network or has an HTTP status such as
429 or 503. Then the call is repeated after pauses that double up to 15 s, with jitter, until
$MAXSTACK_RETRY_SECONDS are over. Errors that say what is wrong (403, 404, certificates) are raised
at once. One line is logged when a store's outage begins and one when it ends."""

import errno
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from maxstack.errors import ConfigError, quoted, shortened

log = logging.getLogger(__name__)
T = TypeVar("T")
SECONDS = 300.0
"""Default of $MAXSTACK_RETRY_SECONDS."""
_FIRST, _LONGEST = 0.25, 15.0
_PASSING = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
}
_OF_DISKS = {errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ESTALE}
"""Further transient errors of paths of the operating system, which a network file system may give;
all errors of stores' drivers come as EIO."""
# By name, because these packages need not be installed and must not be imported to ask.
_CONNECTION = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseStreamingError",
    "TimeoutError",
    "TransportError",
}
"""Network errors of aiohttp, botocore, http.client, httpx, requests and asyncio, by class name."""
_waiting: dict[str, float] = {}
_lock = threading.Lock()


class Cut(ConnectionError):
    """A response that is shorter than requested."""


def retry(path: str, act: Callable[[], T]) -> T:
    """Call `act`, again after growing pauses with jitter while the store of `path`, or a disk, does
    not answer, for at most `patience()` seconds; return its result. Other errors are raised at
    once, and the last one at the end."""
    begin, store = time.monotonic(), _store(path)
    pause = _FIRST
    while True:
        try:
            result = act()
        except Exception as error:
            # By the clock and not by a number of attempts: an outage has a length, and a driver's
            # own retries differ.
            left = begin + patience() - time.monotonic()
            if left <= 0 or not may_be_transient(path, error):
                with _lock:
                    _waiting.pop(store, None)
                raise
            _tell(path, store, error, left)
            # Jitter: the hosts of a job lose a store at the same moment and must not come back at
            # the same moment.
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST)
            continue
        if store in _waiting:
            _tell_end(store)
        return result


def patience() -> float:
    """$MAXSTACK_RETRY_SECONDS, by default SECONDS. ConfigError if it is no number."""
    given = os.environ.get("MAXSTACK_RETRY_SECONDS", str(SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"MAXSTACK_RETRY_SECONDS={quoted(given)}: must be a number of seconds, 0 or more; 0 "
            "gives up at the first failure"
        )
    return seconds


def may_be_transient(path: str, error: BaseException) -> bool:
    """Return True if an error of reading `path` may go away."""
    of_disk = "://" not in path and isinstance(error, OSError) and error.errno in _OF_DISKS
    return of_disk or is_transient(error)


def is_transient(error: BaseException) -> bool:
    """Whether an error of a driver may go away: the store did not answer, cut its answer short, or
    said that it is busy. Errors about the request itself (no such file, not allowed) stay."""
    for link in _chain(error):
        # A wrong certificate stays wrong, though it may come wrapped in an error of the connection.
        # FileExpired of s3fs says that the object was replaced.
        if isinstance(link, ssl.SSLCertVerificationError) or type(link).__name__ == "FileExpired":
            return False
        if _of_network(link):
            return True
        if (status := _status(link)) is not None:
            return status in (408, 425, 429) or status >= 500
    return False


def root_cause(error: BaseException) -> BaseException:
    """Return the first of an error and its causes that has an HTTP status or is of the network;
    the error itself if there is none, or if a 404 comes first."""
    for link in _chain(error):
        # 404 is an answer: the error itself tells what does not exist.
        if (status := _status(link)) == 404:
            break
        if status is not None or _of_network(link):
            return link
    return error


def _of_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        # A name that does not exist is a typing mistake; only a resolver that is busy passes.
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    return any(kind.__name__ in _CONNECTION for kind in type(error).__mro__)


def _status(error: Any) -> int | None:
    """The HTTP status in an error of aiohttp, gcsfs, httpx, requests or botocore."""
    # botocore's response is a dict, that of requests and httpx an object; aiohttp and gcsfs have
    # the number themselves.
    response = getattr(error, "response", None)
    found: Any = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:
        found = getattr(response, "status_code", found)
    return int(found) if str(found).isdigit() and 300 <= int(found) < 600 else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # Drivers wrap what happened, some by `from`, some by raising in an except block.
        error = error.__cause__ or error.__context__


def _store(path: str) -> str:
    scheme, remote, inside = path.partition("://")
    if not remote:
        return os.path.dirname(path)
    return f"{scheme}://{inside.partition('/')[0]}"


def _tell(path: str, store: str, error: Exception, left: float) -> None:
    """Log the first failure of a store since it last answered."""
    with _lock:
        # One line when an outage begins and one when it ends, however many threads wait.
        if store in _waiting:
            return
        _waiting[store] = time.monotonic()
    reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 200)
    log.warning(
        "%s does not answer: trying again for up to %.0f s (%s: %s)", store, left, path, reason
    )


def _tell_end(store: str) -> None:
    with _lock:
        since = _waiting.pop(store, None)
    if since is not None:
        log.warning("%s answers again after %.1f s", store, time.monotonic() - since)
