"""Pathways: one process drives all devices, through a proxy. Tried against a stand-in for the proxy
alone, never a Pathways server."""

import importlib.util
import os
import re
import socket
import time

from maxstack.cluster.roll_call import OFTEN, Missing
from maxstack.errors import ConfigError

TARGET = "JAX_BACKEND_TARGET"
WAIT = 120.0
"""Seconds that the proxy has to answer; it starts beside the run, and takes a while."""


def environment() -> None:
    """What must stand in the environment before jax is imported. ConfigError where it is not known
    where the proxy is."""
    address()
    os.environ["JAX_PLATFORMS"] = "proxy"
    os.environ.setdefault("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", str(round(WAIT)))


def initialize() -> None:
    """Make jax's devices those of the proxy, before any is touched. ConfigError where pathwaysutils
    is missing; Missing, which ends the process so that it is started again, where no proxy answers
    in time."""
    if importlib.util.find_spec("pathwaysutils") is None:
        raise ConfigError("runtime: pathways needs pathwaysutils; pip install 'maxstack[pathways]'")
    host, port = address()
    deadline, why = time.monotonic() + WAIT, "nobody answers"
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            break
        except OSError as error:
            why = error.strerror or why
        if time.monotonic() > deadline:
            raise Missing(
                f"runtime: pathways: no proxy answers at {host}:{port} ({why}) in "
                f"{WAIT:.0f} s; look whether its container runs, or "
                f"correct {TARGET}={os.environ[TARGET]}"
            )
        time.sleep(OFTEN)
    import pathwaysutils

    pathwaysutils.initialize()


def address() -> tuple[str, int]:
    """Of the proxy."""
    given = os.environ.get(TARGET, "")
    found = re.fullmatch(r"grpc://(.+):(\d+)", given)
    if not found:
        told = f"{TARGET}={given!r} is no such address" if given else f"{TARGET} is not set"
        raise ConfigError(
            f"runtime: pathways: {told}; give the proxy's, as in "
            f"{TARGET}=grpc://127.0.0.1:29000, or use runtime: jax"
        )
    return found[1], int(found[2])
