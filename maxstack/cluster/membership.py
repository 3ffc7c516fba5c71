"""Join the other processes of the run, whichever launcher started them.

The environment or the configuration gives this process's number and where process 0 is. A roll call
waits for all, names the missing and refuses those that were started otherwise; only then does jax
join them, which by itself waits in silence and aborts. jax's own signs of trouble (preemption
service, heartbeats) are off or far apart, since faults/ serves signals and watches processes.
"""

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
    from maxstack.schema.config import Config, DistributedConfig

JAX_WAITS = {False: 100, True: 24 * 3600}
"""Seconds of another process's silence after which jax ends this one, from C++: jax's default, and
with a watchdog (True) a day, since the watchdog decides."""
JOIN = 300.0
"""Seconds that a process waits at most for the others."""
BETWEEN = 30.0
"""Seconds between two lines that name the missing processes."""
JAX_JOINS = 90
"""Seconds that jax has to join once all processes are there."""
WAIT = "MAXSTACK_WAIT_FOR_PEERS"
"""Environment variable that overrides JOIN."""
OWN = {"run", "distributed"}
"""Sections that may differ between processes, except for the run's name: hosts may mount a folder
in different places."""
PACKAGES = ("maxstack", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def join(cfg: "Config", alike: Callable[["Config"], dict[str, Any]] = lambda cfg: {}) -> None:
    """Meet the other processes and let jax join them; do nothing where this process is alone.
    `alike`: more that must be the same in all. ConfigError, or Missing, whose exit code makes a
    supervisor try again."""
    if cfg.runtime == "pathways":
        return pathways.initialize()
    if (own := member(cfg.distributed)) is None:
        return None
    import jax

    environment.say(own.describe())
    settings = cfg.model_dump(mode="json", exclude=OWN) | {"run": {"name": cfg.run.name}}
    # Another version may compile another program, whose collectives do not match.
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
        with job_key.share(Path(cfg.run.output_dir) / cfg.run.name, own.process == 0) as find:
            job_key.current = roll_call(card, own.coordinator, wait, BETWEEN, environment.say, find)
    except Missing as error:
        raise Missing(
            f"{error}, in {wait:.0f} s; set {WAIT} in the environment to wait longer"
        ) from error
    jax.config.update("jax_enable_preemption_service", False)  # faults/preemption.py serves signals
    jax.distributed.initialize(
        own.coordinator,
        own.processes,
        own.process,
        devices_of(own.local),
        # Its own detection was right in 10 of 15 cases, and may contradict what the roll call
        # agreed on.
        cluster_detection_method="deactivate",
        initialization_timeout=JAX_JOINS,
        # With one process stopped in a save, jax's heartbeat aborted the other after 83 s, and
        # blamed the wrong one.
        heartbeat_timeout_seconds=JAX_WAITS[cfg.faults.watchdog is not None],
        coordinator_bind_address=bind_address(own.coordinator),
    )


def seconds_to_wait() -> float:
    """Return the seconds to wait for the others."""
    try:
        return float(os.environ.get(WAIT, JOIN))
    except ValueError as error:
        raise ConfigError(
            f"{WAIT}={quoted(os.environ[WAIT])} in the environment is not a number of seconds"
        ) from error


def member(section: "DistributedConfig | None") -> environment.Member | None:
    """Return this process's place among those of its run, by the configuration or the environment;
    None where it is alone."""
    if section:
        own = environment.Member(
            "the configuration", section.coordinator, section.processes, section.process
        )
        environment.check_others(own, os.environ)
        return own
    on_tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    return environment.member(os.environ, on_tpu)


def devices_of(local: tuple[int, int]) -> list[int] | None:
    """Return this process's share of a host's GPUs, as number `local[0]` of `local[1]` processes;
    None: all that it sees."""
    number, count = local
    gpus = len(visible_gpus())
    # Where some GPUs are hidden, the launcher has shared them out.
    if count == 1 or not gpus or gpus < len(glob.glob(GPUS)):
        return None
    if gpus % count:
        raise ConfigError(
            f"distributed: {count} processes on {platform.node()} cannot share its "
            f"{gpus} GPUs; start one a host, or one a GPU"
        )
    share = gpus // count
    return [*range(number * share, (number + 1) * share)]
