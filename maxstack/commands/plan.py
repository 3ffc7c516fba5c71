"""`maxstack plan CONFIG`: does it fit, what does it move, how fast can it be; on hardware that need
not be here."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxstack import cli

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.plan.topology import Topology
    from maxstack.schema.config import Config

RANKED, FINALISTS = 10, 3


def main(argv: Sequence[str]) -> int:
    """Print the plan; 0 where the run fits or its device's memory is not known, 1 where it does not
    fit."""
    args = _arguments(argv)
    from maxstack import config
    from maxstack.plan import cost

    asked = cost.request(args)
    cfg = configured(args)
    _check(args)
    where = topology_of(args, cfg)
    from maxstack.plan import report

    cost.check_chip(asked, where)
    chosen, found = _chosen(args, cfg, where)
    print(report.text(found, [*cost.lines(found, asked)] if asked else []))
    if args.search or args.batch:
        out = args.out or Path("planned.yml")
        out.write_text(config.dump(chosen))
        print(f"written to {out}: maxstack train {out}")
    if args.save_executable:
        size = _save(chosen, where, args.save_executable)
        print(
            f"compiled step, {size / 2**20:.1f} MiB: maxstack train ... "
            f"run.executable={args.save_executable}"
        )
    if args.json:
        args.json.write_text(json.dumps(found.json() | cost.json(found, asked), indent=1) + "\n")
    return 1 if found.fits is False else 0


def _check(args: argparse.Namespace) -> None:
    """ConfigError for options that do not go together, and for files that could not be written in
    the end."""
    from maxstack.config import ConfigError

    if args.search and args.batch:
        raise ConfigError(
            "--search and --batch max exclude each other; search tries batch sizes too"
        )
    if args.finalists is not None and (not args.search or args.finalists < 1):
        raise ConfigError(
            f"--finalists {args.finalists}: how many candidates --search compiles; give "
            "both, and a number of 1 or more"
        )
    if args.out and not (args.search or args.batch):
        raise ConfigError(
            f"--out {args.out}: only --search and --batch max write a configuration; "
            "--json writes the figures"
        )
    for option, path in (
        ("--json", args.json),
        ("--out", args.out),
        ("--save-executable", args.save_executable),
    ):
        check_writable(option, path)


def check_writable(option: str, path: Path | None) -> None:
    """ConfigError for an option's file that could not be written."""
    from maxstack.config import ConfigError

    if path and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        wrong = "is a folder" if path.is_dir() else "cannot be written there"
        raise ConfigError(f"{option} {path}: {wrong}; give a file in a folder that exists")


def takes_topology(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that looks at a configuration on hardware that may not be here."""
    cli.takes_config(parser)
    parser.add_argument(
        "--topology",
        default="here",
        help="v5p:8x8x16, v5e:16x16*4 (4 slices), tpu7x:8x16x16, h100:32x8 (hosts x GPUs), or here",
    )


def configured(args: argparse.Namespace) -> "Config":
    """The configuration; virtual devices are of this machine alone."""
    from maxstack.load import load

    return load(
        args.config,
        [*args.overrides, *([] if args.topology == "here" else ["run.virtual_devices=null"])],
    )


def topology_of(args: argparse.Namespace, cfg: "Config") -> "Topology":
    """The hardware that is asked for. From here on jax may be imported."""
    from maxstack.hardware import devices
    from maxstack.plan import topology

    devices.environment(cfg.run.virtual_devices)
    return topology.parse(args.topology)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="maxstack plan",
        description="Compile the step that a run would take, for hardware that need not be "
        "here, and "
        "say whether it fits, what "
        "it moves and how fast it can be. Needs nothing but a CPU, and for other "
        "hardware the extra plan-tpu or plan-cuda.",
        epilog="example: maxstack plan synthetic model=llama-3.1-8b mesh=v5e-256 "
        "train.batch_size=256 --topology v5e:16x16 --tokens 15T --mfu 0.4",
    )
    takes_topology(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure to FILE")
    parser.add_argument(
        "--tokens",
        metavar="N",
        help="also say days and chip-hours for N tokens, at the bound on speed; K, M, B and T "
        "count: 15T",
    )
    parser.add_argument(
        "--mfu",
        metavar="SHARE",
        help="with --tokens, also at this MFU, causal as training measures it, such as 0.4",
    )
    parser.add_argument(
        "--price",
        metavar="PRICE",
        help="with --tokens, also the cost, where a chip-hour has this price in any currency",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="let a TPU's compiler spend all its effort, as training does: some minutes",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes, remat policies and batch sizes, and write the fastest that fits",
    )
    parser.add_argument(
        "--finalists",
        type=int,
        metavar="N",
        help="how many candidates of a search are compiled (default: 3)",
    )
    parser.add_argument(
        "--batch", choices=["max"], help="find the largest train.batch_size that fits"
    )
    parser.add_argument(
        "--save-executable",
        metavar="FILE",
        type=Path,
        help="write the compiled step, for run.executable of `maxstack train`",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where search and batch write (default: planned.yml)",
    )
    return parser.parse_intermixed_args(argv)


def _chosen(args: argparse.Namespace, cfg: "Config", where: "Topology") -> tuple["Config", "Plan"]:
    """The configuration that the arguments ask for, and its plan."""
    from maxstack.plan import search

    def make(each: "Config") -> "Plan":
        return _apart(args.config, each, where, exact=args.exact)

    if args.batch:
        return search.largest_batch(cfg, where, make)
    if not args.search:
        print(f"compiling the step for {where.name}", file=sys.stderr, flush=True)
        return cfg, make(cfg)
    ranked = search.search(cfg, where, make, args.finalists or FINALISTS)
    for candidate, plan in ranked[:RANKED]:
        given = "  (as given)" if candidate.cfg == cfg else ""
        print(
            f"{plan.tokens_per_second:>14,.0f} tokens/s  {plan.needed / 2**30:6.2f} GiB  "
            f"{candidate.label}{given}"
        )
    return ranked[0][0].cfg, ranked[0][1]


def _apart(name: str, cfg: "Config", where: "Topology", *, exact: bool) -> "Plan":
    """`_make` in a process of its own, since a compiler may abort, and keeps memory; once more with
    all effort where it does abort."""
    import concurrent.futures
    import multiprocessing

    from maxstack.config import ConfigError
    from maxstack.plan import step

    step.check_mesh(cfg, where)
    if where.name == "here":  # accelerators belong to one process
        return _make(name, cfg, where, exact)
    for effort in dict.fromkeys((exact, True)):
        try:
            with concurrent.futures.ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn")
            ) as pool:
                return pool.submit(_make, name, cfg, where, effort).result()
        except concurrent.futures.process.BrokenProcessPool:
            print(
                "the compiler ended without a "
                f"word{'' if effort else '; once more, with all its effort'}",
                file=sys.stderr,
                flush=True,
            )
    raise ConfigError(
        f"--topology {where.name}: the compiler aborts on this program, which is a fault "
        "of its own (or of too little memory on this "
        "machine); try another mesh or remat policy"
    )


def _make(name: str, cfg: "Config", where: "Topology", exact: bool) -> "Plan":
    from maxstack.plan import report, step

    with tempfile.TemporaryDirectory() as folder:
        return report.read(
            name,
            cfg,
            where,
            step.compile_step(cfg, where, exact=exact, dump=Path(folder)),
            Path(folder),
        )


def _save(cfg: "Config", where: "Topology", path: Path) -> int:
    """The step compiled with all effort, in a file -> its bytes."""
    from maxstack.config import ConfigError
    from maxstack.plan import executable, step

    made = step.compile_step(cfg, where, exact=True)
    if made.compiled is None:
        raise ConfigError(
            f"--save-executable {path}: the step does not fit {where.name}, so there is "
            "nothing to save"
        )
    return executable.save(made.run, made.compiled, path)
