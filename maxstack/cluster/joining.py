"""Join the other processes of the run, whoever started them."""

import glob
import os
import platform
import resource
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from maxstack.cluster import environment, pathways
from maxstack.cluster.roll_call import Card, Missing, bind_address, roll_call
from maxstack.errors import ConfigError, quoted
from maxstack.hardware.devices import GPUS, visible_gpus

if TYPE_CHECKING:
    from maxstack.schema.config import Config

JAX_WAITS = {False: 100, True: 24 * 3600}
"""Seconds until jax itself ends the process, from C++, because it has not heard of another one: its
default, and with a watchdog."""
JOIN, WAITING, AFTER = 300.0, 30.0, 90
"""Seconds that a process waits at most for the others, between two lines that say who is missing,
and for jax once all are there."""
WAIT = "MAXSTACK_WAIT_FOR_PEERS"
"""In the environment: another number of seconds to wait for the others."""
OWN = "run", "distributed"
"""Sections that may differ between processes, but for the run's name: hosts may see a folder in
several places."""
PACKAGES = ("maxstack", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def join(cfg: "Config") -> None:
    """Find the others, and let jax join them; where a watchdog looks after them, jax leaves it the
    decision who is lost. Nothing where this process is alone. ConfigError or Missing, which ends
    the process so that a supervisor tries again."""
    if cfg.runtime == "pathways":
        return pathways.initialize()
    if (own := member(cfg)) is None:
        return None
    import jax

    say(own.told())
    settings = {
        key: value for key, value in cfg.model_dump(mode="json").items() if key not in OWN
    } | {"run": {"name": cfg.run.name}}
    card = Card(
        own.process,
        own.processes,
        platform.node(),
        {"packages": {name: version(name) for name in PACKAGES}, "configuration": settings},
    )
    allow_connections(own.processes)
    try:
        roll_call(card, own.coordinator, wait := seconds_to_wait(), WAITING, say)
    except Missing as error:
        raise Missing(
            f"{error}, in {wait:.0f} s; {WAIT} in the environment gives another number"
        ) from error
    jax.distributed.initialize(
        own.coordinator,
        own.processes,
        own.process,
        devices_of(own.here),
        cluster_detection_method="deactivate",
        initialization_timeout=AFTER,
        heartbeat_timeout_seconds=JAX_WAITS[cfg.faults.watchdog is not None],
        coordinator_bind_address=bind_address(own.coordinator),
    )


def seconds_to_wait() -> float:
    """For the others, as the environment says."""
    try:
        return float(os.environ.get(WAIT, JOIN))
    except ValueError as error:
        raise ConfigError(
            f"{WAIT}={quoted(os.environ[WAIT])} in the environment: is no number of seconds"
        ) from error


def allow_connections(processes: int) -> None:
    """Let this process have a connection to each of the others, twice, beside its files: systems
    begin with 1,024 of all."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * processes + 1024
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most),
        )


def member(cfg: "Config") -> environment.Member | None:
    """As which of how many this process was started: by the configuration, or as the environment
    says."""
    if given := cfg.distributed:
        return environment.Member(
            "the configuration", given.coordinator, given.processes, given.process
        )
    return environment.member(
        os.environ, bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    )


def devices_of(here: tuple[int, int]) -> list[int] | None:
    """This process's part of the GPUs of a host that it shares with others; None: all that it
    sees."""
    number, count = here
    there = len(visible_gpus())
    if (
        count == 1 or not there or there < len(glob.glob(GPUS))
    ):  # where some are hidden, it has been given its own
        return None
    if there % count:
        raise ConfigError(
            f"distributed: {count} processes on {platform.node()} cannot share its "
            f"{there} GPUs; start one a host, or one a GPU"
        )
    return [*range(number * there // count, (number + 1) * there // count)]


def say(text: str) -> None:
    """On stderr: the log is not open yet."""
    print(f"distributed: {text}", file=sys.stderr, flush=True)
