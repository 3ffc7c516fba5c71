"""The facts of a cluster: configs/clusters/*.yml, apart from what is trained there."""

import re
from typing import Annotated, ClassVar

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault
from maxstack.config.compose import Presets
from maxstack.submit.limits import ENVIRONMENT, STRING

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=63)]
"""The value of a Kubernetes label (Kubernetes, "Labels and Selectors")."""
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
MARGIN = 60
"""Seconds between the end of the grace and Slurm's limit."""
RESERVED = re.compile(r"MAXSTACK_CONFIG$|JAX_(COORDINATOR|PROCESS|NUM_PROCESSES)|PROCESSES_IN_JOB$|JOB_|JOBSET_|TPU_WORKER|MEGASCALE_|SLURM_|OMPI_|"
                      r"NNODES$|NODE_RANK$|MASTER_|(LOCAL_)?(RANK|WORLD_SIZE)$")
Line = Annotated[str, Field(pattern=r"^[^\x00\r\n]*$")]


Time = Annotated[str, Field(pattern=r"^([0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2})$"),
                 pydantic.BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]


class SecretConfig(Section):
    """One key of a Kubernetes secret."""

    name: Name
    """Of the secret."""
    key: Name
    """In it."""


class BucketConfig(Section):
    """A bucket of Google Cloud Storage that is mounted in every pod."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")]
    """Without gs://."""
    mount: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] = "/gcs"
    """Where pods see it; run.output_dir lies below."""
    storage: Name | None = None
    """What `xpk storage attach` called it; xpk mounts it by that name."""


class SlurmConfig(Section):
    """What sbatch is told."""

    partition: Name | None = None
    """null: the cluster's default."""
    account: Name | None = None
    """null: yours."""
    qos: Name | None = None
    """Quality of service."""
    reservation: Name | None = None
    """A reservation of nodes."""
    time: Time = "24:00:00"
    """Limit of one run of the job; it is queued again, and goes on, where it ends unfinished."""
    per_gpu: bool = False
    """One process a GPU in place of one a host."""
    setup: Items[Line] = ()
    """Lines of shell before training, as they are: module load cuda, source .venv/bin/activate."""

    @property
    def seconds(self) -> int:
        """`time`, 0 for no limit. Slurm's forms: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S (sbatch's manual, --time)."""
        days, _, rest = self.time.rpartition("-")
        parts = [int(part or 0) for part in rest.split(":")]
        units = [3600, 60, 1] if days or len(parts) == 3 else [60, 1]
        return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


class ClusterConfig(Section):
    """One cluster. `maxstack submit CONFIG --target T --cluster FILE` reads it."""

    PRESETS: ClassVar[Presets] = {"": ("clusters",)}

    topology: str
    """The hardware of a run, as `maxstack plan` writes it: v5p:8x8x16, v5e:16x16*4 (4 slices), h100:32x8 (32 hosts of 8)."""
    project: Name | None = None
    """Google Cloud project; null: gcloud's own. For xpk."""
    zone: Name | None = None
    """Of the cluster; for xpk."""
    cluster: Name | None = None
    """Its name; for xpk."""
    reservation: Label | None = None
    """Nodes that are kept for you (cloud.google.com/reservation-name)."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = "default"
    """Of Kubernetes."""
    context: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$")] | None = None
    """Of kubectl, such as gke_PROJECT_REGION_CLUSTER (`kubectl config get-contexts`); null: the current one."""
    queue: Label | None = None
    """Kueue's local queue."""
    priority: Label | None = None
    """Kueue's priority class, or xpk's --priority."""
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$", max_length=500)] | None = None
    """The container that holds maxstack (scripts/Dockerfile); for gke and xpk."""
    accelerator: Label | None = None
    """GKE's name of the accelerator; null: the usual one of the topology's chip."""
    service_account: Name | None = None
    """Kubernetes service account of the pods, which may read and write the bucket."""
    bucket: BucketConfig | None = None
    """Where gke and xpk keep what a run writes."""
    secrets: dict[Variable, SecretConfig] = {}
    """Environment variable -> where its value lies."""
    env: dict[Variable, Line] = {}
    """Environment variables of every process."""
    config: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    """Where every host finds the resolved configuration, for one that is too large to be handed over: the file that `maxstack submit --out` writes,
    copied into the bucket or the image. A host where it differs ends the run. null: the configuration is handed over with the job."""
    grace: int = Field(600, ge=30)
    """Seconds that a process has to save after SIGTERM, before it is killed."""
    max_restarts: int = Field(100, ge=0)
    """How often a run is started again, after anything but its end (0) or a mistake (1, 2)."""
    restart_from_zero: bool = False
    """A restart may begin at step 0. Otherwise a run that saves nothing, or nothing that lasts, is
    refused, unless max_restarts is 0."""
    slurm: SlurmConfig = SlurmConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if 0 < self.slurm.seconds <= self.grace + MARGIN:
            raise fault("slurm.time", f"{self.slurm.time} is {self.slurm.seconds} s, and the run would be asked to save {self.grace + MARGIN} s "
                        "before its end: at once, again and again; give more, or a smaller grace")
        for section, name in [("env", name) for name in self.env] + [("secrets", name) for name in self.secrets]:
            if RESERVED.match(name):
                raise fault(f"{section}.{name}", "is how a process learns of the others, or of its configuration; leave it out")
            if section == "env" and name in self.secrets:
                raise fault(f"env.{name}", f"{name} is in secrets too; give it once")
        sizes = {name: len(f"{name}={value}".encode()) + 1 for name, value in self.env.items()}
        for name, size in sizes.items():
            if size > STRING:
                raise fault(f"env.{name}", f"has {size:,} bytes with its name, and Linux gives a process {STRING:,} at most; put it into a file")
        if sum(sizes.values()) > ENVIRONMENT:
            raise fault("env", f"has {sum(sizes.values()):,} bytes, and {ENVIRONMENT:,} is the most; put the values into a file")
        return self
