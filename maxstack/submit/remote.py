"""Runs on clusters: submitted, watched and stopped by the clusters' own commands."""

import argparse
import datetime
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.cluster.job_key import LEAST
from maxstack.errors import ConfigError
from maxstack.submit import records
from maxstack.submit.job import KEY, NUMBER

if TYPE_CHECKING:
    from maxstack.schema.cluster import ClusterConfig
    from maxstack.schema.config import Config
    from maxstack.submit.job import Submission

PROTECTION = "protection.yml"
ANSWER = 60.0
"""Seconds in which a cluster must answer."""


def submit(name: str, cfg: "Config", args: argparse.Namespace) -> int:
    """Check the run against the cluster and submit it; with --dry-run print what would be
    submitted."""
    from maxstack.submit import gke, slurm, xpk
    from maxstack.submit import job as jobs

    cluster = read_cluster(args)
    cfg = jobs.with_grace(jobs.with_cache(cfg, cluster), cluster)
    job, estimate = jobs.make_job(name, cfg, cluster, args.force)
    submission = {"xpk": xpk, "gke": gke, "slurm": slurm}[args.target].submission(job)
    words, text, commands, before = submission
    jobs.check_restarts(job, args.target)
    jobs.warn_of_tag(job, args.target)
    print(
        f"{name}: {job.topology.name}, {job.topology.size} devices, {job.topology.hosts} hosts; "
        f"{estimate}",
        file=sys.stderr,
    )
    if paths := jobs.find_files_outside(job):
        print(
            "not in the bucket, so every host must have them, in its image or on a disk that all "
            f"see: {', '.join(paths)}",
            file=sys.stderr,
        )
    if args.out:
        files = [(f"{job.name}.yml", "the configuration, resolved", job.text)]
        to_submit = words
        if before:
            files.append(
                ("protection.yml", "input of kubectl apply, with the job's key", before[1])
            )
        if args.target == "gke":
            files.append(("jobset.yml", "input of kubectl create", text))
            to_submit = [*words[:-1], "jobset.yml"]
        elif args.target == "slurm":
            files.append(("job.sbatch", "the script", text))
            to_submit = [*words, "job.sbatch"]
        write_files(args.out, files, to_submit, commands, _draw_key(before[0]) if before else "")
    elif args.dry_run:
        sys.stdout.write(f"{before[1]}---\n{text}" if before else text)
    if args.dry_run:
        return 0
    if args.target == "xpk":
        sys.stderr.write(text)
    facts = {"cluster": args.cluster, "topology": job.topology.name}
    hand_over(name, args.target, submission, facts, str(Path(cfg.run.output_dir) / cfg.run.name))
    return 0


def _draw_key(command: Sequence[str]) -> str:
    """Return shell lines that draw the job's key and give it to a command."""
    draw = f"key=$(od -An -v -N{LEAST} -tx1 /dev/urandom | tr -d '[:space:]')"
    return f'{draw}\nsed "s/{KEY}/$key/" {PROTECTION} | {shlex.join(command)} || exit\n'


def read_cluster(args: argparse.Namespace) -> "ClusterConfig":
    """Read the description of --cluster; ConfigError for options that no cluster has."""
    from maxstack import config
    from maxstack.schema.cluster import ClusterConfig
    from maxstack.submit.job import check_cluster

    if not args.cluster:
        raise ConfigError(
            f"--target {args.target}: give --cluster FILE, a description of the cluster; "
            "configs/clusters has examples"
        )
    if args.detach or args.processes != 1:
        raise ConfigError(
            f"--processes and --detach: are for --target local; on {args.target} the topology "
            "gives the number of processes"
        )
    more = [] if args.max_restarts is None else [f"max_restarts={args.max_restarts}"]
    cluster = config.load(ClusterConfig, args.cluster, [*args.set, *more])
    check_cluster(cluster, args.target)
    return cluster


def hand_over(
    name: str, target: str, submission: "Submission", facts: dict[str, Any], folder: str
) -> None:
    """Run the command that submits, and record the later ones. `folder`: where the job writes, or
    its address, which no other job may have."""
    words, text, commands, before = submission
    records.check_free(name)
    check_ended(name, folder, target)
    done = None
    if before:
        done = _run(before[0], before[1].replace(KEY, secrets.token_hex(LEAST)))
    if not done or not done.returncode:
        done = _run(words, text if target != "xpk" else None, capture=target == "slurm")
    if done.returncode:
        raise ConfigError(
            f"{words[0]} failed with {done.returncode}, see above; {name} was not submitted. If "
            f"that name is taken: maxstack stop {name} first, or give another --name and run.name"
        )
    number = done.stdout.strip().split(";")[0] if done.stdout else ""
    for verb, command in commands.items():
        commands[verb] = [word.replace(NUMBER, number) for word in command]
    started = datetime.datetime.now().isoformat(timespec="seconds")
    own = {"target": target, "commands": commands, "folder": folder, "started": started}
    records.write(name, own | facts)
    print(
        f"{name}: submitted{f' as job {number}' if number else ''}; see maxstack status {name}, "
        f"logs {name}, stop {name}",
        file=sys.stderr,
    )


def write_files(
    out: str,
    files: Sequence[tuple[str, str, str]],
    words: Sequence[str],
    later: Mapping[str, Sequence[str]],
    first: str = "",
) -> None:
    """Write all that a cluster would get into a folder: `files` (name, description, text) and the
    commands, after the lines `first`. Print the path of each."""
    comments = "".join(f"# {verb}: {shlex.join(command)}\n" for verb, command in later.items())
    script = (
        "submit.sh",
        "the command that submits it, with later ones in comments",
        f"#!/usr/bin/env bash\n# In this folder.\n{first}{shlex.join(words)}\n{comments}",
    )
    folder = Path(out)
    if existing := [
        str(folder / name) for name, _, _ in (*files, script) if (folder / name).exists()
    ]:
        raise ConfigError(
            f"--out {folder}: {', '.join(existing)} already exists; remove it, or give another "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, what, content in (*files, script):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(content, encoding="utf-8")
        print(f"wrote {folder / name}: {what}")


def check_ended(name: str, folder: str, target: str) -> None:
    """ConfigError where a cluster still has a job of that name, or one that writes into the same
    folder."""
    for other in records.names():
        record = records.read(other)
        if record["target"] == "local" or ("stopped" in record and record["target"] != "slurm"):
            continue
        if other != name and (record["target"], record["folder"]) != (target, folder):
            continue
        job = (
            f"{other}: was submitted to {record['target']} ({record['cluster']}, "
            f"{record['folder']})"
        )
        words = record["commands"]["there"]
        done = _run(words, capture=True, seconds=ANSWER)
        if done.returncode:
            raise ConfigError(
                f"{job}, and it is not known whether it has ended: {words[0]} failed with "
                f"{done.returncode}; fix that, give another --name and run.name, or, if you know "
                f"that it has ended, remove {records.path_of(other)}"
            )
        if done.stdout.strip():
            raise ConfigError(
                f"{job}, and is still there; maxstack stop {other} first, or give another --name "
                "and run.name"
            )


def state(record: dict[str, Any]) -> str:
    """Return a line: where and when a job was submitted."""
    now = f"stopped {record['stopped']}" if "stopped" in record else "its status:"
    return (
        f"on {record['target']} ({record['cluster']}, {record['topology']}), since "
        f"{record['started']}, in {record['folder']}; {now}"
    )


def stop(name: str, record: dict[str, Any]) -> int:
    """End a job by the cluster's own command, and record that."""
    if code := run_command("stop", record):
        return code
    records.write(name, record | {"stopped": datetime.datetime.now().isoformat(timespec="seconds")})
    return 0


def run_command(verb: str, record: dict[str, Any]) -> int:
    """Run the cluster's own command for a verb; return its exit code."""
    if verb not in record["commands"]:
        raise ConfigError(f"{verb}: {record['target']} has no such command")
    return _run(record["commands"][verb], seconds=ANSWER if verb == "status" else None).returncode


def _run(
    words: Sequence[str],
    text: str | None = None,
    capture: bool = False,
    seconds: float | None = None,
) -> "subprocess.CompletedProcess[str]":
    if not shutil.which(words[0]):
        raise ConfigError(
            f"{words[0]} is not installed here, or not on the PATH; --dry-run shows its input"
        )
    out = subprocess.PIPE if capture else None
    try:
        return subprocess.run(
            words, input=text, stdout=out, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{shlex.join(words)}: no answer in {seconds:.0f} s; the cluster may be unreachable: "
            "try the command by hand"
        ) from error
