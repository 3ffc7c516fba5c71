"""Join the other processes of the run, whoever started them."""

import glob
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.cluster import environment, job_key, pathways
from maxstack.cluster.roll_call import Card, Missing, bind_address, roll_call
from maxstack.errors import ConfigError, quoted
from maxstack.hardware.descriptors import allow_files
from maxstack.hardware.devices import GPUS, visible_gpus

if TYPE_CHECKING:
    from maxstack.schema.config import Config

JAX_WAITS = {False: 100, True: 24 * 3600}
"""Seconds until jax itself ends the process, from C++, because another one is silent: its default,
and with a watchdog."""
JOIN, WAITING, AFTER = 300.0, 30.0, 90
"""Seconds that a process waits at most for the others, between two lines that name the missing,
and for jax once all are there."""
WAIT = "MAXSTACK_WAIT_FOR_PEERS"
"""Environment variable with another number of seconds to wait for the others."""
OWN = {"run", "distributed"}
"""Sections that may differ between processes, but for the run's name: hosts may see a folder in
several places."""
PACKAGES = ("maxstack", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def join(cfg: "Config", alike: Callable[["Config"], dict[str, Any]] = lambda cfg: {}) -> None:
    """Meet the other processes, and let jax join them; where there are watchdogs, these decide
    which process is lost, and not jax. `alike`: more that must be the same in all. Nothing where
    this process is alone. ConfigError, or Missing, which ends the process so that a supervisor
    tries again."""
    if cfg.runtime == "pathways":
        return pathways.initialize()
    if (own := member(cfg)) is None:
        return None
    import jax

    environment.say(own.describe())
    settings = cfg.model_dump(mode="json", exclude=OWN) | {"run": {"name": cfg.run.name}}
    packages = {name: version(name) for name in PACKAGES}
    card = Card(
        own.process,
        own.processes,
        platform.node(),
        {"packages": packages, "configuration": settings, **alike(cfg)},
    )
    allow_files(2 * own.processes + 1024)  # two connections to each of the others
    wait = seconds_to_wait()
    try:
        with job_key.shown(Path(cfg.run.output_dir) / cfg.run.name, own.process == 0) as find:
            job_key.known = roll_call(card, own.coordinator, wait, WAITING, environment.say, find)
    except Missing as error:
        raise Missing(
            f"{error}, in {wait:.0f} s; {WAIT} in the environment gives another number"
        ) from error
    jax.config.update("jax_enable_preemption_service", False)  # faults/preemption.py serves signals
    jax.distributed.initialize(
        own.coordinator,
        own.processes,
        own.process,
        devices_of(own.local),
        cluster_detection_method="deactivate",
        initialization_timeout=AFTER,
        heartbeat_timeout_seconds=JAX_WAITS[cfg.faults.watchdog is not None],
        coordinator_bind_address=bind_address(own.coordinator),
    )


def seconds_to_wait() -> float:
    """Seconds to wait for the others, which the environment may set."""
    try:
        return float(os.environ.get(WAIT, JOIN))
    except ValueError as error:
        raise ConfigError(
            f"{WAIT}={quoted(os.environ[WAIT])} in the environment: is no number of seconds"
        ) from error


def member(cfg: "Config") -> environment.Member | None:
    """This process among those of its run, by the configuration or the environment; None where it
    is alone."""
    if section := cfg.distributed:
        own = environment.Member(
            "the configuration", section.coordinator, section.processes, section.process
        )
        environment.check_others(own, os.environ)
        return own
    on_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    return environment.member(os.environ, on_tpu)


def devices_of(local: tuple[int, int]) -> list[int] | None:
    """This process's share of the GPUs of a host, as number `local[0]` of `local[1]` processes;
    None: all that it sees."""
    number, count = local
    gpus = len(visible_gpus())
    # Where some GPUs are hidden, the launcher has dealt them out.
    if count == 1 or not gpus or gpus < len(glob.glob(GPUS)):
        return None
    if gpus % count:
        raise ConfigError(
            f"distributed: {count} processes on {platform.node()} cannot share its "
            f"{gpus} GPUs; start one a host, or one a GPU"
        )
    share = gpus // count
    return [*range(number * share, (number + 1) * share)]
