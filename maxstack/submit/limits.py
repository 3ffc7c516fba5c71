"""Limits on the size of what each target accepts, checked before anything is submitted.

A value that is too large would otherwise fail on the cluster, once for each restart."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from maxstack.errors import ConfigError
from maxstack.schema.cluster import STRING

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


def check_strings(
    job: "Job", target: str, named: Iterable[tuple[str, str]], limit: int = STRING
) -> None:
    """ConfigError for a (name, text) that is too long for a process's arguments or environment."""
    for name, text in named:
        if (size := len(text.encode()) + 1) > limit:
            raise _too_large(job, target, name, size, limit)


def check_object(job: "Job", manifest: Mapping[str, Any]) -> None:
    """ConfigError for a Kubernetes object that is larger than etcd stores."""
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"))
    if (size := len(text.encode())) > OBJECT:
        raise _too_large(job, "gke", "the JobSet", size, OBJECT)


def check_script(job: "Job", script: str) -> None:
    """ConfigError for a script that is larger than sbatch accepts."""
    if (size := len(script.encode())) > SCRIPT:
        raise _too_large(job, "slurm", "the script", size, SCRIPT)


def _too_large(job: "Job", target: str, what: str, size: int, limit: int) -> ConfigError:
    """Error that says what is too large, by how much, and how to avoid it."""
    problem = f"--target {target}: {what} has {size:,} bytes, and {limit:,} is the most"
    if job.cluster.config or len(job.packed) < limit // 2:
        return ConfigError(f"{problem}; shorten env and secrets of the cluster's file")
    return ConfigError(
        f"{problem} (the configuration is {len(job.packed):,} of them, packed from "
        f"{len(job.text.encode()):,}); name the sources by fewer patterns, or put it where every "
        f"host sees it: --dry-run --out DIR --set config=/PATH/{job.name}.yml writes it as "
        f"DIR/{job.name}.yml, to be copied to that path in the bucket or the image"
    )
