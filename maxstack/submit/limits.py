"""Limits on the size of what each target accepts, checked before anything is submitted.

A value that is too large would otherwise fail on the cluster, once for each restart."""

from typing import TYPE_CHECKING

from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.submit.job import Job

OBJECT = 1_572_864 - 131_072
"""Bytes of a Kubernetes object as JSON. etcd's --max-request-bytes is 1.5 MiB by default, which is
below the API server's 3 MiB for a request; an eighth of a MiB is left to what the API server adds
(status, managedFields)."""
SCRIPT = 4_194_304
"""Bytes of a batch script: Slurm's max_script_size by default (slurm.conf, SchedulerParameters)."""
WRAPPER = 4096
"""Bytes for the shell script that xpk wraps around a command, as one argument of bash in the
container (xpk 1.16.0, core/docker_container.py)."""


def check_size(job: "Job", target: str, what: str, text: str, limit: int) -> None:
    """ConfigError, with how to avoid it, for a text of more than `limit` bytes in UTF-8. A string
    for a process's arguments or environment counts with the NUL at its end."""
    if (size := len(text.encode())) <= limit:
        return
    problem = f"--target {target}: {what} has {size:,} bytes, and {limit:,} is the most"
    if job.cluster.config or len(job.packed) < limit // 2:
        raise ConfigError(f"{problem}; shorten env and secrets of the cluster's file")
    raise ConfigError(
        f"{problem} (the configuration is {len(job.packed):,} of them, packed from "
        f"{len(job.text.encode()):,}); name the sources by fewer patterns, or put it where every "
        f"host sees it: --dry-run --out DIR --set config=/PATH/{job.name}.yml writes it as "
        f"DIR/{job.name}.yml, to be copied to that path in the bucket or the image"
    )
