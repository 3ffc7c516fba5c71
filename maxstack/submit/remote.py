"""Runs on clusters, by the clusters' own commands, which also look after them later."""

import argparse
import datetime
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.config import ConfigError
from maxstack.submit import records

if TYPE_CHECKING:
    from maxstack.schema.cluster import ClusterConfig
    from maxstack.schema.config import Config
    from maxstack.submit.job import Job

TARGETS = "xpk", "gke", "slurm"
JOB = "{job}"
"""In a command that looks after a job: the number that Slurm gave it."""
STOP = (
    'touch "$1" || exit; scancel --state=PENDING "$2"; scancel --signal=TERM --state=RUNNING "$2"'
)
"""Slurm gives a job that waits no other signal than SIGKILL."""


def submit(name: str, cfg: "Config", args: argparse.Namespace) -> int:
    """Check the run against the cluster, and hand it over; with --dry-run show what would be handed
    over."""
    from maxstack import config
    from maxstack.schema.cluster import ClusterConfig
    from maxstack.submit import job as jobs

    if not args.cluster:
        raise ConfigError(
            f"--target {args.target}: give --cluster FILE, the facts of the cluster; "
            "configs/clusters has examples"
        )
    if args.detach or args.processes != 1:
        raise ConfigError(
            f"--processes and --detach: are of --target local; on {args.target} the "
            "topology says how many processes there are"
        )
    more = [] if args.max_restarts is None else [f"max_restarts={args.max_restarts}"]
    cluster = config.load(ClusterConfig, args.cluster, [*args.set, *more])
    jobs.tell_unused(cluster, args.target)
    cfg = jobs.with_cache(cfg, cluster)
    job, told = jobs.checked(name, cfg, cluster, args.force)
    words, text, after = {"xpk": _xpk, "gke": _gke, "slurm": _slurm}[args.target](job)
    jobs.check_restarts(job, args.target)
    jobs.tell_changing(job, args.target)
    hosts = f"{job.topology.hosts} host{'s' * (job.topology.hosts > 1)}"
    print(
        f"{name}: {job.topology.name}, {job.topology.size} devices on {hosts}; {told}",
        file=sys.stderr,
    )
    if away := jobs.elsewhere(job):
        print(
            "not in the bucket, so every host must have them, by its image or a disk "
            f"that all see: {', '.join(away)}",
            file=sys.stderr,
        )
    if args.out:
        for path, what in _write(Path(args.out), job, args.target, (words, text, after)):
            print(f"wrote {path}: {what}")
    if args.dry_run:
        if not args.out:
            sys.stdout.write(text)
        return 0
    if args.target == "xpk":
        sys.stderr.write(text)
    records.check_free(name)
    ended(name, str(Path(cfg.run.output_dir) / cfg.run.name), args.target)
    done = _run(words, text if args.target != "xpk" else None, capture=args.target == "slurm")
    if done.returncode:
        raise ConfigError(
            f"{words[0]} left with {done.returncode}; what it said is above, and nothing "
            f"is noted of {name}. Where that name is there "
            f"already: maxstack stop {name} first, or give another --name and run.name"
        )
    number = done.stdout.strip().split(";")[0] if done.stdout else ""
    after = {
        verb: [word.replace(JOB, number) for word in command] for verb, command in after.items()
    }
    records.write(
        name,
        {
            "target": args.target,
            "cluster": args.cluster,
            "topology": job.topology.name,
            "commands": after,
            "folder": str(Path(cfg.run.output_dir) / cfg.run.name),
            "started": datetime.datetime.now().isoformat(timespec="seconds"),
        },
    )
    print(
        f"{name}: submitted{f' as job {number}' * bool(number)}; maxstack status {name}, "
        f"logs {name} or stop {name}",
        file=sys.stderr,
    )
    return 0


def _write(folder: Path, job: "Job", target: str, handed: "Handed") -> list[tuple[Path, str]]:
    """All that a cluster would get, as files: the path of each, and what it is."""
    words, text, after = handed
    files = [(f"{job.name}.yml", "the configuration, resolved", job.text)]
    if target == "gke":
        files.append(("jobset.yml", "what kubectl reads", text))
        words = [*words[:-1], "jobset.yml"]
    elif target == "slurm":
        files.append(("job.sbatch", "the script", text))
        words = [*words, "job.sbatch"]
    later = "".join(f"# {verb}: {shlex.join(command)}\n" for verb, command in after.items())
    files.append(
        (
            "submit.sh",
            "the command that hands it over, and those for later in comments",
            f"#!/usr/bin/env bash\n# In this folder.\n{shlex.join(words)}\n{later}",
        )
    )
    if there := [str(folder / name) for name, _, _ in files if (folder / name).exists()]:
        raise ConfigError(
            f"--out {folder}: {', '.join(there)}: there already; remove it, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, _, content in files:
        (folder / name).write_text(content, encoding="utf-8")
    return [(folder / name, what) for name, what, _ in files]


def ended(name: str, folder: str, target: str) -> None:
    """ConfigError where a cluster still has what was submitted by that name, or what writes into
    that folder there: two would write into one folder, or only one could be looked after."""
    for other in records.names():
        record = records.read(other)
        if record["target"] == "local" or ("stopped" in record and record["target"] != "slurm"):
            continue
        if other != name and (record["target"], record["folder"]) != (target, folder):
            continue
        where = (
            f"{other}: was submitted to {record['target']} ({record['cluster']}, "
            f"{record['folder']})"
        )
        asked = _run(record["commands"]["there"], capture=True)
        if asked.returncode:
            raise ConfigError(
                f"{where}, and whether it is still there is not known: "
                f"{record['commands']['there'][0]} left with {asked.returncode}; "
                "mend that, give another --name and run.name, or, where you know that "
                f"it has ended, remove {records.place(other)}"
            )
        if asked.stdout.strip():
            raise ConfigError(
                f"{where}, and is still there; maxstack stop {other} first, or give "
                "another --name and run.name"
            )


def told(record: dict[str, Any]) -> str:
    """What was submitted, in a line."""
    now = f"stopped {record['stopped']}" if "stopped" in record else "it says:"
    return (
        f"on {record['target']} ({record['cluster']}, {record['topology']}), since "
        f"{record['started']}, in {record['folder']}; {now}"
    )


def stop(name: str, record: dict[str, Any]) -> int:
    """End it by the cluster's own command, and note that."""
    if code := look("stop", record):
        return code
    records.write(name, record | {"stopped": datetime.datetime.now().isoformat(timespec="seconds")})
    return 0


def look(verb: str, record: dict[str, Any]) -> int:
    """Run the cluster's own command for a verb; nothing for a run on this machine."""
    if record["target"] == "local":
        return 0
    if verb not in record["commands"]:
        raise ConfigError(f"{verb}: {record['target']} has no command for that")
    return _run(record["commands"][verb]).returncode


Handed = tuple[list[str], str, dict[str, list[str]]]
"""The command, what it reads or, of xpk, is; and the commands that look after it."""


def _xpk(job: "Job") -> Handed:
    from maxstack.submit import xpk

    words = xpk.command(job)
    place = [
        word
        for word in words
        if word.startswith(("--cluster=", "--project=", "--zone=", "--namespace="))
    ]
    return (
        words,
        f"{xpk.shown(words)}\n",
        {
            **_jobset(job, ["--all-containers"], 4 * job.topology.hosts + 4),
            "status": ["xpk", "workload", "list", *place, f"--filter-by-job=^{job.name}$"],
            "stop": ["xpk", "workload", "delete", f"--workload={job.name}", *place, "--force"],
        },
    )


def _gke(job: "Job") -> Handed:
    from maxstack.submit import gke

    kubectl = _kubectl(job.cluster)
    return (
        [*kubectl, "create", "--filename", "-"],
        gke.manifest(job),
        {
            **_jobset(job, ["--container", gke.CONTAINER], job.topology.hosts),
            "status": [*kubectl, "get", "jobset", job.name],
            "stop": [*kubectl, "delete", "jobset", job.name, "--cascade=foreground"],
        },
    )


def _jobset(job: "Job", containers: list[str], streams: int) -> dict[str, list[str]]:
    """What kubectl says of a job that is a JobSet."""
    kubectl = _kubectl(job.cluster)
    logs = [
        *kubectl,
        "logs",
        "--selector",
        f"jobset.sigs.k8s.io/jobset-name={job.name}",
        *containers,
        "--prefix",
        "--tail=-1",
        f"--max-log-requests={streams}",
    ]
    return {
        "there": [*kubectl, "get", "jobset", job.name, "--ignore-not-found", "--output=name"],
        "logs": logs,
        "follow": [*logs, "--follow"],
    }


def _kubectl(cluster: "ClusterConfig") -> list[str]:
    """kubectl, of the cluster."""
    return [
        "kubectl",
        *([f"--context={cluster.context}"] if cluster.context else []),
        f"--namespace={cluster.namespace}",
    ]


def _slurm(job: "Job") -> Handed:
    from maxstack.submit import slurm

    log = str(Path.cwd() / f"{job.name}-{JOB}.log")
    return (
        ["sbatch", "--parsable"],
        slurm.script(job),
        {
            "there": ["squeue", "--me", "--noheader", "--name", job.name],
            "status": ["squeue", "--jobs", JOB],
            "logs": ["cat", log],
            "follow": ["tail", "--lines=+1", "--follow", log],
            "stop": ["bash", "-c", STOP, "stop", log.removesuffix("log") + "stop", JOB],
        },
    )


def _run(
    words: Sequence[str], given: str | None = None, capture: bool = False
) -> "subprocess.CompletedProcess[str]":
    if not shutil.which(words[0]):
        raise ConfigError(
            f"{words[0]} is not installed here, or not on the PATH; --dry-run shows what "
            "it would be given"
        )
    return subprocess.run(
        words, input=given, stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
