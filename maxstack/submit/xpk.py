"""The command line of xpk, which is no dependency: `xpk workload create` and `create-pathways`."""

import shlex

from maxstack.config import ConfigError
from maxstack.exit_codes import CRASHED, RETRY
from maxstack.submit.job import Job, machine

UNSAFE = set("\"'\\`$\n")
"""What xpk would hand on into YAML and a shell without quoting it."""


def command(job: Job) -> list[str]:
    """The words of the command; `create-pathways` where the run's runtime is that. ConfigError for a value that xpk does not quote."""
    cluster, tpu, pathways = job.cluster, job.tpu, job.cfg.runtime == "pathways"
    for name, value in cluster.env.items():
        if odd := sorted(UNSAFE & {*value}):
            raise ConfigError(f"env.{name}: xpk does not quote {' '.join(map(repr, odd))}; put the value into a secret, or use --target gke")
    if cluster.secrets:
        raise ConfigError("secrets: xpk hands none down; use --target gke, or give the service account what it needs")
    if not tpu and (job.topology.slices > 1 or job.chips_of_a_host != job.chip.chips_per_host):
        raise ConfigError(f"topology: xpk has whole hosts of {job.chip.chips_per_host} GPUs; give {job.chip.name}:HOSTSx{job.chip.chips_per_host}")
    if pathways and not tpu:
        raise ConfigError(f"topology: Pathways runs on TPUs, not on {job.chip.name}")
    kind = [f"--tpu-type={machine(job, 'xpk')}-{'x'.join(map(str, job.topology.sides))}", f"--num-slices={job.topology.slices}"] if tpu else \
        [f"--device-type={machine(job, 'xpk')}", f"--num-nodes={job.topology.hosts}"]
    given = {"project": cluster.project, "zone": cluster.zone, "priority": cluster.priority}
    return ["xpk", "workload", "create-pathways" if pathways else "create", f"--workload={job.name}", f"--cluster={job.needs('cluster')}",
            *(f"--{key}={value}" for key, value in given.items() if value), *kind, f"--docker-image={job.needs('image')}",
            f"--max-restarts={cluster.max_restarts}", f"--termination-grace-period-seconds={cluster.grace}",
            *([] if pathways else [f"--restart-on-exit-codes={RETRY},{CRASHED}"]),
            *(f"--env={name}={value}" for name, value in cluster.env.items()), f"--command={_inside(job)}"]


def _inside(job: Job) -> str:
    """What each container runs: the configuration unpacked, and training in its place."""
    return f"echo {job.packed} | base64 -d | gunzip > /tmp/run.yml && exec maxstack train /tmp/run.yml"


def shown(words: list[str]) -> str:
    """As one types it."""
    return shlex.join(words)
