"""`maxstack tune CONFIG`: benchmark the kernels that can serve a run on this device, and save their
best block sizes."""

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.command import CONFIG, OVERRIDES, argument, command, load_config, positive
from maxstack.errors import ConfigError
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.kernels.backends import Backend, Choice
    from maxstack.schema.config import Config

ROUNDS = 5
REFERENCE = "reference"
"""The backend that defines the values, never chosen for its speed."""


@dataclasses.dataclass
class Measured:
    """Speed of a backend with some block sizes, on one case."""

    backend: str
    blocks: dict[str, int]
    seconds: float = float("inf")
    """Time of the fastest round, forward and backward; infinite where the backend failed."""
    problem: str = ""
    """Why it failed, or how wrong its values are."""
    wrong: bool = False


@command(
    "tune",
    "Benchmark every kernel that can serve a run, with all candidate block sizes, forward and "
    "backward, at the run's shapes and on this device. Values are checked against the reference "
    "first. The best sizes are saved to a table that later runs read.",
    "tune synthetic model=llama-3.2-1b train.batch_size=8 --ops attention",
    CONFIG,
    OVERRIDES,
    argument("--ops", metavar="A,B", help="ops to tune (default: all that the run uses)"),
    argument(
        "--rounds",
        type=positive,
        default=ROUNDS,
        help=f"timing rounds per kernel, of which the fastest counts (default: {ROUNDS})",
    ),
    argument("--out", metavar="FILE", help="table to write (default: run.tuned)"),
)
def main(args: argparse.Namespace) -> int:
    """Measure, print tables and save the best sizes; return 1 if a backend gave wrong values."""
    from maxstack.hardware import devices

    cfg = load_config(args)
    out = args.out or (os.path.expanduser(cfg.run.tuned) if cfg.run.tuned else None)
    if out is None:
        raise ConfigError(
            "run.tuned: is null, so there is no table to write; set it, or give --out FILE"
        )
    devices.environment(cfg.run.virtual_devices)
    from maxstack.kernels import tuning

    tuning.check_writable(out)
    any_wrong = False
    try:
        for choice in _choices(cfg, args.ops):
            print(f"measuring {choice}", file=sys.stderr, flush=True)
            results = measure(choice, args.rounds)
            print(report(choice, results), flush=True)
            tuning.add(out, best(choice, results))
            any_wrong |= any(result.wrong for result in results)
    except KeyboardInterrupt:
        print(f"interrupted; finished ops are in {out}", file=sys.stderr, flush=True)
        os._exit(130)  # jax may crash when Python ends while its threads compute
    print(f"wrote {out}")
    return int(any_wrong)


def _choices(cfg: "Config", ops: str | None) -> "list[Choice]":
    """Return the kernels of a run that can be measured; ConfigError if --ops names another op."""
    from maxstack import startup
    from maxstack.kernels.examples import OPS
    from maxstack.run import assemble

    every = assemble(cfg, startup.make_mesh(cfg)).kernels
    choices = [
        choice for choice in every if choice.op in OPS and not getattr(choice.case, "ring", False)
    ]
    if left_out := [str(choice) for choice in every if choice not in choices]:
        print(f"not measured: {', '.join(left_out)}", file=sys.stderr)
    if ops is None:
        return choices
    names = sorted({choice.op for choice in choices})
    if unknown := [name for name in ops.split(",") if name not in names]:
        raise ConfigError(
            f"--ops {ops}: this run has no op {', '.join(unknown)} to tune; it has "
            f"{', '.join(names)}"
        )
    return [choice for choice in choices if choice.op in ops.split(",")]


def measure(choice: "Choice", rounds: int) -> list[Measured]:
    """Measure every backend and size for one case: first the values on a small case like it, then
    the times, in rounds in which all take turns so that a busy moment slows all alike."""
    import tqdm

    from maxstack.kernels import measure as timing
    from maxstack.kernels.examples import OPS, shrink

    op, example = OPS[choice.op]
    small = example(shrink(choice.case))
    whole = example(choice.case)
    most = timing.TOLERANCE[choice.case.dtype]
    results: list[Measured] = []
    calls: list[tuple[Measured, tuple[Any, ...]]] = []
    for backend, blocks in tqdm.tqdm(
        list(_candidates(op.backends, choice.case)),
        desc=f"{choice.op}: checking",
        unit=" kernels",
        disable=None,
    ):
        result = Measured(backend.name, blocks)
        results.append(result)
        try:
            off = timing.deviation(op[REFERENCE], backend, blocks or None, small)
            if off > most:
                result.wrong = True
                result.problem = (
                    f"WRONG: differs from the reference by {off:.2g} of the largest value, more "
                    f"than {most}"
                )
            else:
                calls.append((result, timing.call(backend, blocks or None, whole)))
        except Exception as error:  # the compiler refused it or memory ran out: the table says so
            reason = str(error).strip().partition("\n")[0][:100] or type(error).__name__
            result.problem = f"failed: {reason}"
    for _ in tqdm.trange(rounds, desc=f"{choice.op}: timing", unit=" rounds", disable=None):
        for result, call in calls:
            result.seconds = min(result.seconds, timing.seconds(*call))
    return results


def _candidates(
    backends: "Sequence[Backend]", case: Any
) -> "Iterator[tuple[Backend, dict[str, int]]]":
    for backend in backends:
        if backend.name != REFERENCE and backend.supports(case) is None:
            for blocks in backend.candidates(case) or [{}]:
                yield backend, blocks


def best(choice: "Choice", results: list[Measured]) -> list[dict[str, Any]]:
    """Return a row for the fastest sizes of each backend that has sizes, with the time of its
    default sizes."""
    rows = []
    for name in dict.fromkeys(result.backend for result in results if result.blocks):
        own = [result for result in results if result.backend == name]
        fastest = min(own, key=lambda result: result.seconds)
        if fastest.seconds < float("inf"):
            rows.append(
                {
                    "device": choice.case.device.kind,
                    "op": choice.op,
                    "backend": name,
                    "shape": dict(choice.case.shape_class),
                    "blocks": fastest.blocks,
                    "microseconds": _microseconds(fastest),
                    "default_microseconds": _microseconds(own[0]),
                    "date": datetime.date.today().isoformat(),
                }
            )
    return rows


def _microseconds(result: Measured) -> float | None:
    return None if result.problem else round(result.seconds * 1e6, 1)


def report(choice: "Choice", results: list[Measured]) -> str:
    """Describe the case, with a row for each kernel, the fastest first."""
    from maxstack.kernels.backends import describe

    defaults = {result.backend: result for result in reversed(results)}
    ranked = sorted(results, key=lambda result: result.seconds)
    rows = []
    for result in ranked:
        sizes = " ".join(f"{name}={size}" for name, size in result.blocks.items())
        speed = result.problem or f"{result.seconds * 1e6:,.0f} us"
        is_default = result.blocks and result is defaults[result.backend]
        rows.append((result.backend, sizes, speed, "(default)" if is_default else ""))
    title = f"{choice.op} on {choice.case.device.kind}: {describe(choice.case)}"
    lines = [title, table("llll", rows)]
    fastest = ranked[0].backend if ranked and ranked[0].seconds < float("inf") else choice.backend
    if choice.backend not in (fastest, REFERENCE):
        lines.append(
            f"  the run uses {choice.backend}; {fastest} was faster here, and can be pinned"
        )
    return "\n".join([*lines, ""])
