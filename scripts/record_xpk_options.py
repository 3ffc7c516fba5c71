"""Writes tests/submit/xpk-options.json: the options, by xpk's own parser, of the xpk commands that
maxstack writes, and the slices and machines with GPUs that it has.

`pip install xpk` into an environment of its own, and run this there. With --check that parser reads
a command line from standard input; the exit code says whether it takes it.

example: maxstack submit synthetic --target xpk --cluster tpu-v5e --dry-run mesh.data=1 mesh.fsdp=64
train.batch_size=64 run.output_dir=/gcs/runs | python scripts/record_xpk_options.py --check
"""

import argparse
import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import arguments

OUT = Path(__file__).resolve().parent.parent / "tests/submit/xpk-options.json"
COMMANDS = "create", "create-pathways", "list", "delete"


def main() -> int:
    """Write the file, or check a command line; returns the exit code."""
    own = arguments.parser(__doc__)
    own.add_argument(
        "--check",
        action="store_true",
        help="parse the command on standard input, and write nothing",
    )
    check = own.parse_args().check
    from xpk.parser.core import set_parser

    parser = argparse.ArgumentParser(prog="xpk")
    set_parser(parser)
    if check:
        parsed = parser.parse_args(shlex.split(sys.stdin.read())[1:])
        print(
            f"xpk {version('xpk')} takes it: workload {parsed.workload} on "
            f"{parsed.tpu_type or parsed.device_type}"
        )
        return 0
    workload = _commands(_commands(parser)["workload"])
    options: dict[str, Any] = {"version": version("xpk"), "devices": _devices()}
    for name in COMMANDS:
        options[name] = [
            _option(action)
            for action in workload[name]._actions
            if action.option_strings and action.dest != "help"
        ]
    OUT.write_text(json.dumps(options, indent=1) + "\n")
    print(f"{OUT}: {', '.join(f'{name}: {len(options[name])} options' for name in COMMANDS)}")
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )


def _devices() -> dict[str, str]:
    """Beginning of a device's name -> its shapes, without those that are another one turned; of
    GPUs the whole name, and no shape."""
    from xpk.core.system_characteristics import UserFacingNameToSystemCharacteristics

    shapes: dict[str, list[str]] = {}
    for name, device in UserFacingNameToSystemCharacteristics.items():
        start, _, shape = name.rpartition("-")
        if device.accelerator_type.name == "GPU":
            shapes[name] = []
        elif shape == "2x2x1" or ("x" in shape and _is_sorted([*map(int, shape.split("x"))])):
            shapes.setdefault(start, []).append(shape)
    return {start: " ".join(found) for start, found in sorted(shapes.items())}


def _is_sorted(sides: list[int]) -> bool:
    return sides == sorted(sides)


def _option(action: argparse.Action) -> dict[str, Any]:
    """An option's names, and the number and choices of its values."""
    return {
        "names": action.option_strings,
        "flag": action.nargs == 0,
        "required": action.required,
        "append": isinstance(action, argparse._AppendAction),
        "choices": list(action.choices) if action.choices else None,
        "type": getattr(action.type, "__name__", None),
    }


if __name__ == "__main__":
    sys.exit(main())
