"""`maxstack submit`, `status`, `logs` and `stop`: the same file on a laptop and on a cluster."""

import argparse
import contextlib
import datetime
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import cli
from maxstack.config import ConfigError, quoted
from maxstack.report import goodput
from maxstack.submit import local, records, remote
from maxstack.submit.names import safe

if TYPE_CHECKING:
    from maxstack.schema.config import Config

PATIENCE = 120.0
"""Seconds that a run on this machine has to save and end."""


def submit(argv: Sequence[str]) -> int:
    """Start a run where `--target` says; the exit code."""
    parser = argparse.ArgumentParser(
        prog="maxstack submit",
        allow_abbrev=False,
        description="Start the run of a configuration: as several processes on this machine, "
        "supervised, with one log, or on "
        "a cluster, by its own commands. `maxstack status`, `logs` and `stop` look after it.",
        epilog="example: maxstack submit configs/quickstart.yml --target local --processes 2; "
        "maxstack submit run.yml --target gke --cluster tpu-v5e --dry-run",
    )
    cli.takes_config(parser)
    parser.add_argument(
        "--target",
        required=True,
        choices=["local", *remote.TARGETS],
        help="local: processes on this machine; xpk; gke: a JobSet by "
        "kubectl; slurm: a script by sbatch",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="facts of the cluster: a YAML file, or the name of one of configs/clusters",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="replaces a fact of the cluster",
    )
    parser.add_argument(
        "--name", help="what it is called later (default: run.name, as a name that DNS takes)"
    )
    parser.add_argument(
        "--processes",
        type=cli.positive,
        default=1,
        metavar="N",
        help="how many; they share the GPUs, or run.virtual_devices",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="here: in a row without a new step (default: 10); on a cluster: in all "
        "(default: max_restarts of its facts)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="on a cluster: although the estimate of its memory is far above what is there",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be started")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="on a cluster: write the configuration, what the cluster gets and the commands "
        "into a folder, "
        "to be read",
    )
    parser.add_argument("--detach", action="store_true", help="start it in the background")
    args = parser.parse_intermixed_args(argv)

    from maxstack.load import load

    cfg = load(args.config, args.overrides)
    if cfg.distributed:
        raise ConfigError(
            "distributed: is what submit finds out by itself; leave it out of the configuration"
        )
    name = safe(cfg.run.name) if args.name is None else args.name
    if name != safe(name):
        raise ConfigError(
            f"--name {quoted(name)}: give at most 40 lower case letters, digits and "
            "hyphens, beginning with a letter, such as "
            f"{safe(name)}"
        )
    if cfg.runtime == "pathways" and args.target != "xpk":
        raise ConfigError(
            "runtime: pathways: needs a proxy and servers, which --target xpk starts, "
            f"and {args.target} does not"
        )
    if cfg.faults.elastic and args.processes > 1:
        raise ConfigError(
            "faults.elastic: is for one process that drives all slices, and --processes "
            f"is {args.processes}; leave one out"
        )
    if args.target != "local":
        return remote.submit(name, cfg, args)
    if args.cluster or args.set or args.out:
        raise ConfigError(
            "--cluster, --set and --out: are of clusters, and --target local is this "
            "machine; leave them out"
        )
    return _local(name, cfg, args, argv)


def _local(name: str, cfg: "Config", args: argparse.Namespace, argv: Sequence[str]) -> int:
    from maxstack.schema import mesh_rules, rules

    devices, overrides, environments = local.shares(cfg, args.processes)
    sizes = rules.sizes_on(cfg, devices, "this machine")
    folder = Path(cfg.run.output_dir) / cfg.run.name
    mesh = mesh_rules.product_of(sizes)
    many = (
        f"{args.processes} process{'es' * (args.processes > 1)} on this machine, {devices} "
        f"device{'s' * (devices > 1)}"
    )
    print(f"{name}: {many} ({mesh}), in {folder}", flush=True)
    command = local.command(
        args.config,
        [*args.overrides, *overrides],
        10 if args.max_restarts is None else args.max_restarts,
    )
    environments = [
        own | member
        for own, member in zip(environments, local.members(args.processes), strict=True)
    ]
    if args.dry_run:
        for own in environments:
            print(shlex.join(["env", *(f"{key}={value}" for key, value in own.items()), *command]))
        return 0
    records.check_free(name)
    remote.ended(name, str(folder.resolve()), "local")
    record = {
        "target": "local",
        "folder": str(folder.resolve()),
        "processes": args.processes,
        "pid": os.getpid(),
        "started": datetime.datetime.now().isoformat(timespec="seconds"),
        "steps": cfg.train.steps,
    }
    if args.detach:
        return _detached(name, folder, argv)
    with local.Group(folder / local.LOG, sys.stdout) as group, records.held(name, record) as write:
        code = group.run(command, environments)
        write(code=code, asked=group.asked)
    print(f"{name}: left with {code}")
    return code


def _detached(name: str, folder: Path, argv: Sequence[str]) -> int:
    """The same command in a session of its own, and word once it looks after the run."""
    again = [
        sys.executable,
        "-m",
        "maxstack.cli",
        "submit",
        *(word for word in argv if word != "--detach"),
        "--name",
        name,
    ]
    process = subprocess.Popen(
        again,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr
    there = False
    while process.poll() is None:
        with contextlib.suppress(ConfigError):  # it is being written
            there = (
                name in records.names()
                and records.is_held(name)
                and records.read(name)["pid"] == process.pid
            )
        if there:
            print(
                f"in the background: maxstack logs {name} --follow, maxstack status "
                f"{name}, maxstack stop {name}; the log is {folder / local.LOG}"
            )
            return 0
        time.sleep(0.05)
    sys.stderr.write(process.stderr.read())
    return process.returncode


def status(argv: Sequence[str]) -> int:
    """What became of what was submitted."""
    parser = argparse.ArgumentParser(
        prog="maxstack status",
        description="What runs, and how far it is.",
        epilog="example: maxstack status quickstart",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="as submit told it (default: all)")
    args = parser.parse_args(argv)
    code = 0
    for name in [safe(args.name)] if args.name else records.names():
        try:
            record = records.read(name)
            print(
                f"{name}: "
                f"{_state(name, record) if record['target'] == 'local' else remote.told(record)}",
                flush=True,
            )
            code = max(
                code, 0 if "stopped" in record and not args.name else remote.look("status", record)
            )
        except ConfigError as error:
            if args.name:
                raise
            print(f"{name}: {error}", flush=True)
            code = 1
    return code


def logs(argv: Sequence[str]) -> int:
    """The log of what was submitted."""
    parser = argparse.ArgumentParser(
        prog="maxstack logs",
        description="The lines of all processes of a run that was submitted.",
        epilog="example: maxstack logs quickstart --follow",
    )
    parser.add_argument("name", metavar="NAME", help="as submit told it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    args = parser.parse_args(argv)
    name = safe(args.name)
    record = records.read(name)
    if record["target"] != "local":
        return remote.look("follow" if args.follow else "logs", record)
    path = Path(record["folder"]) / local.LOG
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {name} has not begun, or its folder was removed")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            running = records.is_held(name)
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not args.follow or not running:
                return 0
            time.sleep(0.3)


def stop(argv: Sequence[str]) -> int:
    """End what was submitted; a run on this machine saves before."""
    parser = argparse.ArgumentParser(
        prog="maxstack stop",
        description="End a run that was submitted. It saves a checkpoint first; submitting it "
        "again goes on.",
        epilog="example: maxstack stop quickstart",
    )
    parser.add_argument("name", metavar="NAME", help="as submit told it")
    args = parser.parse_args(argv)
    name = safe(args.name)
    record = records.read(name)
    if record["target"] != "local":
        return remote.stop(name, record)
    if not records.is_held(name):
        print(f"{name}: does not run")
        return 0
    if record["host"] != platform.node():
        raise ConfigError(f"{name}: runs on {record['host']}; stop it there")
    os.kill(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while records.is_held(name):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{name}: has not ended in {PATIENCE:.0f} s after SIGTERM; its process "
                f"is {record['pid']}"
            )
        time.sleep(0.1)
    print(f"{name}: {_state(name, records.read(name))}")
    return 0


def _state(name: str, record: dict[str, Any]) -> str:
    """In a line."""
    step, code = goodput.so_far(Path(record["folder"])).steps, record.get("code")
    stopped = record.get("asked") and code not in (1, 2)
    ended = (
        "killed without a word"
        if code is None
        else "done"
        if code == 0
        else "stopped; submit it again to go on"
        if stopped
        else f"failed with {code} (maxstack logs {name})"
    )
    many = f"{record['processes']} process{'es' * (record['processes'] > 1)} here"
    state = "running" if records.is_held(name) else ended
    return (
        f"{state}, step {step} of {record['steps']}, {many}, since {record['started']}, in "
        f"{record['folder']}"
    )
