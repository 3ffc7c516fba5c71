"""`maxstack kernels CONFIG`: show the kernel that serves each op of a run, and why each other one
does not, also for hardware that this machine does not have."""

import argparse
from typing import TYPE_CHECKING, Any

from maxstack.command import (
    CONFIG,
    JSON,
    OVERRIDES,
    argument,
    check_writable,
    command,
    write_json,
)
from maxstack.commands.plan import TOPOLOGY
from maxstack.library import load_for, topology_of
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.kernels.backends import Choice


@command(
    "kernels",
    "Trace a run's step and show which kernel serves each op, and why each other one does not. For "
    "hardware other than this machine's, the extra plan-tpu or plan-cuda must be installed.",
    "kernels synthetic model=gpt-oss-20b mesh=v5p-64 train.batch_size=64 --topology v5p:4x4x4",
    CONFIG,
    OVERRIDES,
    argument(
        "--serve", action="store_true", help="trace the inference step instead of the training step"
    ),
    TOPOLOGY,
    JSON,
)
def main(args: argparse.Namespace) -> None:
    """Print the choices, and write them to --json."""
    check_writable("--json", args.json)
    choices = _of_serving(args) if args.serve else _of_training(args)
    for choice in choices:
        print(text(choice))
    write_json(args.json, [as_json(choice) for choice in choices])


def _of_training(args: argparse.Namespace) -> list["Choice"]:
    from maxstack.hardware import compiling
    from maxstack.plan import step

    cfg = load_for(args.topology, args.config, args.overrides)
    topology = topology_of(args.topology, cfg)
    step.check_mesh(cfg, topology)
    from maxstack import sharding
    from maxstack.run import assemble

    run = assemble(cfg, sharding.make_mesh(cfg.mesh, topology.devices()))
    compiling.check_flags(run.cfg, run.mesh)
    return run.kernels


def _of_serving(args: argparse.Namespace) -> list["Choice"]:
    """Return the choices of the largest inference step."""
    from maxstack.inference import capacity
    from maxstack.plan import topology

    where = topology.parse(args.topology)
    cfg, longest = capacity.read_config(args.config, args.overrides, where.size)
    from maxstack import sharding
    from maxstack.inference.adapters import Adapters
    from maxstack.inference.engine_setup import USUAL, make_limits
    from maxstack.inference.layout import Layout
    from maxstack.inference.programs import Programs, inference_config
    from maxstack.run import assemble

    cfg = inference_config(cfg)
    layout = Layout.of(cfg.decoder, cfg.serve, where.platform)
    mesh = sharding.make_mesh(cfg.mesh, where.devices())
    limits, length = make_limits(cfg, layout, longest or USUAL, None)
    return Programs(assemble(cfg, mesh, trains=False), layout, limits, length, Adapters()).kernels()


def text(choice: "Choice") -> str:
    """Describe a choice: its case, the parts of the model it is for, and a row for each backend."""
    from maxstack.kernels.backends import describe

    verdict = "chosen" if choice.asked == "auto" else "pinned"
    if choice.blocks:
        verdict += "; tuned blocks " + ", ".join(f"{k}={n}" for k, n in choice.blocks.items())
    rows = [(choice.backend, verdict)]
    rows += [(name, f"no: {reason}") for name, reason in choice.reasons.items()]
    head = f"{choice.op} on {choice.case.device.kind}: {describe(choice.case)}\n"
    if choice.parts:
        head += f"  for {', '.join(choice.parts)}\n"
    return f"{head}{table('ll', rows)}\n"


def as_json(choice: "Choice") -> dict[str, Any]:
    """Return a choice as plain data."""
    from maxstack.kernels.backends import describe

    return {
        "op": choice.op,
        "device": choice.case.device.kind,
        "case": describe(choice.case),
        "parts": choice.parts,
        "asked": choice.asked,
        "backend": choice.backend,
        "blocks": choice.blocks,
        "reasons": choice.reasons,
    }
