"""`maxstack plan CONFIG`: check whether a run fits its hardware, what it sends and how fast it can
be, without the hardware."""

import sys
from argparse import Namespace
from collections.abc import Sequence
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
from maxstack.library import largest_stage, load_for, plan_apart, topology_of
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.plan.topology import Topology
    from maxstack.schema.config import Config

RANKED = 10
"""Rows of the table of a search."""
FINALISTS = 3
TRAINING = (
    "tokens", "mfu", "price", "exact", "search", "finalists", "batch", "save_executable", "out"
)  # fmt: skip
NOT_ROLLOUTS = {
    "search": "ranks training steps only, and a mesh that is fast for them may be slow for the "
    "engine of a run with rollouts; plan candidate meshes one by one",
    "batch": "train.batch_size limits the length of a rollout's samples, so a larger one changes "
    "them; set train.accumulate by hand",
    "tokens": "does not apply to a run with rollouts; the plan gives the hours of train.steps",
}
"""Options without meaning for a run with rollouts, and why."""
TOPOLOGY = argument(
    "--topology",
    default="here",
    help="target hardware, such as v5p:8x8x16, v5e:16x16*4 (4 slices), tpu7x:8x16x16 or h100:32x8 "
    "(hosts x GPUs per host); here: this machine (default: here)",
)


@command(
    "plan",
    "Compile a run's step for the target hardware, and show whether it fits in memory, how much "
    "traffic "
    "each link carries, and a bound on its speed. Needs only a CPU; for TPUs and GPUs, install the "
    "extra plan-tpu or plan-cuda.",
    "plan synthetic model=llama-3.1-8b mesh=v5e-256 train.batch_size=256 --topology v5e:16x16 "
    "--tokens 15T --mfu 0.4",
    CONFIG,
    OVERRIDES,
    TOPOLOGY,
    JSON,
    argument(
        "--tokens",
        metavar="N",
        help="also show the days and chip-hours of training on N tokens at the speed bound; N may "
        "end in K, M, B or T, such as 15T",
    ),
    argument(
        "--mfu",
        metavar="SHARE",
        help="with --tokens: show them at this MFU too, such as 0.4 (causal, as in training)",
    ),
    argument(
        "--price",
        metavar="PRICE",
        help="with --tokens: show the cost too, at this price per chip-hour, in any currency",
    ),
    argument(
        "--exact",
        action="store_true",
        help="compile for TPUs with full optimization, as training does; takes minutes",
    ),
    argument(
        "--search",
        action="store_true",
        help="search meshes, remat policies and batch sizes for the fastest configuration that "
        "fits, and write it to --out",
    ),
    argument(
        "--finalists",
        type=int,
        metavar="N",
        help=f"with --search: number of candidates to compile (default: {FINALISTS})",
    ),
    argument(
        "--batch",
        choices=["max"],
        help="find the largest train.batch_size that fits, and write it to --out",
    ),
    argument(
        "--save-executable",
        metavar="FILE",
        help="write the compiled step to FILE, for run.executable of `maxstack train`",
    ),
    argument(
        "--serve",
        action="store_true",
        help="show how many requests `maxstack serve` has room for, and a bound on tokens/s, "
        "without compiling; CONFIG may also be a model folder",
    ),
    argument(
        "--length",
        type=positive,
        metavar="N",
        help="with --serve or rollouts: tokens of prompt and answer together (default: the "
        "maximum)",
    ),
    argument(
        "--prompt",
        type=positive,
        metavar="N",
        help="with --serve or rollouts: tokens of the prompt (default: half; in a rollout, what "
        "rollout.max_tokens leaves)",
    ),
    argument(
        "--out",
        metavar="FILE",
        help="file that --search and --batch write (default: planned.yml)",
    ),
)
def main(args: Namespace) -> int:
    """Print the plan; return 0 if the run fits or the device's memory is unknown, otherwise 1."""
    from maxstack import config
    from maxstack.plan import cost

    asked = cost.request(args)
    if args.serve:
        return _serve(args)
    cfg = load_for(args.topology, args.config, args.overrides)
    _check_options(args, cfg)
    cfg = largest_stage(cfg)
    topology = topology_of(args.topology, cfg)
    from maxstack.plan import report

    cost.check_chip(asked, topology)
    try:
        cfg, plan = _chosen(args, cfg, topology)
    except (MemoryError, OverflowError) as error:
        raise ConfigError(
            f"this machine cannot plan a step of that size: {error}; reduce data.seq_len, "
            "train.batch_size or the model"
        ) from error
    print(report.text(plan, [*cost.lines(plan, asked)] if asked else []))
    if args.search or args.batch:
        out = args.out or "planned.yml"
        write("--out", out, config.dump(cfg))
        print(f"wrote {out}; to train it: maxstack train {out}")
    if args.save_executable:
        size = _save(cfg, topology, args.save_executable)
        print(
            f"wrote the compiled step, {size / 2**20:.1f} MiB; to use it: maxstack train ... "
            f"run.executable={args.save_executable}"
        )
    write_json(args.json, plan.json() | cost.json(plan, asked))
    return 1 if plan.fits is False else 0


def _check_options(args: Namespace, cfg: "Config | None" = None) -> None:
    """ConfigError for options that conflict with each other or with `cfg`, and for files that
    cannot be written."""
    rollouts = bool(cfg and cfg.rollout)
    for option in ("length", "prompt"):
        if not args.serve and not rollouts and getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} {getattr(args, option)}: needs --serve or a run with rollouts"
            )
    for option, why in NOT_ROLLOUTS.items():
        if rollouts and getattr(args, option):
            raise ConfigError(f"--{option}: {why}")
    alone = [option for option in TRAINING if getattr(args, option) not in (None, False)]
    if args.serve and alone:
        option = alone[0].replace("_", "-")
        raise ConfigError(f"--{option}: does not work with --serve; leave one of them out")
    if args.search and args.batch:
        raise ConfigError("--search and --batch max: leave one out; --search tries batch sizes too")
    if args.finalists is not None and (not args.search or args.finalists < 1):
        raise ConfigError(f"--finalists {args.finalists}: needs --search and a number of 1 or more")
    if args.out and not (args.search or args.batch):
        raise ConfigError(
            f"--out {args.out}: needs --search or --batch max; to write the figures, use --json"
        )
    for option in ("search", "batch", "save_executable"):
        if cfg and cfg.train.stages and getattr(args, option):
            raise ConfigError(
                f"--{option.replace('_', '-')}: needs one batch shape, and train.stages has "
                "several; leave one of them out"
            )
    for option in ("json", "out", "save_executable"):
        check_writable(f"--{option.replace('_', '-')}", getattr(args, option))


def _serve(args: Namespace) -> int:
    """Print the capacity of an engine; return 0, since an engine without room is an error."""
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
    """Return the configuration that the arguments ask for, and its plan."""
    from maxstack.plan import search

    lengths = None
    if cfg.rollout:
        from maxstack.rollouts.capacity import Lengths

        lengths = Lengths.of(cfg, args.length, args.prompt)

    def make(each: "Config") -> "Plan":
        return plan_apart(args.config, each, topology, args.exact, lengths)

    if args.batch:
        return search.largest_batch(cfg, topology, make)
    if not args.search:
        print(f"compiling the step for {topology.name}", file=sys.stderr, flush=True)
        return cfg, make(cfg)
    ranked = search.search(cfg, topology, make, args.finalists or FINALISTS)
    rows = []
    for candidate, plan in ranked[:RANKED]:
        speed = f"{plan.tokens_per_second:,.0f} tokens/s"
        note = "(as given)" if candidate.cfg == cfg else ""
        rows.append((speed, f"{plan.needed / 2**30:.2f} GiB", candidate.label, note))
    print(table("rrll", rows))
    return ranked[0][0].cfg, ranked[0][1]


def _save(cfg: "Config", topology: "Topology", path: str) -> int:
    """Write the step, compiled with full optimization, to a file; return its size in bytes."""
    from maxstack.hardware import compiling
    from maxstack.plan import executable, step

    with compiling.without_cache():
        compiled = step.compile_step(cfg, topology, exact=True)
    if compiled.compiled is None:
        raise ConfigError(
            f"--save-executable {path}: the step does not fit {topology.name}; nothing was written"
        )
    return executable.save(compiled.run, compiled.compiled, path)
