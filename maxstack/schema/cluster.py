"""The description of a cluster, configs/clusters/*.yml, separate from the runs that train there."""

import posixpath
import re
from collections.abc import Iterator
from typing import Annotated

import pydantic
from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Section, secrets
from maxstack.schema import names

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253)]
"""A name that Slurm accepts."""
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
    """A Google Cloud Storage bucket that is mounted in every pod."""

    name: names.Bucket
    """Name without gs://."""
    mount: Mount = "/gcs"
    """Folder in the pods; run.output_dir lies below it. It must not be a folder that the image or
    the system needs."""
    storage: names.Namespace | None = None
    """Name that `xpk storage attach` gave the bucket; xpk mounts it by that name."""


class SidecarConfig(Section):
    """Limits of gke-gcsfuse-sidecar, the container that GKE adds to a pod for the bucket."""

    cpu: Quantity = "4"
    """CPU limit; 0: none."""
    memory: Quantity = "4Gi"
    """Memory limit; 0: none."""
    disk: Quantity = "30Gi"
    """Limit on the node's disk, for files being written; 0: none."""


class VolumeConfig(Section):
    """A volume mounted in every pod in addition to the bucket; set exactly one of claim,
    config_map, secret and size."""

    mount: Mount
    """Folder in the pods. It must not be a folder that the image or the system needs."""
    claim: names.Object | None = None
    """Name of a PersistentVolumeClaim; with several hosts it must be ReadWriteMany."""
    config_map: names.Object | None = None
    """Name of a ConfigMap, whose keys become files."""
    secret: names.Object | None = None
    """Name of a Secret, whose keys become files."""
    size: Quantity | None = None
    """Size limit of an empty folder on the node's disk, which is lost with the pod."""
    read_only: bool = False
    """Mount read-only."""

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
    """CPU request and limit; null: three quarters of the machine's."""
    memory: Quantity | None = None
    """Memory request and limit; null: three quarters of the machine's."""
    shared_memory: Quantity = "16Gi"
    """Size of /dev/shm, which counts against the memory."""
    user: PositiveInt | None = 1000
    """User and group id of the processes, which have no privileges, as the `restricted` Pod
    Security Standard requires. null: the image's own user, with whatever privileges the cluster
    allows."""
    service_account_token: bool = False
    """Mount a token for the Kubernetes API; neither maxstack nor the bucket needs it."""
    labels: dict[names.LabelKey, names.Label] = {}
    """Labels of the JobSet and its pods."""
    sidecar: SidecarConfig = SidecarConfig()


class SlurmConfig(Section):
    """Options of sbatch."""

    partition: Name | None = None
    """Partition; null: the cluster's default."""
    account: Name | None = None
    """Account; null: your default."""
    qos: Name | None = None
    """Quality of service."""
    reservation: Name | None = None
    """Node reservation."""
    time: Time = "24:00:00"
    """Time limit of one run of the job; an unfinished job is requeued and resumes."""
    mem: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$"), pydantic.BeforeValidator(_written)] = "0"
    """Memory of a node in sbatch's notation: megabytes, or a number with K, M, G or T; 0: all of
    it."""
    cpus_per_task: PositiveInt | None = None
    """CPUs per process; null: the cluster's default. The job has its nodes to itself."""
    per_gpu: bool = False
    """Start one process per GPU instead of one per host."""
    setup: Items[Line] = ()
    """Shell commands to run before training, exactly as written: module load cuda, source
    .venv/bin/activate."""

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
    """A cluster, as read by `maxstack submit CONFIG --target T --cluster FILE`."""

    PRESETS = {"": ("clusters",)}

    topology: str
    """Hardware to run on, in the notation of `maxstack plan`: v5p:8x8x16, v5e:16x16*4 (4 slices),
    h100:32x8 (32 hosts of 8)."""
    project: names.Place | None = None
    """Google Cloud project, for xpk; null: gcloud's default."""
    zone: names.Place | None = None
    """Zone of the cluster, for xpk."""
    cluster: names.Place | None = None
    """Name of the cluster, for xpk."""
    reservation: names.Label | None = None
    """Reservation of nodes (cloud.google.com/reservation-name)."""
    namespace: names.Namespace = "default"
    """Kubernetes namespace."""
    context: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$")] | None = None
    """kubectl context, such as gke_PROJECT_REGION_CLUSTER (`kubectl config get-contexts`); null:
    the current one."""
    queue: names.Queue | None = None
    """Kueue local queue (LocalQueue) to submit to."""
    priority: names.Queue | None = None
    """Kueue priority class, or --priority of xpk."""
    image: names.Image | None = None
    """Container image with maxstack (scripts/Dockerfile), preferably by digest, NAME@sha256:...;
    for gke and xpk."""
    accelerator: names.Label | None = None
    """GKE's name of the accelerator; null: the usual one for the topology's chip."""
    service_account: names.Object | None = None
    """Kubernetes service account of the pods, with read and write access to the bucket."""
    bucket: BucketConfig | None = None
    """Bucket for the output of runs, for gke and xpk."""
    secrets: dict[names.Variable, SecretConfig] = {}
    """Environment variable -> the secret that holds its value."""
    env: dict[names.Variable, Line] = {}
    """Environment variables of every process; anything whose name or form suggests a secret is
    refused."""
    config: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    """Path on every host of the resolved configuration, if it is too large to send with the job:
    the file that `maxstack submit --out` writes, copied into the bucket or the image. If a host's
    copy has different contents, the run ends. null: the configuration is sent with the job."""
    grace: int = Field(600, ge=30)
    """Seconds between SIGTERM and SIGKILL, during which a process saves."""
    max_restarts: NonNegativeInt = 100
    """Maximum number of restarts, after any exit status except success (0) and user error (1,
    2)."""
    ttl_seconds_after_finished: NonNegativeInt = 604_800
    """Seconds for which gke and xpk keep finished jobs with their pods and logs; by default a
    week."""
    restart_from_zero: bool = False
    """Allow restarts from step 0. Otherwise a run that saves no checkpoints, or only to storage
    that does not last, is refused unless max_restarts is 0."""
    volumes: Items[VolumeConfig] = ()
    """Volumes to mount in every pod in addition to the bucket, for gke."""
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
