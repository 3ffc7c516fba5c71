"""`maxstack submit`, `status`, `logs` and `stop`: start jobs on this machine or on a cluster, and
look after them."""

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
from maxstack.submit.names import safe_name

if TYPE_CHECKING:
    from maxstack.schema.config import Config

PATIENCE = 120.0
"""Seconds that a job on this machine has to save and exit."""
NAME = argument("name", metavar="NAME", help="name of the job, as printed by submit")


@command(
    "submit",
    "Start a training job: as supervised processes on this machine that share one log, or on a "
    "cluster through the cluster's own command-line tools. With --serve, start model servers on a "
    "cluster. Follow up with `maxstack status`, `logs` and `stop`.",
    "submit configs/quickstart.yml --target local --processes 2\n"
    "submit run.yml --target gke --cluster tpu-v5e --dry-run",
    CONFIG,
    OVERRIDES,
    argument(
        "--target",
        required=True,
        choices=["local", "xpk", "gke", "slurm"],
        help="local: processes on this machine; xpk: the xpk tool; gke: a JobSet through kubectl; "
        "slurm: a script through sbatch",
    ),
    argument(
        "--cluster",
        metavar="FILE",
        help="cluster description: a YAML file, or the name of one in configs/clusters",
    ),
    argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="override a value of the cluster description; repeatable",
    ),
    argument("--name", help="name of the job (default: run.name, turned into a valid DNS name)"),
    argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="number of processes, which share the GPUs or run.virtual_devices (default: 1)",
    ),
    argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="local: restarts in a row without a new step (default: 10); cluster: restarts in "
        "total (default: max_restarts of the cluster description)",
    ),
    argument(
        "--force",
        action="store_true",
        help="cluster: submit even if the estimated memory far exceeds that of the devices",
    ),
    argument("--dry-run", action="store_true", help="print what would be started, and exit"),
    argument(
        "--out",
        metavar="DIR",
        help="cluster: write the configuration, the manifests and the commands to a folder",
    ),
    argument("--detach", action="store_true", help="run in the background"),
    argument(
        "--serve",
        action="store_true",
        help="serve a model instead of training: CONFIG is a run, a Hugging Face folder on the "
        "cluster, or a name on the hub; on gke, a Deployment and a Service",
    ),
    argument(
        "--engine",
        choices=["maxstack", "vllm"],
        default="maxstack",
        help="with --serve: inference engine; vllm serves Hugging Face folders, optionally across "
        "hosts",
    ),
    argument(
        "--replicas", type=positive, default=1, metavar="N", help="with --serve: number of servers"
    ),
    argument(
        "--api-key-file",
        metavar="FILE",
        help="with --serve: client API keys, mounted from a volume",
    ),
    argument("--tool-parser", metavar="NAME", help="with --serve: see `maxstack serve --help`"),
)
def submit(args: Namespace) -> int:
    """Start a job on --target; return the exit code."""
    from maxstack.submit import remote, serving

    if args.serve:
        return serving.submit(_name(args, f"{Path(args.config).name}-serve"), args)
    if args.engine != "maxstack" or args.replicas > 1 or args.api_key_file or args.tool_parser:
        raise ConfigError(
            "--engine, --replicas, --api-key-file and --tool-parser: need --serve; add it, or "
            "leave them out"
        )
    cfg = load_config(args)
    if cfg.distributed:
        raise ConfigError("distributed: is set by submit itself; leave it out of the configuration")
    name = _name(args, cfg.run.name)
    if cfg.runtime == "pathways" and args.target != "xpk":
        raise ConfigError(
            f"runtime: pathways: needs --target xpk, which starts its proxy and servers; "
            f"{args.target} does not"
        )
    if args.target != "local":
        return remote.submit(name, cfg, args)
    if args.cluster or args.set or args.out:
        raise ConfigError(
            "--cluster, --set and --out: have no use with --target local; leave them out"
        )
    return _local(name, cfg, args)


def _name(args: Namespace, usual: str) -> str:
    """Return the name of the job; ConfigError for one that is no DNS name."""
    from maxstack.errors import quoted

    name = safe_name(usual) if args.name is None else args.name
    if name != safe_name(name):
        raise ConfigError(
            f"--name {quoted(name)}: use at most 40 lower-case letters, digits and hyphens, "
            f"starting with a letter, such as {safe_name(name)}"
        )
    return name


def _local(name: str, cfg: "Config", args: Namespace) -> int:
    """Run the processes on this machine; return the exit code of the job."""
    from maxstack.schema import mesh_rules, rules
    from maxstack.submit import local, records, remote

    devices, overrides, environments = local.share_devices(cfg, args.processes)
    mesh = mesh_rules.product_of(rules.sizes_on(cfg, devices, "this machine"))
    folder = Path(cfg.run.output_dir) / cfg.run.name
    print(
        f"{name}: {_count(args.processes, 'process', 'es')} on this machine, "
        f"{_count(devices, 'device', 's')} ({mesh}), in {folder}",
        flush=True,
    )
    restarts = 10 if args.max_restarts is None else args.max_restarts
    words = local.command(args.config, [*args.overrides, *overrides], restarts)
    members = zip(environments, local.process_variables(args.processes), strict=True)
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
    with local.Group(folder / local.LOG) as group, records.hold(name, record) as write:
        code = group.run(words, environments)
        write(code=code, asked=group.asked)
    print(f"{name}: exited with {code}")
    return code


def _detach(name: str, log: Path, argv: list[str]) -> int:
    """Start the same command in a session of its own, and wait until it has written its record."""
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
        with contextlib.suppress(ConfigError):  # the record is being written
            is_held = name in records.names() and records.is_held(name)
            if is_held and records.read(name)["pid"] == process.pid:
                print(
                    f"running in the background: maxstack logs {name} --follow, maxstack status "
                    f"{name}, maxstack stop {name}; the log is {log}"
                )
                return 0
        time.sleep(0.05)
    sys.stderr.write(process.stderr.read())
    return process.returncode


@command(
    "status",
    "Show the status and progress of submitted jobs.",
    "status quickstart",
    argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="name of the job, as printed by submit (default: all jobs)",
    ),
)
def status(args: Namespace) -> int:
    """Print the state of a job, or of all that were submitted."""
    from maxstack.submit import records, remote

    code = 0
    for name in [safe_name(args.name)] if args.name else records.names():
        try:
            record = records.read(name)
            is_local = record["target"] == "local"
            state = _state(name, record) if is_local else remote.state(record)
            print(f"{name}: {state}", flush=True)
            if not is_local and (args.name or "stopped" not in record):
                code = max(code, remote.run_command("status", record))
        except ConfigError as error:
            if args.name:
                raise
            print(f"{name}: {error}", flush=True)
            code = 1
    return code


@command(
    "logs",
    "Print the log of all processes of a submitted job.",
    "logs quickstart --follow",
    NAME,
    argument("-f", "--follow", action="store_true", help="keep printing until the job ends"),
)
def logs(args: Namespace) -> int:
    """Print the log of a job."""
    from maxstack.submit import local, records, remote

    name = safe_name(args.name)
    record = records.read(name)
    if record["target"] != "local":
        return remote.run_command("follow" if args.follow else "logs", record)
    path = Path(record["folder"]) / local.LOG
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; {name} has not started, or its folder was removed"
        )
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
    "Stop a submitted job. It saves a checkpoint first; submit it again to resume.",
    "stop quickstart",
    NAME,
)
def stop(args: Namespace) -> int:
    """Stop a job; one on this machine saves a checkpoint first."""
    from maxstack.submit import records, remote

    name = safe_name(args.name)
    record = records.read(name)
    if record["target"] != "local":
        return remote.stop(name, record)
    if not records.is_held(name):
        print(f"{name}: is not running")
        return 0
    if record["host"] != platform.node():
        raise ConfigError(f"{name}: runs on {record['host']}; stop it there")
    os.kill(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while records.is_held(name):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{name}: still running {PATIENCE:.0f} s after SIGTERM; its process is "
                f"{record['pid']}"
            )
        time.sleep(0.1)
    print(f"{name}: {_state(name, records.read(name))}")
    return 0


def _state(name: str, record: dict[str, Any]) -> str:
    """Describe the state of a job on this machine in a line."""
    from maxstack.report import goodput
    from maxstack.submit import records

    code = record.get("code")
    if records.is_held(name):
        state = "running"
    elif code is None:
        state = "killed"
    elif code == 0:
        state = "done"
    elif record.get("asked") and code not in (1, 2):
        state = "stopped; submit it again to resume"
    else:
        state = f"failed with {code} (maxstack logs {name})"
    step = goodput.so_far(Path(record["folder"])).steps
    return (
        f"{state}, step {step} of {record['steps']}, "
        f"{_count(record['processes'], 'process', 'es')} here, since {record['started']}, in "
        f"{record['folder']}"
    )


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"
