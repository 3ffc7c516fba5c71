"""A run and the cluster that it is to run on, checked before anything is booked."""

import base64
import dataclasses
import functools
import gzip
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import hub, rules
from maxstack.config import ConfigError, dump, plain
from maxstack.config.reader import read_yaml
from maxstack.submit.config import BucketConfig, ClusterConfig

if TYPE_CHECKING:
    from maxstack.chips import Chip
    from maxstack.plan.topology import Topology
    from maxstack.schema import Config

CONFIG = "run.yml"
USED = {"xpk": {"project", "zone", "cluster", "context", "namespace", "priority", "image", "bucket", "env", "grace", "max_restarts"},
        "gke": {*ClusterConfig.model_fields} - {"slurm", "project", "zone", "cluster"},
        "slurm": {"reservation", "env", "grace", "max_restarts", "slurm"}}
"""The facts that a target takes, beside the topology."""
MATTER = {"secrets", "accelerator", "bucket"}
"""Those without which a run would be another."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is submitted: `text` is the resolved configuration."""

    name: str
    cfg: "Config"
    cluster: ClusterConfig
    topology: "Topology"

    @property
    def chip(self) -> "Chip":
        """What it runs on."""
        assert self.topology.chip
        return self.topology.chip

    @property
    def tpu(self) -> bool:
        """TPUs, not GPUs."""
        return self.chip.platform == "tpu"

    @property
    def hosts(self) -> int:
        """Of one slice."""
        return self.topology.hosts // self.topology.slices

    @property
    def chips_of_a_host(self) -> int:
        """How many chips a pod asks for."""
        if not self.tpu:
            return min(self.topology.sides[-1], self.chip.chips_per_host)
        chips = self.topology.size // self.topology.slices // self.chip.devices
        return min(chips, self.chip.chips_per_host)

    @functools.cached_property
    def text(self) -> str:
        """config.yml, resolved: the same file, wherever it runs."""
        return f"# {self.name}: submitted by maxstack for {self.topology.name}\n{dump(self.cfg)}"

    @property
    def packed(self) -> str:
        """`text` in letters that mean nothing to a shell or to YAML."""
        return base64.b64encode(gzip.compress(self.text.encode(), 9, mtime=0)).decode()

    def bucket(self) -> BucketConfig:
        """The bucket in which the run's folder lies; ConfigError where it does not, and would be lost with its container."""
        found: BucketConfig = self.needs("bucket")
        if not within(self.cfg.run.output_dir, found.mount):
            raise ConfigError(f"run.output_dir={self.cfg.run.output_dir}: is lost with the container; give a folder in the bucket, {found.mount}/...")
        return found

    def needs(self, key: str) -> Any:
        """A fact of the cluster that the target cannot do without."""
        if (value := getattr(self.cluster, key)) is None:
            raise ConfigError(f"{key}: the cluster's file gives none, and this target needs it; add `{key}: ...`, or give --set {key}=...")
        return value


def within(path: str, folder: str) -> bool:
    """Whether a path lies in a folder of the cluster."""
    return Path(os.path.normpath(path)).is_relative_to(folder)


def elsewhere(job: Job) -> list[str]:
    """Files and folders that the run names, and that do not lie in the bucket."""
    cfg, paths = job.cfg, list[str | None]()
    for data in filter(None, (cfg.data, cfg.eval.data)):
        paths += [glob for source in data.sources for glob in getattr(source, "files", ())]
        paths += [getattr(data.tokenizer, "path", None)]
    paths += [cfg.model.weights, cfg.lora.adapter if cfg.lora else None, cfg.checkpoint.elsewhere, cfg.run.executable]
    mount = job.cluster.bucket.mount if job.cluster.bucket else None
    found = [path for path in dict.fromkeys(filter(None, paths)) if not path.startswith("{stdlib}")]
    return [path for path in found if not (mount and within(path, mount)) and not hub.PINNED.fullmatch(path)]


def checked(name: str, cfg: "Config", cluster: ClusterConfig, force: bool = False) -> tuple[Job, str]:
    """The job, and what plan's arithmetic says of it in a line. ConfigError where the mesh is not the topology's, or memory far from enough, but for
    `force`."""
    from maxstack.plan.estimate import SLACK, Shapes, estimate
    from maxstack.plan.topology import links, parse

    if cfg.run.virtual_devices:
        raise ConfigError(f"run.virtual_devices={cfg.run.virtual_devices}: is for a CPU (--target local); give run.virtual_devices=null")
    topology = parse(cluster.topology, "topology:")
    if not topology.chip:
        raise ConfigError(f"topology: {cluster.topology} is this machine; give the cluster's, such as v5e:8x8 or h100:4x8")
    job = Job(name, cfg, cluster, topology)
    if job.tpu and cfg.mesh.slices != topology.slices:
        raise ConfigError(f"mesh.slices={cfg.mesh.slices}: but {topology.name} has {topology.slices}; give that number, so that what crosses slices "
                          "is what you mean")
    if cfg.faults.elastic and cfg.runtime != "pathways" and topology.hosts > 1:
        raise ConfigError(f"faults.elastic: is for one process that drives all slices, and {topology.name} has {topology.hosts} hosts; leave it out, "
                          "or give runtime: pathways")
    sizes = rules.sizes_on(cfg, topology.size, topology.name)
    found = estimate(Shapes.of(cfg), cfg, sizes, job.chip, links(topology, tuple(sizes.values())))
    share = found.memory / job.chip.for_programs
    told = (f"estimated {found.memory / 2**30:.1f} of {job.chip.for_programs / 2**30:.1f} GiB a device, {found.seconds:.2f} s a step at best; "
            "maxstack plan says it exactly")
    if share > SLACK and not force:
        raise ConfigError(f"{name} does not fit {topology.name}: {told}; choose a larger topology, another mesh or model.remat.policy, which "
                          "maxstack plan --search tries; where maxstack plan says that it fits, --force")
    return job, told


def tell_unused(cluster: ClusterConfig, target: str) -> None:
    """Say which facts the target does not take; ConfigError for one that matters."""
    fields = ClusterConfig.model_fields
    unused = [key for key, field in fields.items() if getattr(cluster, key) != field.default and key not in {*USED[target], "topology"}]
    if odd := sorted(MATTER.intersection(unused)):
        raise ConfigError(f"{', '.join(odd)}: --target {target} takes none; leave it out of the cluster's file, or use another target")
    if unused:
        print(f"{target} does not take {', '.join(unused)}", file=sys.stderr)


@functools.cache
def machines() -> dict[str, dict[str, str]]:
    """machines.yml."""
    path = Path(__file__).with_name("machines.yml")
    return plain(read_yaml(path.read_text(encoding="utf-8"), path.name))


def machine(job: Job, key: str) -> str:
    """What a target calls the job's hardware; ConfigError where nobody knows."""
    if job.chip.name not in machines():
        raise ConfigError(f"topology: {job.chip.name} has no name there; there are {', '.join(machines())}")
    return machines()[job.chip.name][key]
