"""Pathways: one process drives all devices through a proxy. Tested against a stand-in for the proxy
only, never a Pathways server."""

import importlib.util
import os
import re
import socket
import time

from maxstack.cluster.roll_call import OFTEN, Missing
from maxstack.errors import ConfigError, installing

TARGET = "JAX_BACKEND_TARGET"
WAIT = 120.0
"""Seconds that the proxy has to answer; it starts at the same time as the run."""


def environment() -> None:
    """Set the environment variables that jax reads when it is imported. ConfigError where the
    proxy's address is not known."""
    address()
    os.environ["JAX_PLATFORMS"] = "proxy"
    os.environ.setdefault("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", str(round(WAIT)))


def initialize() -> None:
    """Make jax use the proxy's devices, before any device is touched. ConfigError where
    pathwaysutils is missing; Missing, whose exit code asks for a restart, where no proxy answers in
    time."""
    if importlib.util.find_spec("pathwaysutils") is None:
        raise ConfigError(f"runtime: pathways needs pathwaysutils: {installing('pathways')}")
    host, port = address()
    deadline = time.monotonic() + WAIT
    while True:
        try:
            # Tried first, so that a proxy that does not come is an error with its address.
            socket.create_connection((host, port), timeout=5.0).close()
            break
        except OSError as error:
            why = error.strerror or "nobody answers"
        if time.monotonic() > deadline:
            raise Missing(
                f"runtime: pathways: no proxy answers at {host}:{port} ({why}) in {WAIT:.0f} s; "
                f"check that its container runs, or correct {TARGET}={os.environ[TARGET]}"
            )
        time.sleep(OFTEN)
    import pathwaysutils

    pathwaysutils.initialize()


def address() -> tuple[str, int]:
    """Return host and port of the proxy."""
    target = os.environ.get(TARGET, "")
    match = re.fullmatch(r"grpc://(.+):(\d+)", target)
    if not match:
        fault = f"{TARGET}={target!r} is no such address" if target else f"{TARGET} is not set"
        raise ConfigError(
            f"runtime: pathways: {fault}; give the proxy's, such as "
            f"{TARGET}=grpc://127.0.0.1:29000, or use runtime: jax"
        )
    return match[1], int(match[2])
