"""`maxstack tune CONFIG`: measure the kernels that a run could use on this device, and keep their
best block sizes."""

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tqdm

from maxstack import cli

if TYPE_CHECKING:
    from maxstack.kernels.backends import Backend, Choice
    from maxstack.schema.config import Config

ROUNDS = 5
LEAVES_OUT = ("reference",)
"""It defines the values, and is never chosen for its speed."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A backend with some block sizes, on one case."""

    backend: str
    blocks: dict[str, int]
    seconds: float = float("inf")
    """Of the fastest round, forward and backward."""
    failed: str = ""
    wrong: str = ""


def main(argv: Sequence[str]) -> int:
    """Measure, print tables and keep the best; 1 where a backend gave wrong values."""
    parser = argparse.ArgumentParser(
        prog="maxstack tune",
        description="Measure, on the device at hand and at the shapes of a run, every kernel that "
        "could serve it with every "
        "block size worth trying, forward and backward; values are checked against the "
        "reference first. The best sizes go into a table that later "
        "runs read.",
        epilog="example: maxstack tune synthetic model=llama-3.2-1b train.batch_size=8 --ops "
        "attention",
    )
    cli.takes_config(parser)
    parser.add_argument(
        "--ops", metavar="A,B", help="only these ops (default: all that the run uses)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help=f"how often each is timed, in turn; the fastest counts (default: {ROUNDS})",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the table (default: run.tuned)")
    args = parser.parse_intermixed_args(argv)
    from maxstack.config import ConfigError
    from maxstack.hardware import devices
    from maxstack.load import load

    cfg = load(args.config, args.overrides)
    out = args.out or (Path(cfg.run.tuned).expanduser() if cfg.run.tuned else None)
    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds}: must be 1 or more")
    if out is None:
        raise ConfigError(
            "run.tuned: is null, so there is no table to write; set it, or give --out FILE"
        )
    devices.environment(cfg.run.virtual_devices)
    from maxstack.kernels import tuning

    tuning.check_writable(out)
    try:
        return _tune(cfg, args.ops, args.rounds, out)
    except KeyboardInterrupt:
        print(f"interrupted; what was finished is in {out}", file=sys.stderr, flush=True)
        os._exit(130)  # jax may crash when Python ends while its threads compute


def _tune(cfg: "Config", ops: str | None, rounds: int, out: Path) -> int:
    from maxstack.kernels import tuning

    any_wrong = False
    for choice in _choices(cfg, ops):
        print(f"measuring {choice}", file=sys.stderr, flush=True)
        results = measured(choice, rounds)
        print("\n".join(report(choice, results)), flush=True)
        tuning.add(out, best(choice, results))
        any_wrong |= any(one.wrong for one in results)
    print(f"written to {out}")
    return 1 if any_wrong else 0


def _choices(cfg: "Config", ops: str | None) -> "list[Choice]":
    from maxstack import startup
    from maxstack.config import ConfigError
    from maxstack.kernels.examples import OPS
    from maxstack.run import assemble

    every = assemble(cfg, startup.make_mesh(cfg)).kernels
    found = [
        choice for choice in every if choice.op in OPS and not getattr(choice.case, "ring", False)
    ]
    if len(found) < len(every):
        print(
            f"not measured: {', '.join(str(choice) for choice in every if choice not in found)}",
            file=sys.stderr,
        )
    if ops is None:
        return found
    have = sorted({choice.op for choice in found})
    if unknown := [name for name in ops.split(",") if name not in have]:
        raise ConfigError(
            f"--ops {ops}: this run has nothing to tune named {', '.join(unknown)}; it "
            f"has {', '.join(have)}"
        )
    return [choice for choice in found if choice.op in ops.split(",")]


def measured(choice: "Choice", rounds: int) -> list[Measured]:
    """Every backend and size for one case: first their values on a small one like it, then their
    times, in rounds in which all take turns."""
    from maxstack.kernels import measure
    from maxstack.kernels.examples import OPS

    op, example, smaller = OPS[choice.op]
    small, whole = example(smaller(choice.case)), example(choice.case)
    results: list[Measured] = []
    runs: dict[int, tuple[Any, ...]] = {}
    for backend, blocks in tqdm.tqdm(
        list(_tries(op.backends, choice.case)),
        desc=f"{choice.op}: checking",
        unit=" kernels",
        disable=None,
    ):
        one = Measured(backend.name, blocks)
        try:
            off, most = (
                measure.deviation(op["reference"], backend, blocks or None, small),
                measure.TOLERANCE[choice.case.dtype],
            )
            if off > most:
                one = dataclasses.replace(
                    one,
                    wrong=f"differs from the reference by {off:.2g} of the largest value, more "
                    f"than {most}",
                )
            else:
                runs[len(results)] = measure.call(backend, blocks or None, whole)
        except (
            Exception
        ) as error:  # what a compiler or the memory refuses is no candidate, and the table says so
            one = dataclasses.replace(
                one, failed=str(error).strip().partition("\n")[0][:100] or type(error).__name__
            )
        results.append(one)
    for _ in tqdm.trange(rounds, desc=f"{choice.op}: timing", unit=" rounds", disable=None):
        for place, run in runs.items():
            results[place] = dataclasses.replace(
                results[place], seconds=min(results[place].seconds, measure.seconds(run[0], run[1]))
            )
    return results


def _tries(backends: "Sequence[Backend]", case: Any) -> "Iterator[tuple[Backend, dict[str, int]]]":
    for backend in backends:
        if backend.name not in LEAVES_OUT and backend.supports(case) is None:
            for blocks in backend.candidates(case) or [{}]:
                yield backend, blocks


def best(choice: "Choice", results: list[Measured]) -> list[dict[str, Any]]:
    """A row of the table for the fastest sizes of each backend that has some, beside its default's
    time."""
    found = []
    for name in dict.fromkeys(one.backend for one in results if one.blocks):
        own = [one for one in results if one.backend == name]
        fastest = min(own, key=lambda one: one.seconds)
        if fastest.seconds < float("inf"):
            row = {
                "device": choice.case.device.kind,
                "op": choice.op,
                "backend": name,
                "shape": dict(choice.case.shape_class),
            }
            row |= {
                "blocks": fastest.blocks,
                "microseconds": _microseconds(fastest),
                "default_microseconds": _microseconds(own[0]),
            }
            found.append(row | {"date": datetime.date.today().isoformat()})
    return found


def _microseconds(one: Measured) -> float | None:
    return None if one.failed or one.wrong else round(one.seconds * 1e6, 1)


def report(choice: "Choice", results: list[Measured]) -> Iterator[str]:
    """The case, and a line for each kernel, the fastest first."""
    from maxstack.kernels.backends import describe

    defaults = {one.backend: one for one in reversed(results)}
    yield f"{choice.op} on {choice.case.device.kind}: {describe(choice.case)}"
    for one in sorted(results, key=lambda one: one.seconds):
        sizes = " ".join(f"{name}={size}" for name, size in one.blocks.items())
        told = (
            one.wrong
            and f"WRONG: {one.wrong}"
            or one.failed
            and f"failed: {one.failed}"
            or f"{one.seconds * 1e6:,.0f} us"
        )
        yield (
            f"  {one.backend:<11} {sizes:<40} "
            f"{told}{'  (default)' if one.blocks and one is defaults[one.backend] else ''}"
        )
    fastest = min(results, key=lambda one: one.seconds, default=None)
    if (
        fastest
        and fastest.seconds < float("inf")
        and fastest.backend != choice.backend
        and choice.backend not in LEAVES_OUT
    ):
        yield (
            f"  the run takes {choice.backend}; {fastest.backend} was faster here, and can "
            "be pinned"
        )
    yield ""
