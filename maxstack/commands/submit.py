"""`maxstack submit`, `status`, `logs` and `stop`: runs of several processes on this machine, and
runs on clusters."""

import contextlib
import datetime
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.command import CONFIG, OVERRIDES, argument, command, load_config, positive
from maxstack.errors import ConfigError
from maxstack.submit.names import safe

if TYPE_CHECKING:
    from maxstack.schema.config import Config

PATIENCE = 120.0
"""Seconds that a run on this machine has to save and end."""
NAME = argument("name", metavar="NAME", help="as submit printed it")


@command(
    "submit",
    "Start the run of a configuration: as several processes on this machine, supervised, with one "
    "log, or on a cluster, by its own commands; or, with --serve, servers of a model on a cluster. "
    "`maxstack status`, `logs` and `stop` look after it.",
    "submit configs/quickstart.yml --target local --processes 2; "
    "maxstack submit run.yml --target gke --cluster tpu-v5e --dry-run",
    CONFIG,
    OVERRIDES,
    argument(
        "--target",
        required=True,
        choices=["local", "xpk", "gke", "slurm"],
        help="local: processes on this machine; xpk; gke: a JobSet by "
        "kubectl; slurm: a script by sbatch",
    ),
    argument(
        "--cluster",
        metavar="FILE",
        help="facts of the cluster: a YAML file, or the name of one of configs/clusters",
    ),
    argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="replaces a fact of the cluster",
    ),
    argument(
        "--name", help="what it is called later (default: run.name, as a name that DNS takes)"
    ),
    argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="how many; they share the GPUs, or run.virtual_devices",
    ),
    argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="here: in a row without a new step (default: 10); on a cluster: in all "
        "(default: max_restarts of its facts)",
    ),
    argument(
        "--force",
        action="store_true",
        help="on a cluster: although the estimate of its memory is far above what is there",
    ),
    argument("--dry-run", action="store_true", help="show what would be started"),
    argument(
        "--out",
        metavar="DIR",
        help="on a cluster: write the configuration, what the cluster gets and the commands "
        "into a folder, to be read",
    ),
    argument("--detach", action="store_true", help="start it in the background"),
    argument(
        "--serve",
        action="store_true",
        help="serve a model in place of training: CONFIG is a run, a Hugging Face folder (of the "
        "cluster) or a name of the hub; gke: a Deployment and a Service",
    ),
    argument(
        "--engine",
        choices=["maxstack", "vllm"],
        default="maxstack",
        help="with --serve; vllm: over several hosts too, of a Hugging Face folder",
    ),
    argument(
        "--replicas", type=positive, default=1, metavar="N", help="with --serve: servers of it"
    ),
    argument(
        "--api-key-file", metavar="FILE", help="with --serve: keys of clients, in a volume there"
    ),
    argument("--tool-parser", metavar="NAME", help="with --serve: as of maxstack serve"),
    allow_abbrev=False,
)
def submit(args: Namespace) -> int:
    """Start a run where --target says; the exit code."""
    from maxstack.submit import remote, serving

    if args.serve:
        return serving.submit(_name(args, f"{Path(args.config).name}-serve"), args)
    if args.engine != "maxstack" or args.replicas > 1 or args.api_key_file or args.tool_parser:
        raise ConfigError(
            "--engine, --replicas, --api-key-file and --tool-parser: are of --serve; leave them out"
        )
    cfg = load_config(args)
    if cfg.distributed:
        raise ConfigError(
            "distributed: is what submit finds out by itself; leave it out of the configuration"
        )
    name = _name(args, cfg.run.name)
    if cfg.runtime == "pathways" and args.target != "xpk":
        raise ConfigError(
            "runtime: pathways: needs a proxy and servers, which --target xpk starts, "
            f"and {args.target} does not"
        )
    if args.target != "local":
        return remote.submit(name, cfg, args)
    if args.cluster or args.set or args.out:
        raise ConfigError(
            "--cluster, --set and --out: are of clusters, and --target local is this "
            "machine; leave them out"
        )
    return _local(name, cfg, args)


def _name(args: Namespace, usual: str) -> str:
    """The name to submit by; ConfigError for one that DNS does not take."""
    from maxstack.errors import quoted

    name = safe(usual) if args.name is None else args.name
    if name != safe(name):
        raise ConfigError(
            f"--name {quoted(name)}: give at most 40 lower case letters, digits and "
            f"hyphens, beginning with a letter, such as {safe(name)}"
        )
    return name


def _local(name: str, cfg: "Config", args: Namespace) -> int:
    """Run the processes on this machine; the exit code of the run."""
    from maxstack.schema import mesh_rules, rules
    from maxstack.submit import local, records, remote

    devices, overrides, environments = local.shares(cfg, args.processes)
    mesh = mesh_rules.product_of(rules.sizes_on(cfg, devices, "this machine"))
    folder = Path(cfg.run.output_dir) / cfg.run.name
    print(
        f"{name}: {_processes(args.processes)} on this machine, {devices} "
        f"device{'s' * (devices > 1)} ({mesh}), in {folder}",
        flush=True,
    )
    restarts = 10 if args.max_restarts is None else args.max_restarts
    words = local.command(args.config, [*args.overrides, *overrides], restarts)
    members = zip(environments, local.members(args.processes), strict=True)
    environments = [own | member for own, member in members]
    if args.dry_run:
        for own in environments:
            print(shlex.join(["env", *(f"{key}={own[key]}" for key in own), *words]))
        return 0
    records.check_free(name)
    remote.check_ended(name, str(folder.resolve()), "local")
    if args.detach:
        return _detach(name, folder / local.LOG, args.argv)
    record = {
        "target": "local",
        "folder": str(folder.resolve()),
        "processes": args.processes,
        "pid": os.getpid(),
        "started": datetime.datetime.now().isoformat(timespec="seconds"),
        "steps": cfg.train.steps,
    }
    with local.Group(folder / local.LOG) as group, records.held(name, record) as write:
        code = group.run(words, environments)
        write(code=code, asked=group.asked)
    print(f"{name}: left with {code}")
    return code


def _detach(name: str, log: Path, argv: list[str]) -> int:
    """Start the same command in a session of its own, and wait until its record is there."""
    from maxstack.submit import records

    words = [word for word in argv if word != "--detach"]
    process = subprocess.Popen(
        [sys.executable, "-m", "maxstack.cli", "submit", *words, "--name", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr
    while process.poll() is None:
        with contextlib.suppress(ConfigError):  # it is being written
            is_held = name in records.names() and records.is_held(name)
            if is_held and records.read(name)["pid"] == process.pid:
                print(
                    f"in the background: maxstack logs {name} --follow, maxstack status "
                    f"{name}, maxstack stop {name}; the log is {log}"
                )
                return 0
        time.sleep(0.05)
    sys.stderr.write(process.stderr.read())
    return process.returncode


@command(
    "status",
    "What runs, and how far it is.",
    "status quickstart",
    argument("name", nargs="?", metavar="NAME", help="as submit printed it (default: all)"),
)
def status(args: Namespace) -> int:
    """Print the state of a run, or of all that were submitted."""
    from maxstack.submit import records, remote

    code = 0
    for name in [safe(args.name)] if args.name else records.names():
        try:
            record = records.read(name)
            is_local = record["target"] == "local"
            state = _state(name, record) if is_local else remote.state(record)
            print(f"{name}: {state}", flush=True)
            if not is_local and (args.name or "stopped" not in record):
                code = max(code, remote.look("status", record))
        except ConfigError as error:
            if args.name:
                raise
            print(f"{name}: {error}", flush=True)
            code = 1
    return code


@command(
    "logs",
    "The lines of all processes of a run that was submitted.",
    "logs quickstart --follow",
    NAME,
    argument("-f", "--follow", action="store_true", help="go on until it ends"),
)
def logs(args: Namespace) -> int:
    """Print the log of a run."""
    from maxstack.submit import local, records, remote

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


@command(
    "stop",
    "End a run that was submitted. It saves a checkpoint first; submitting it again goes on.",
    "stop quickstart",
    NAME,
)
def stop(args: Namespace) -> int:
    """End a run; a run on this machine saves before."""
    from maxstack.submit import records, remote

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
    """State of a run on this machine, in a line."""
    from maxstack.report import goodput
    from maxstack.submit import records

    code = record.get("code")
    if records.is_held(name):
        state = "running"
    elif code is None:
        state = "killed without a word"
    elif code == 0:
        state = "done"
    elif record.get("asked") and code not in (1, 2):
        state = "stopped; submit it again to go on"
    else:
        state = f"failed with {code} (maxstack logs {name})"
    step = goodput.so_far(Path(record["folder"])).steps
    return (
        f"{state}, step {step} of {record['steps']}, {_processes(record['processes'])} here, "
        f"since {record['started']}, in {record['folder']}"
    )


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"
