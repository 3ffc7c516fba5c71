"""A cluster's facts, configs/clusters/*.yml, apart from the runs that train there."""

import posixpath
import re
from collections.abc import Iterator
from typing import Annotated

import pydantic
from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Section, secrets
from maxstack.schema import names

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253)]
"""A name that Slurm has."""
STRING = 131_072
"""Bytes of one argument or `NAME=value` of a process, with the zero byte at its end: Linux's
MAX_ARG_STRLEN, 32 pages of 4 KiB (execve(2))."""
ENVIRONMENT = 1_048_576
"""Bytes of all variables of the cluster's file. Linux has a quarter of the stack's limit, 2 MiB as
a rule, for arguments and environment together (execve(2))."""
MARGIN = 60
"""Seconds between the end of the grace and Slurm's limit."""
RESERVED = re.compile(
    r"MAXSTACK_CONFIG$|JAX_(COORDINATOR|PROCESS|NUM_PROCESSES)|PROCESSES_IN_JOB$|JOB_|JOBSET_|TPU_WORKER|MEGASCALE_|SLURM_|OMPI_|"
    r"NNODES$|NODE_RANK$|MASTER_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
Line = Annotated[str, Field(pattern=r"^[^\x00\r\n]*$")]


SYSTEM = (
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/run",
)
"""Folders that an image or Linux needs, with all below them (Filesystem Hierarchy Standard 3.0)."""
PARENTS = "/", "/home", "/maxstack", "/opt", "/tmp", "/var", "/var/lib", "/work"
"""Folders that hold others of the image's, of scripts/Dockerfile's too; a folder below is free."""


def _mount(path: str) -> str:
    """The path, normalized; an error for a folder that a container needs as the image has it."""
    plain = "/" + posixpath.normpath(path).lstrip("/")
    if ".." in path.split("/"):
        raise ValueError(f"{path} has `..`; give the whole path")
    if plain in PARENTS or any(f"{plain}/".startswith(f"{folder}/") for folder in SYSTEM):
        raise ValueError(
            f"{path} is a folder that the image or the system needs; give one of its "
            "own, such as /gcs"
        )
    return plain


def _written(value: object) -> object:
    """A number as text."""
    return str(value) if type(value) in (int, float) else value


Time = Annotated[
    str,
    Field(pattern=r"^([0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2})$"),
    pydantic.BeforeValidator(_written),
]
Mount = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]*$"), pydantic.AfterValidator(_mount)]
Quantity = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?$"),
    pydantic.BeforeValidator(_written),
]
"""An amount as Kubernetes writes it: 500m, 4, 16Gi (Kubernetes, "Quantity")."""
OURS = re.compile(
    r"(kueue\.x-k8s\.io|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/|"
    r"app\.kubernetes\.io/(name|instance|managed-by|component)$"
)
"""Labels that submit or a controller writes."""


class SecretConfig(Section):
    """One key of a Kubernetes secret."""

    name: names.Object
    """Name of the secret."""
    key: names.SecretKey
    """Key in the secret."""


class BucketConfig(Section):
    """A bucket of Google Cloud Storage that is mounted in every pod."""

    name: names.Bucket
    """Without gs://."""
    mount: Mount = "/gcs"
    """Folder in the pods; run.output_dir lies below. No folder that the image or the system
    needs."""
    storage: names.Namespace | None = None
    """Name that `xpk storage attach` gave it; xpk mounts it by that name."""


class SidecarConfig(Section):
    """Limits of the container that GKE adds to a pod for the bucket, gke-gcsfuse-sidecar."""

    cpu: Quantity = "4"
    """CPUs; 0: no limit."""
    memory: Quantity = "4Gi"
    """Memory; 0: no limit."""
    disk: Quantity = "30Gi"
    """Part of the node's disk, for files that are being written; 0: no limit."""


class VolumeConfig(Section):
    """A volume of every pod, beside the bucket; exactly one of claim, config_map, secret and
    size."""

    mount: Mount
    """Folder in the pods. No folder that the image or the system needs."""
    claim: names.Object | None = None
    """A PersistentVolumeClaim; with several hosts one that all can write (ReadWriteMany)."""
    config_map: names.Object | None = None
    """A ConfigMap, whose keys are files."""
    secret: names.Object | None = None
    """A Secret, whose keys are files."""
    size: Quantity | None = None
    """An empty folder on the node's disk, of this size at most, lost with the pod."""
    read_only: bool = False
    """Nothing is written there."""

    def own_faults(self) -> Iterator[Fault]:
        kinds = "claim", "config_map", "secret", "size"
        chosen = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(chosen) != 1:
            yield (
                "mount",
                f"{self.mount} has {' and '.join(chosen) or 'nothing to mount'}; "
                f"give one of {', '.join(kinds)}",
            )


class PodConfig(Section):
    """Resources and permissions of a pod on GKE."""

    cpu: Quantity | None = None
    """CPUs that a pod asks for, and has at most; null: three quarters of what its machine has."""
    memory: Quantity | None = None
    """Memory that a pod asks for, and has at most; null: three quarters of what its machine has."""
    shared_memory: Quantity = "16Gi"
    """Size of /dev/shm, a part of the memory."""
    user: PositiveInt | None = 1000
    """User and group of the processes, without any privilege, as the `restricted` Pod Security
    Standard asks. null: the image's own user, and what the cluster allows it."""
    service_account_token: bool = False
    """Mount a token for Kubernetes' API, which neither maxstack nor the bucket needs."""
    labels: dict[names.LabelKey, names.Label] = {}
    """Labels of the JobSet and its pods."""
    sidecar: SidecarConfig = SidecarConfig()


class SlurmConfig(Section):
    """Options of sbatch."""

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
    mem: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$"), pydantic.BeforeValidator(_written)] = "0"
    """Memory of a node, as sbatch has it: megabytes, or a number with K, M, G or T; 0: all of
    it."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of a process; null: what the cluster gives, of nodes that the job has for itself."""
    per_gpu: bool = False
    """One process a GPU in place of one a host."""
    setup: Items[Line] = ()
    """Lines of shell before training, as they are: module load cuda, source .venv/bin/activate."""

    @property
    def seconds(self) -> int:
        """`time`, 0 for no limit. Slurm's forms: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S (sbatch's
        manual, --time)."""
        days, _, rest = self.time.rpartition("-")
        parts = [int(part or 0) for part in rest.split(":")]
        units = [3600, 60, 1] if days or len(parts) == 3 else [60, 1]
        return 86400 * int(days or 0) + sum(
            part * unit for part, unit in zip(parts, units, strict=False)
        )


class ClusterConfig(Section):
    """One cluster. `maxstack submit CONFIG --target T --cluster FILE` reads it."""

    PRESETS = {"": ("clusters",)}

    topology: str
    """The hardware of a run, as `maxstack plan` writes it: v5p:8x8x16, v5e:16x16*4 (4 slices),
    h100:32x8 (32 hosts of 8)."""
    project: names.Place | None = None
    """Google Cloud project; null: gcloud's own. For xpk."""
    zone: names.Place | None = None
    """Zone of the cluster; for xpk."""
    cluster: names.Place | None = None
    """Name of the cluster; for xpk."""
    reservation: names.Label | None = None
    """Nodes that are kept for you (cloud.google.com/reservation-name)."""
    namespace: names.Namespace = "default"
    """Namespace of Kubernetes."""
    context: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$")] | None = None
    """Context of kubectl, such as gke_PROJECT_REGION_CLUSTER (`kubectl config get-contexts`); null:
    the current one."""
    queue: names.Queue | None = None
    """Kueue's local queue."""
    priority: names.Queue | None = None
    """Kueue's priority class, or xpk's --priority."""
    image: names.Image | None = None
    """The container that holds maxstack (scripts/Dockerfile), best by its digest, NAME@sha256:...;
    for gke and xpk."""
    accelerator: names.Label | None = None
    """GKE's name of the accelerator; null: the usual one of the topology's chip."""
    service_account: names.Object | None = None
    """Kubernetes service account of the pods, which may read and write the bucket."""
    bucket: BucketConfig | None = None
    """Bucket in which gke and xpk keep what a run writes."""
    secrets: dict[names.Variable, SecretConfig] = {}
    """Environment variable -> where its value lies."""
    env: dict[names.Variable, Line] = {}
    """Environment variables of every process; none that is a secret by its name or shape."""
    config: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    """Path of the resolved configuration on every host, for a file that is too large to be handed
    over: the file that `maxstack submit --out` writes, copied into the bucket or the image. A host
    where it differs ends the run. null: the configuration is handed over with the job."""
    grace: int = Field(600, ge=30)
    """Seconds that a process has to save after SIGTERM, before it is killed."""
    max_restarts: NonNegativeInt = 100
    """Number of times that a run is started again, after anything but its end (0) or a mistake (1,
    2)."""
    ttl_seconds_after_finished: NonNegativeInt = 604_800
    """Seconds for which gke and xpk keep what has ended, with its pods and their logs; a week."""
    restart_from_zero: bool = False
    """A restart may begin at step 0. Otherwise a run that saves nothing, or nothing that lasts, is
    refused, unless max_restarts is 0."""
    volumes: Items[VolumeConfig] = ()
    """Volumes of every pod beside the bucket; for gke."""
    pod: PodConfig = PodConfig()
    slurm: SlurmConfig = SlurmConfig()

    def own_faults(self) -> Iterator[Fault]:
        if 0 < self.slurm.seconds <= self.grace + MARGIN:
            yield (
                "slurm.time",
                f"{self.slurm.time} is {self.slurm.seconds} s, and the run would be "
                f"asked to save {self.grace + MARGIN} s before its end: at once, again and again; "
                "give more, or a smaller grace",
            )
        mounts = [volume.mount for volume in (self.bucket, *self.volumes) if volume]
        if twice := sorted({path for path in mounts if mounts.count(path) > 1}):
            yield ("volumes", f"{', '.join(twice)}: mounted twice; give each a folder of its own")
        if ours := sorted(key for key in self.pod.labels if OURS.match(key)):
            yield (
                "pod.labels",
                f"{', '.join(ours)}: written by submit or by the cluster's "
                "controllers; leave it out",
            )
        yield from self._environment_faults()

    def _environment_faults(self) -> Iterator[Fault]:
        for section in ("env", "secrets"):
            for name in filter(RESERVED.match, getattr(self, section)):
                yield (
                    f"{section}.{name}",
                    "is how a process learns of the others, or of its configuration; leave it out",
                )
        given = {f"env.{name}": (name, value) for name, value in self.env.items()} | {
            f"slurm.setup.{index}": (found[1], found[2])
            for index, line in enumerate(self.slurm.setup)
            for found in re.finditer(r"(\w+)=[\"']?([^\s\"';$`][^\s\"';]*)", line)
        }
        for key, (name, value) in given.items():
            if secrets.is_secret(name, value):
                yield key, f"{name} is a secret by its name; {secrets.ADVICE}"
        for name in self.env.keys() & self.secrets.keys():
            yield f"env.{name}", f"{name} is in secrets too; give it once"
        sizes = {name: len(f"{name}={value}".encode()) + 1 for name, value in self.env.items()}
        for name, size in sizes.items():
            if size > STRING:
                yield (
                    f"env.{name}",
                    f"has {size:,} bytes with its name, and Linux gives a "
                    f"process {STRING:,} at most; put it into a file",
                )
        if sum(sizes.values()) > ENVIRONMENT:
            yield (
                "env",
                f"has {sum(sizes.values()):,} bytes, and {ENVIRONMENT:,} is the "
                "most; put the values into a file",
            )
