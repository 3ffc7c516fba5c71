"""A run for a cluster, checked before it is submitted: its memory, files that would be lost,
restarts that would begin at step 0, and the size of what each target accepts. All of these would
otherwise fail on the cluster, once for each restart."""

import base64
import dataclasses
import functools
import gzip
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxstack.config import dump, storage
from maxstack.config.compose import plain
from maxstack.config.reader import read_yaml
from maxstack.data import hub
from maxstack.errors import ConfigError
from maxstack.schema import rules
from maxstack.schema.cluster import ClusterConfig

if TYPE_CHECKING:
    from maxstack.hardware.chips import Chip
    from maxstack.plan.topology import Topology
    from maxstack.schema.config import Config

CONFIG = "run.yml"
EVERY = {"topology", "env", "grace", "max_restarts", "restart_from_zero", "config"}
ACCEPTED = {
    "xpk": EVERY.union(
        "project zone cluster context namespace priority image bucket".split(),
        {"ttl_seconds_after_finished"},
    ),
    "gke": {*ClusterConfig.model_fields} - {"slurm", "project", "zone", "cluster"},
    "slurm": EVERY | {"reservation", "slurm"},
}
"""Keys of the cluster's description that each target uses."""
ESSENTIAL = {"secrets", "accelerator", "bucket", "volumes"}
"""Keys that change the run, so a target that does not use them refuses them."""
SHARE = 0.9
"""Share of a pod's grace that a process may use."""
PATHWAYS_GRACE = 30
"""Seconds of grace with Pathways: Kubernetes' default."""
NODES_OWN = "/tmp", "/var/tmp", "/dev/shm", "/run"
"""Folders that each node has for itself (Filesystem Hierarchy Standard 3.0)."""
NUMBER = "{job}"
"""Placeholder in a command for the number that Slurm gives the job."""
KEY = "{key}"
"""Placeholder in a text for the job's key, which is drawn when the job is handed over."""
OBJECT = 1_572_864 - 131_072
"""Bytes of a Kubernetes object as JSON. etcd's --max-request-bytes is 1.5 MiB by default, which is
below the API server's 3 MiB for a request; an eighth of a MiB is left to what the API server adds
(status, managedFields)."""
SCRIPT = 4_194_304
"""Bytes of a batch script: Slurm's max_script_size by default (slurm.conf, SchedulerParameters)."""
WRAPPER = 4096
"""Bytes for the shell script that xpk wraps around a command, as one argument of bash in the
container (xpk 1.16.0, core/docker_container.py)."""


class Submission(NamedTuple):
    """The commands of a cluster that submit a job and look after it."""

    command: list[str]
    """The command that submits it."""
    text: str
    """Its input; for xpk, which takes none, the command as text."""
    later: dict[str, list[str]]
    """Later commands: `there` (prints something while the job exists), status, logs, follow,
    stop."""
    before: tuple[list[str], str] | None = None
    """A command to run first, and its input, in which KEY stands for the job's key."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A name, a cluster and its hardware."""

    name: str
    cluster: ClusterConfig
    topology: "Topology"

    @property
    def chip(self) -> "Chip":
        """The chip that it runs on."""
        assert self.topology.chip
        return self.topology.chip

    @property
    def tpu(self) -> bool:
        """True for TPUs, False for GPUs."""
        return self.chip.platform == "tpu"

    @property
    def hosts(self) -> int:
        """Hosts of one slice."""
        return self.topology.hosts // self.topology.slices

    @property
    def chips_of_a_host(self) -> int:
        """Chips that a pod requests."""
        if not self.tpu:
            return min(self.topology.sides[-1], self.chip.chips_per_host)
        chips = self.topology.size // self.topology.slices // self.chip.devices
        return min(chips, self.chip.chips_per_host)

    @property
    def mounts(self) -> list[str]:
        """Folders of the pods that are the bucket or a volume."""
        return [each.mount for each in (self.cluster.bucket, *self.cluster.volumes) if each]

    def needs(self, key: str) -> Any:
        """Return a value of the cluster's description; ConfigError where it has none."""
        if (value := getattr(self.cluster, key)) is None:
            raise ConfigError(
                f"{key}: is missing in the cluster's file, and this target needs it; add "
                f"`{key}: ...`, or give --set {key}=..."
            )
        return value


@dataclasses.dataclass(frozen=True)
class Job(Placement):
    """A run with the cluster and hardware that it is submitted to."""

    cfg: "Config"

    @functools.cached_property
    def text(self) -> str:
        """The resolved configuration, as YAML."""
        return f"# {self.name}: submitted by maxstack for {self.topology.name}\n{dump(self.cfg)}"

    @functools.cached_property
    def packed(self) -> str:
        """`text` compressed, in characters that need no quoting in a shell or YAML. 4,000 sources
        are 88 kB so, and 663 kB as text, of which a variable holds 131."""
        return base64.b64encode(gzip.compress(self.text.encode(), 9, mtime=0)).decode()

    def unpack_command(self, source: str, target: str) -> tuple[str, str]:
        """Return (command, file) for a shell: the command writes `text` into the file `target`,
        from the packed text that the command `source` prints. Where the cluster has the
        configuration itself, the command checks that its file is identical."""
        if path := self.cluster.config:
            digest = hashlib.sha256(self.text.encode()).hexdigest()
            return f"echo '{digest}  {path}' | sha256sum --check --quiet", path
        return f"{source} | base64 -d | gunzip > {target}", target

    @property
    def lasting(self) -> list[str]:
        """Mounts whose files outlast the pod: the bucket and volumes that are claims."""
        bucket = [self.cluster.bucket.mount] if self.cluster.bucket else []
        volumes = self.cluster.volumes
        return bucket + [each.mount for each in volumes if each.claim and not each.read_only]

    def check_output(self) -> None:
        """ConfigError where the run's folder would be lost with its container."""
        if not self.lasting:
            self.needs("bucket")
        if not is_within(self.cfg.run.output_dir, self.lasting):
            raise ConfigError(
                f"run.output_dir={self.cfg.run.output_dir}: is lost with the container; give a "
                f"folder in the bucket, {self.lasting[0]}/..."
            )


def is_within(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path lies in any of these folders of the cluster."""
    plain = Path(os.path.normpath(path))
    return any(plain.is_relative_to(folder) for folder in folders)


def find_files_outside(job: Job) -> list[str]:
    """List files and folders that the run reads outside of the bucket and the volumes."""
    cfg = job.cfg
    paths: list[str | None] = []
    for data in filter(None, (cfg.data, cfg.eval.data)):
        for source in data.sources:
            paths += getattr(source, "files", ())
        paths += [getattr(data.tokenizer, "path", None)]
    paths += [
        cfg.model.weights,
        cfg.lora.adapter if cfg.lora else None,
        cfg.checkpoint.elsewhere,
        cfg.run.executable,
        job.cluster.config,
    ]
    return [
        path
        for path in dict.fromkeys(filter(None, paths))
        if not path.startswith("{stdlib}")
        and not storage.is_url(path)
        and not hub.PINNED.fullmatch(path)
        and not is_within(path, job.mounts)
    ]


def make_job(
    name: str, cfg: "Config", cluster: ClusterConfig, force: bool = False
) -> tuple[Job, str]:
    """Make the job, with a line of plan's estimate. ConfigError where the mesh does not fit the
    topology or, without `force`, where memory is far from enough."""
    from maxstack.plan.estimate import SLACK, Shapes, estimate
    from maxstack.plan.topology import links, parse

    if cfg.run.virtual_devices:
        raise ConfigError(
            f"run.virtual_devices={cfg.run.virtual_devices}: is for a CPU (--target local); set it "
            "to null"
        )
    topology = parse(cluster.topology, "topology:")
    if not topology.chip:
        raise ConfigError(
            f"topology: {cluster.topology} is this machine; give the cluster's, such as v5e:8x8 or "
            "h100:4x8"
        )
    job = Job(name, cluster, topology, cfg)
    if job.tpu and cfg.mesh.slices != topology.slices:
        raise ConfigError(
            f"mesh.slices={cfg.mesh.slices}: but {topology.name} has {topology.slices}; give that "
            "number, which decides what crosses slices"
        )
    sizes = rules.sizes_on(cfg, topology.size, topology.name)
    least = estimate(Shapes.of(cfg), cfg, sizes, job.chip, links(topology, tuple(sizes.values())))
    line = (
        f"estimated {least.memory / 2**30:.1f} of {job.chip.for_programs / 2**30:.1f} "
        f"GiB a device, {least.seconds:.2f} s a step at best; maxstack plan computes both exactly"
    )
    if least.memory > SLACK * job.chip.for_programs and not force:
        raise ConfigError(
            f"{name} does not fit {topology.name}: {line}; choose a larger topology, "
            "another mesh or model.remat.policy, which maxstack plan --search tries; where "
            "maxstack plan says that it fits, --force"
        )
    return job, line


def check_restarts(job: Job, target: str) -> None:
    """ConfigError where a restart would begin at step 0 again, or be refused, and the cluster's
    file does not say that this is wanted."""
    cluster, saved = job.cluster, job.cfg.checkpoint
    steps = job.cfg.train.steps
    if not cluster.max_restarts:
        return
    saves = [(job.cfg.run.output_dir, saved.every)]
    saves += [(tier.path, tier.every) for tier in saved.tiers if tier.replicate is None]
    lasting = [every for path, every in saves if every and _lasts(job, target, path)]
    if lasting and saved.restore == "none":
        raise ConfigError(
            "checkpoint.restore=none: would refuse a restart, because of what the run has saved; "
            "use latest, or --set max_restarts=0"
        )
    in_time = any(every < steps for every in lasting) or (lasting and steps == 1)
    if in_time or cluster.restart_from_zero:
        return
    found = ", ".join(f"{path} every {every} steps" for path, every in saves if every)
    raise ConfigError(
        f"checkpoint: saves nothing that a restart finds before train.steps={steps} "
        f"({found or 'no folder that all hosts see'}), so each of "
        f"max_restarts={cluster.max_restarts} would begin at step 0; set checkpoint.every, or a "
        "tier without replicate where all hosts see it, to fewer steps, or --set max_restarts=0, "
        "or, where that is wanted, --set restart_from_zero=true"
    )


def _lasts(job: Job, target: str, path: str) -> bool:
    """Return whether a restart's processes see the files at `path`, on whatever hosts they run."""
    if target == "slurm":
        return not is_within(os.path.abspath(path), NODES_OWN)
    if job.cfg.runtime == "pathways":
        return True  # a supervisor restarts it in the same pod
    return is_within(path, job.lasting)


def with_cache(cfg: "Config", cluster: ClusterConfig) -> "Config":
    """Move the compilation cache from its default, which is lost with the container, into the
    bucket, where a restart finds it."""
    default = type(cfg.run).model_fields["compilation_cache"].default
    if not cluster.bucket or cfg.run.compilation_cache != default or cfg.runtime == "pathways":
        return cfg
    folder = f"{cluster.bucket.mount}/.cache/maxstack/xla"
    print(
        f"run.compilation_cache={folder}: the default is lost with the container", file=sys.stderr
    )
    run = cfg.run.model_copy(update={"compilation_cache": folder})
    return cfg.model_copy(update={"run": run})


def with_grace(cfg: "Config", cluster: ClusterConfig) -> "Config":
    """Set faults.grace so that a process has left before the cluster kills it."""
    granted = PATHWAYS_GRACE if cfg.runtime == "pathways" else cluster.grace
    faults = cfg.faults.model_copy(update={"grace": SHARE * granted})
    return cfg.model_copy(update={"faults": faults})


def warn_of_tag(job: Job, target: str) -> None:
    """Print that hosts and restarts may get different images, where the image has no digest."""
    image = job.cluster.image
    if target != "slurm" and image and "@sha256:" not in image and job.cluster.max_restarts:
        print(
            f"image: {image} has no digest, so hosts and restarts may get another image when its "
            "tag moves; give NAME@sha256:...",
            file=sys.stderr,
        )


def check_cluster(cluster: ClusterConfig, target: str) -> None:
    """Print which keys of the description the target does not use; ConfigError for an essential
    one."""
    unused = [
        key
        for key, field in ClusterConfig.model_fields.items()
        if key not in ACCEPTED[target] and getattr(cluster, key) != field.default
    ]
    if odd := sorted(ESSENTIAL.intersection(unused)):
        raise ConfigError(
            f"{', '.join(odd)}: --target {target} does not use it; leave it out of the cluster's "
            "file, or use another target"
        )
    if unused:
        print(f"{target} does not use {', '.join(unused)}", file=sys.stderr)


@functools.cache
def machines() -> dict[str, dict[str, str]]:
    """Read the rows of machines.yml by chip."""
    path = Path(__file__).with_name("machines.yml")
    return plain(read_yaml(path.read_text(encoding="utf-8"), path.name))


def machine(job: Placement, key: str) -> str:
    """Return a column of machines.yml for the job's chip; ConfigError where it has no row."""
    if job.chip.name not in machines():
        raise ConfigError(
            f"topology: {job.chip.name} has no name there; known are {', '.join(machines())}"
        )
    return machines()[job.chip.name][key]


def check_size(job: "Job", target: str, what: str, text: str, limit: int) -> None:
    """ConfigError, with how to avoid it, for a text of more than `limit` bytes in UTF-8. A string
    for a process's arguments or environment counts with the NUL at its end."""
    if (size := len(text.encode())) <= limit:
        return
    problem = f"--target {target}: {what} has {size:,} bytes, and the limit is {limit:,}"
    if job.cluster.config or len(job.packed) < limit // 2:
        raise ConfigError(f"{problem}; shorten env and secrets of the cluster's file")
    raise ConfigError(
        f"{problem} (the configuration is {len(job.packed):,} of them, packed from "
        f"{len(job.text.encode()):,}); name the sources by fewer patterns, or put it where every "
        f"host sees it: --dry-run --out DIR --set config=/PATH/{job.name}.yml writes "
        f"DIR/{job.name}.yml, which you copy to that path in the bucket or the image"
    )
