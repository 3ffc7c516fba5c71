"""`maxstack kernels CONFIG`: which kernel serves each op of a run, and why each other one does not;
on hardware that need not be here."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.commands.plan import check_writable, configured, takes_topology, topology_of

if TYPE_CHECKING:
    from maxstack.kernels.backends import Choice


def main(argv: Sequence[str]) -> int:
    """Print the choices, and write them where --json says."""
    parser = argparse.ArgumentParser(
        prog="maxstack kernels",
        description="Trace the step that a run would take and say which kernel serves each op, and "
        "why each other one does "
        "not. For other hardware than this machine's it needs the extra plan-tpu or plan-cuda.",
        epilog="example: maxstack kernels synthetic model=gpt-oss-20b mesh=v5p-64 "
        "train.batch_size=64 --topology v5p:4x4x4",
    )
    takes_topology(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the choices to FILE too")
    args = parser.parse_intermixed_args(argv)
    from maxstack.plan import step

    check_writable("--json", args.json)
    cfg = configured(args)
    where = topology_of(args, cfg)
    step.check_mesh(cfg, where)
    from maxstack import sharding
    from maxstack.run import assemble

    run = assemble(cfg, sharding.make_mesh(cfg.mesh, where.devices()))
    choices = run.kernels
    run.check_flags()
    print("\n".join(lines(choices)))
    if args.json:
        args.json.write_text(json.dumps([as_json(choice) for choice in choices], indent=1) + "\n")
    return 0


def lines(choices: "Sequence[Choice]") -> Iterator[str]:
    """A paragraph for each choice."""
    from maxstack.kernels.backends import describe

    for choice in choices:
        sizes = ", ".join(f"{name}={size}" for name, size in (choice.blocks or {}).items())
        yield f"{choice.op} on {choice.case.device.kind}: {describe(choice.case)}"
        yield from (f"  for {', '.join(choice.parts)}" for _ in choice.parts[:1])
        yield (
            f"  {choice.backend:<11} {'chosen' if choice.asked == 'auto' else 'pinned'}"
            f"{f'; tuned blocks {sizes}' if sizes else ''}"
        )
        yield from (f"  {name:<11} no: {reason}" for name, reason in choice.reasons.items())
        yield ""


def as_json(choice: "Choice") -> dict[str, Any]:
    """A choice as plain data."""
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
