"""`maxstack kernels CONFIG`: which kernel serves each op of a run, and why each other one does not; on hardware that need not be here."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import cli

if TYPE_CHECKING:
    from maxstack.kernels.backends import Choice


def main(argv: Sequence[str]) -> int:
    """Print the choices, and write them where --json says."""
    parser = argparse.ArgumentParser(
        prog="maxstack kernels", description="Trace the step that a run would take and say which kernel serves each op, and why each other one does "
        "not. For other hardware than this machine's it needs the extra plan-tpu or plan-cuda.",
        epilog="example: maxstack kernels synthetic model=gpt-oss-20b mesh=v5p-64 train.batch_size=64 --topology v5p:4x4x4")
    cli.takes_config(parser)
    parser.add_argument("--topology", default="here", help="v5p:8x8x16, v5e:16x16*4 (4 slices), tpu7x:8x16x16, h100:32x8 (hosts x GPUs), or here")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the choices to FILE too")
    args = parser.parse_intermixed_args(argv)
    from maxstack import config, devices
    from maxstack.config import ConfigError
    from maxstack.plan import step, topology
    from maxstack.schema import Config

    if args.json and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK | os.X_OK)):
        wrong = "is a folder" if args.json.is_dir() else "cannot be written there"
        raise ConfigError(f"--json {args.json}: {wrong}; give a file in a folder that exists")
    cfg = config.load(Config, args.config, [*args.overrides, *([] if args.topology == "here" else ["run.virtual_devices=null"])])
    devices.environment(cfg.run.virtual_devices)
    where = topology.parse(args.topology)
    step.check(cfg, where)
    from maxstack import sharding
    from maxstack.run import assemble

    choices = assemble(cfg, sharding.make_mesh(cfg.mesh, where.devices())).traced[1]
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
        yield f"  {choice.backend:<11} {'chosen' if choice.asked == 'auto' else 'pinned'}; {f'tuned blocks {sizes}' if sizes else 'default blocks'}"
        yield from (f"  {name:<11} no: {reason}" for name, reason in choice.reasons.items())
        yield ""


def as_json(choice: "Choice") -> dict[str, Any]:
    """A choice as plain data."""
    from maxstack.kernels.backends import describe

    return {"op": choice.op, "device": choice.case.device.kind, "case": describe(choice.case), "asked": choice.asked, "backend": choice.backend,
            "blocks": choice.blocks, "reasons": choice.reasons}
