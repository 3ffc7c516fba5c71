"""A run for a cluster, checked before it is submitted."""

import base64
import dataclasses
import functools
import gzip
import hashlib
import os
import sys
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
USED = {
    "xpk": EVERY.union(
        "project zone cluster context namespace priority image bucket".split(),
        {"ttl_seconds_after_finished"},
    ),
    "gke": {*ClusterConfig.model_fields} - {"slurm", "project", "zone", "cluster"},
    "slurm": EVERY | {"reservation", "slurm"},
}
"""Facts of a cluster that each target uses."""
MATTER = {"secrets", "accelerator", "bucket", "volumes"}
"""Facts whose absence would change the run."""

SHARE, PATHWAYS_GRACE = 0.9, 30
"""Share of a pod's grace that a process may use, and the seconds of one of Pathways': Kubernetes'
default."""
NODES_OWN = "/tmp", "/var/tmp", "/dev/shm", "/run"
"""Folders that each node has for itself (Filesystem Hierarchy Standard 3.0)."""


NUMBER = "{job}"
"""Placeholder in a command for the number that Slurm gives the job."""
KEY = "{key}"
"""Placeholder in a text for the job's key, which is drawn when it is handed over."""


class Submission(NamedTuple):
    """The way to submit a job by a cluster's own commands, which each target's module makes."""

    command: list[str]
    """The command that submits it."""
    text: str
    """Its input; for xpk, which takes none, the command as text."""
    later: dict[str, list[str]]
    """Later commands: `there` (prints something while the job exists), status, logs, follow,
    stop."""
    before: tuple[list[str], str] | None = None
    """A command that comes before, and its input, in which KEY stands for the job's key."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A name, and the cluster and hardware that are to run what has it."""

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
        """A fact of the cluster; ConfigError where its file gives none."""
        if (value := getattr(self.cluster, key)) is None:
            raise ConfigError(
                f"{key}: the cluster's file gives none, and this target needs it; add "
                f"`{key}: ...`, or give --set {key}=..."
            )
        return value


@dataclasses.dataclass(frozen=True)
class Job(Placement):
    """A run, and the cluster and hardware that it is submitted to."""

    cfg: "Config"

    @functools.cached_property
    def text(self) -> str:
        """The resolved configuration, as YAML."""
        return f"# {self.name}: submitted by maxstack for {self.topology.name}\n{dump(self.cfg)}"

    @functools.cached_property
    def packed(self) -> str:
        """`text` compressed, in characters that need no quoting in a shell or YAML."""
        return base64.b64encode(gzip.compress(self.text.encode(), 9, mtime=0)).decode()

    def unpacking(self, source: str, target: str) -> tuple[str, str]:
        """(command, file) for a shell: the command writes `text` into the file `target`, from the
        packed text that the command `source` prints. Where the cluster has the configuration
        itself, the command checks that its file is identical."""
        if path := self.cluster.config:
            digest = hashlib.sha256(self.text.encode()).hexdigest()
            return f"echo '{digest}  {path}' | sha256sum --check --quiet", path
        return f"{source} | base64 -d | gunzip > {target}", target

    @property
    def lasting(self) -> list[str]:
        """Mounts whose files outlast the pod: the bucket, and volumes that are claims."""
        bucket = [self.cluster.bucket.mount] if self.cluster.bucket else []
        volumes = self.cluster.volumes
        return bucket + [each.mount for each in volumes if each.claim and not each.read_only]

    def check_output(self) -> None:
        """ConfigError where the run's folder would be lost with its container."""
        if not self.lasting:
            self.needs("bucket")
        if not any(within(self.cfg.run.output_dir, mount) for mount in self.lasting):
            raise ConfigError(
                f"run.output_dir={self.cfg.run.output_dir}: is lost with the "
                f"container; give a folder in the bucket, {self.lasting[0]}/..."
            )


def within(path: str, folder: str) -> bool:
    """True if a path lies in a folder of the cluster."""
    return Path(os.path.normpath(path)).is_relative_to(folder)


def elsewhere(job: Job) -> list[str]:
    """Files and folders that the run reads, and that lie neither in the bucket nor in a volume."""
    cfg, paths = job.cfg, list[str | None]()
    for data in filter(None, (cfg.data, cfg.eval.data)):
        paths += [glob for source in data.sources for glob in getattr(source, "files", ())]
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
        and not any(within(path, mount) for mount in job.mounts)
    ]


def checked(
    name: str, cfg: "Config", cluster: ClusterConfig, force: bool = False
) -> tuple[Job, str]:
    """The job, and plan's estimate of it in a line. ConfigError where the mesh is not the
    topology's or, without `force`, where memory is far from enough."""
    from maxstack.plan.estimate import SLACK, Shapes, estimate
    from maxstack.plan.topology import links, parse

    if cfg.run.virtual_devices:
        raise ConfigError(
            f"run.virtual_devices={cfg.run.virtual_devices}: is for a CPU (--target "
            "local); give run.virtual_devices=null"
        )
    topology = parse(cluster.topology, "topology:")
    if not topology.chip:
        raise ConfigError(
            f"topology: {cluster.topology} is this machine; give the cluster's, such as "
            "v5e:8x8 or h100:4x8"
        )
    job = Job(name, cluster, topology, cfg)
    if job.tpu and cfg.mesh.slices != topology.slices:
        raise ConfigError(
            f"mesh.slices={cfg.mesh.slices}: but {topology.name} has {topology.slices}; "
            "give that number, so that what crosses slices "
            "is what you mean"
        )
    sizes = rules.sizes_on(cfg, topology.size, topology.name)
    least = estimate(Shapes.of(cfg), cfg, sizes, job.chip, links(topology, tuple(sizes.values())))
    line = (
        f"estimated {least.memory / 2**30:.1f} of {job.chip.for_programs / 2**30:.1f} "
        f"GiB a device, {least.seconds:.2f} s a step at best; maxstack plan says it exactly"
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
    cluster, saved, steps = job.cluster, job.cfg.checkpoint, job.cfg.train.steps
    if not cluster.max_restarts:
        return
    folders = {"checkpoint.every": (job.cfg.run.output_dir, saved.every)} if saved.every else {}
    folders |= {
        f"checkpoint.tiers.{index}.every": (tier.path, tier.every)
        for index, tier in enumerate(saved.tiers)
        if tier.replicate is None
    }
    lasting = {key: every for key, (path, every) in folders.items() if _lasts(job, target, path)}
    if lasting and saved.restore == "none":
        raise ConfigError(
            "checkpoint.restore=none: would refuse a restart, because of what the "
            "run has saved; give latest, or --set max_restarts=0"
        )
    if cluster.restart_from_zero:
        return
    if not lasting and (saved.every or saved.tiers):
        paths = ", ".join(path for path, _ in folders.values()) or "hosts' own disks alone"
        problem = f"checkpoint: is saved where a restart may not find it ({paths})"
        advice = "save with checkpoint.every or a tier without replicate where all hosts see it"
    elif not lasting:
        problem, advice = "checkpoint.every=0: nothing is saved", "give it a number of steps"
    elif min(lasting.values()) >= steps > 1:
        key, every = min(lasting.items(), key=lambda item: item[1])
        problem = f"{key}={every}: the first save is at the end (train.steps={steps})"
        advice = "give it a smaller number"
    else:
        return
    raise ConfigError(
        f"{problem}, so that each of max_restarts={cluster.max_restarts} would begin at "
        f"step 0; {advice}, or --set max_restarts=0, or, where that is wanted, "
        "--set restart_from_zero=true"
    )


def _lasts(job: Job, target: str, path: str) -> bool:
    """True if a restart's processes see the files at `path`, on whatever hosts they run."""
    if target == "slurm":
        return not any(within(os.path.abspath(path), folder) for folder in NODES_OWN)
    if job.cfg.runtime == "pathways":
        return True  # a supervisor restarts it in the same pod
    return any(within(path, mount) for mount in job.lasting)


def with_cache(cfg: "Config", cluster: ClusterConfig) -> "Config":
    """The configuration with its compilation cache in the bucket, so that a restart finds it,
    instead of the default, which is lost with the container."""
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
    """The configuration by which a process has left before the cluster kills it."""
    granted = PATHWAYS_GRACE if cfg.runtime == "pathways" else cluster.grace
    faults = cfg.faults.model_copy(update={"grace": SHARE * granted})
    return cfg.model_copy(update={"faults": faults})


def warn_of_changes(job: Job, target: str) -> None:
    """Print what may differ between a run and its restart."""
    image, cache = job.cluster.image, job.cfg.run.compilation_cache
    if target == "slurm":
        return
    if image and "@sha256:" not in image and job.cluster.max_restarts:
        print(
            f"image: {image} has no digest, so that hosts and restarts may get another image "
            "when its tag moves; give NAME@sha256:...",
            file=sys.stderr,
        )
    if (
        cache
        and job.lasting
        and not (storage.is_url(cache) or any(within(cache, mount) for mount in job.lasting))
    ):
        print(
            f"run.compilation_cache={cache}: is lost with the container, so that each restart "
            f"compiles again; give a folder below {job.lasting[0]}",
            file=sys.stderr,
        )


def check_facts(cluster: ClusterConfig, target: str) -> None:
    """Print which facts the target does not use; ConfigError for one that matters."""
    unused = [
        key
        for key, field in ClusterConfig.model_fields.items()
        if key not in USED[target] and getattr(cluster, key) != field.default
    ]
    if odd := sorted(MATTER.intersection(unused)):
        raise ConfigError(
            f"{', '.join(odd)}: --target {target} takes none; leave it out of the "
            "cluster's file, or use another target"
        )
    if unused:
        print(f"{target} does not take {', '.join(unused)}", file=sys.stderr)


@functools.cache
def machines() -> dict[str, dict[str, str]]:
    """Rows of machines.yml by chip."""
    path = Path(__file__).with_name("machines.yml")
    return plain(read_yaml(path.read_text(encoding="utf-8"), path.name))


def machine(job: Placement, key: str) -> str:
    """A column of machines.yml for the job's chip; ConfigError where it has no row."""
    if job.chip.name not in machines():
        raise ConfigError(
            f"topology: {job.chip.name} has no name there; there are {', '.join(machines())}"
        )
    return machines()[job.chip.name][key]
