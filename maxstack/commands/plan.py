"""`maxstack plan CONFIG`: whether a run fits its hardware, what it moves and how fast it can be.

The hardware need not be here."""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxstack.command import (
    CONFIG,
    JSON,
    OVERRIDES,
    argument,
    check_writable,
    command,
    positive,
    write,
    write_json,
)
from maxstack.errors import ConfigError
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.plan.topology import Topology
    from maxstack.rollouts.capacity import Lengths
    from maxstack.schema.config import Config

RANKED, FINALISTS = 10, 3
TRAINING = (
    "tokens", "mfu", "price", "exact", "search", "finalists", "batch", "save_executable", "out"
)  # fmt: skip
NOT_ROLLOUTS = {
    "search": "ranks steps alone, and meshes are fast for a step that are slow for the engine of a "
    "run with rollouts: plan those that you think of one by one",
    "batch": "train.batch_size sets the room of a rollout's samples, so a larger one makes other "
    "samples: set train.accumulate by hand",
    "tokens": "a run with rollouts counts its samples: the plan says the hours of train.steps",
}
"""Options that say nothing of a run with rollouts, and why."""
TOPOLOGY = argument(
    "--topology",
    default="here",
    help="v5p:8x8x16, v5e:16x16*4 (4 slices), tpu7x:8x16x16, h100:32x8 (hosts x GPUs), or here",
)


@command(
    "plan",
    "Compile the step that a run would take, for hardware that need not be here, and say whether "
    "it fits, what it moves and how fast it can be. Needs nothing but a CPU, and for other "
    "hardware the extra plan-tpu or plan-cuda.",
    "plan synthetic model=llama-3.1-8b mesh=v5e-256 train.batch_size=256 --topology v5e:16x16 "
    "--tokens 15T --mfu 0.4",
    CONFIG,
    OVERRIDES,
    TOPOLOGY,
    JSON,
    argument(
        "--tokens",
        metavar="N",
        help="also say days and chip-hours for N tokens, at the bound on speed; K, M, B and T "
        "count: 15T",
    ),
    argument(
        "--mfu",
        metavar="SHARE",
        help="with --tokens, also at this MFU, causal as training measures it, such as 0.4",
    ),
    argument(
        "--price",
        metavar="PRICE",
        help="with --tokens, also the cost, where a chip-hour has this price in any currency",
    ),
    argument(
        "--exact",
        action="store_true",
        help="let a TPU's compiler spend all its effort, as training does: some minutes",
    ),
    argument(
        "--search",
        action="store_true",
        help="try meshes, remat policies and batch sizes, and write the fastest that fits",
    ),
    argument(
        "--finalists",
        type=int,
        metavar="N",
        help=f"how many candidates of a search are compiled (default: {FINALISTS})",
    ),
    argument("--batch", choices=["max"], help="find the largest train.batch_size that fits"),
    argument(
        "--save-executable",
        metavar="FILE",
        help="write the compiled step, for run.executable of `maxstack train`",
    ),
    argument(
        "--serve",
        action="store_true",
        help="say how many requests `maxstack serve` has room for, and the most tokens/s; CONFIG "
        "may be a model's folder too. Compiles nothing",
    ),
    argument(
        "--length",
        type=positive,
        metavar="N",
        help="tokens of a prompt and answer: with --serve, and of a run with rollouts (the most)",
    ),
    argument(
        "--prompt",
        type=positive,
        metavar="N",
        help="those of the prompt (half of them; of a rollout what rollout.max_tokens leave)",
    ),
    argument(
        "--out",
        metavar="FILE",
        help="where search and batch write (default: planned.yml)",
    ),
)
def main(args: Namespace) -> int:
    """Print the plan; 0 where the run fits or its device's memory is not known, 1 where it does not
    fit."""
    from maxstack import config
    from maxstack.plan import cost

    asked = cost.request(args)
    if args.serve:
        return _serve(args)
    cfg = configured(args)
    _check_options(args, cfg)
    cfg = _largest(cfg)
    topology = topology_of(args, cfg)
    from maxstack.plan import report

    cost.check_chip(asked, topology)
    try:
        cfg, plan = _chosen(args, cfg, topology)
    except (MemoryError, OverflowError) as error:
        raise ConfigError(
            f"the step is too large to be planned on this machine: {error}; give a smaller "
            "data.seq_len, train.batch_size or model"
        ) from error
    print(report.text(plan, [*cost.lines(plan, asked)] if asked else []))
    if args.search or args.batch:
        out = args.out or "planned.yml"
        write("--out", out, config.dump(cfg))
        print(f"written to {out}: maxstack train {out}")
    if args.save_executable:
        size = _save(cfg, topology, args.save_executable)
        print(
            f"compiled step, {size / 2**20:.1f} MiB: maxstack train ... "
            f"run.executable={args.save_executable}"
        )
    write_json(args.json, plan.json() | cost.json(plan, asked))
    return 1 if plan.fits is False else 0


def _check_options(args: Namespace, cfg: "Config | None" = None) -> None:
    """ConfigError for options that do not go together, or not with a run of `cfg`, and for files
    that could not be written in the end."""
    rollouts = bool(cfg and cfg.rollout)
    for option in ("length", "prompt"):
        if not args.serve and not rollouts and getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} {getattr(args, option)}: is of requests; give --serve too"
            )
    for option, why in NOT_ROLLOUTS.items():
        if rollouts and getattr(args, option):
            raise ConfigError(f"--{option}: {why}; leave it out, or rollout")
    alone = [option for option in TRAINING if getattr(args, option) not in (None, False)]
    if args.serve and alone:
        option = alone[0].replace("_", "-")
        raise ConfigError(f"--{option}: is about training; leave it out, or --serve")
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
    for option in ("search", "batch", "save_executable"):
        if cfg and cfg.train.stages and getattr(args, option):
            raise ConfigError(
                f"--{option.replace('_', '-')}: is of one shape of batches, and train.stages has "
                "several; leave one of them out"
            )
    for option in ("json", "out", "save_executable"):
        check_writable(f"--{option.replace('_', '-')}", getattr(args, option))


def configured(args: Namespace) -> "Config":
    """The configuration, without virtual devices where the topology is not this machine."""
    from maxstack.load import load

    elsewhere = [] if args.topology == "here" else ["run.virtual_devices=null"]
    return load(args.config, [*args.overrides, *elsewhere])


def _largest(cfg: "Config") -> "Config":
    """The configuration of the stage with the most tokens in a step, where there are stages."""
    if not cfg.train.stages:
        return cfg
    shapes = cfg.stages.shapes
    rows, length = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    print(
        f"train.stages: steps of {len(shapes)} shapes are compiled, "
        f"{', '.join(f'{rows:,} x {length:,}' for rows, length in shapes)}; this is the plan of "
        f"{rows:,} x {length:,}",
        flush=True,
    )
    return cfg.of_shape(rows, length)


def topology_of(args: Namespace, cfg: "Config") -> "Topology":
    """The hardware that --topology names. From here on jax may be imported."""
    from maxstack.hardware import devices
    from maxstack.plan import topology

    devices.environment(cfg.run.virtual_devices)
    return topology.parse(args.topology)


def _serve(args: Namespace) -> int:
    """Print the capacity of an engine; 0, since one that has room for nothing is refused."""
    _check_options(args)
    from maxstack.inference import capacity
    from maxstack.inference.programs import inference_config
    from maxstack.plan import topology

    where = topology.parse(args.topology)
    longest = capacity.read_config(args.config, args.overrides, where.size)[1]
    lengths = capacity.lengths_of(args.length, args.prompt, longest)

    def configured(more: Sequence[str]) -> "Config":
        return inference_config(
            capacity.read_config(args.config, [*args.overrides, *more], where.size)[0]
        )

    plan = capacity.capacity(args.config, configured, where, lengths, args.prompt)
    print(capacity.text(plan))
    write_json(args.json, plan.json())
    return 0


def _chosen(args: Namespace, cfg: "Config", topology: "Topology") -> tuple["Config", "Plan"]:
    """The configuration that the arguments ask for, and its plan."""
    from maxstack.plan import search

    lengths = None
    if cfg.rollout:
        from maxstack.rollouts.capacity import Lengths

        lengths = Lengths.of(cfg, args.length, args.prompt)

    def make(each: "Config") -> "Plan":
        return _apart(args.config, each, topology, exact=args.exact, lengths=lengths)

    if args.batch:
        return search.largest_batch(cfg, topology, make)
    if not args.search:
        print(f"compiling the step for {topology.name}", file=sys.stderr, flush=True)
        return cfg, make(cfg)
    ranked = search.search(cfg, topology, make, args.finalists or FINALISTS)
    rows = []
    for candidate, plan in ranked[:RANKED]:
        speed, size = f"{plan.tokens_per_second:,.0f} tokens/s", f"{plan.needed / 2**30:.2f} GiB"
        rows.append((speed, size, candidate.label, "(as given)" if candidate.cfg == cfg else ""))
    print(table("rrll", rows))
    return ranked[0][0].cfg, ranked[0][1]


def _apart(
    name: str,
    cfg: "Config",
    topology: "Topology",
    *,
    exact: bool,
    lengths: "Lengths | None" = None,
) -> "Plan":
    """`_make` in a process of its own, since a compiler may abort, and keeps memory; once more with
    all effort where it aborts."""
    import concurrent.futures
    import multiprocessing

    from maxstack.plan import step

    step.check_mesh(cfg, topology)
    if topology.name == "here":  # accelerators belong to one process
        return _make(name, cfg, topology, exact, lengths)
    spawn = multiprocessing.get_context("spawn")
    for effort in dict.fromkeys((exact, True)):
        try:
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                return pool.submit(_make, name, cfg, topology, effort, lengths).result()
        except concurrent.futures.process.BrokenProcessPool:
            again = "" if effort else "; once more, with all its effort"
            print(f"the compiler ended without a word{again}", file=sys.stderr, flush=True)
    raise ConfigError(
        f"--topology {topology.name}: the compiler aborts on this program, which is a fault "
        "of its own (or of too little memory on this machine); try another mesh or remat policy"
    )


def _make(
    name: str, cfg: "Config", topology: "Topology", exact: bool, lengths: "Lengths | None"
) -> "Plan":
    from maxstack.plan import report, step

    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        compiled = step.compile_step(cfg, topology, exact=exact, dump=dump)
        plan = report.read(name, cfg, topology, compiled, dump)
    if lengths is None:
        return plan
    from maxstack.rollouts.capacity import with_rollouts

    return with_rollouts(plan, compiled.run, topology, lengths)


def _save(cfg: "Config", topology: "Topology", path: str) -> int:
    """Write the step, compiled with all effort, to a file; its bytes."""
    from maxstack.hardware import compiling
    from maxstack.plan import executable, step

    with compiling.afresh():
        compiled = step.compile_step(cfg, topology, exact=True)
    if compiled.compiled is None:
        raise ConfigError(
            f"--save-executable {path}: the step does not fit {topology.name}, so there is "
            "nothing to save"
        )
    return executable.save(compiled.run, compiled.compiled, path)
