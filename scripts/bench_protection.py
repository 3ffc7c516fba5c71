"""Cost of protection: training with all of it on and with all of it off, in turns, in real
processes, as tokens/s and their ratio.

On: the guard in the step, a host's own tier every 20 steps beside a durable one, the watchdog, the
comparison of replicas. Off: none of these, and a step without the guard. The time is that from an
early step's result to a late step's, with everything that delays the steps between them.

example: python scripts/bench_protection.py --rounds 5 --steps 100 --json protection.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import arguments
from bench.metrics import rows

PROGRAM = """
import os, sys, time
from maxstack import cli, train
from maxstack.report import metrics
from maxstack.faults import guard
from maxstack.report import metrics
if sys.argv.pop(1) == "off":
    plain = guard.judge
    guard.judge = lambda cfg, state, *numbers: (guard.ACCEPTED + 0 * state.refused, state._replace(updates=state.updates + 1))
    guard.where = lambda condition, yes, no: yes
write = metrics.Writer.write
def timed(self, row):
    write(self, row | {"at": time.monotonic()} if "loss" in row else row)
metrics.Writer.write = timed
sys.exit(cli.run(train.program, sys.argv[1:]))
"""  # noqa: E501
BATCH, LENGTH, EARLY = 8, 512, 5
WORK = (
    "synthetic",
    "model={vocab: 4096, embed: 384, layers: 6, dtype: float32, blocks: {block: {mixer: "
    "{kind: attention, heads: 6, kv_heads: 2, "
    "head_dim: 64}, mlp: {kind: gated, hidden: 1024}}}}",
    f"data={{seq_len: {LENGTH}, sources: [{{kind: synthetic, documents: 4096, length: 600, "
    "vocab: 4096}]}",
    f"train.batch_size={BATCH}",
    "eval.every=0",
    "run.tensorboard=false",
)
OFF = ("checkpoint={every: 0}", "faults={watchdog: null, check_every: 0}")
KINDS = {"one device": (), "8 virtual devices": ("run.virtual_devices=8", "mesh.data=8")}


def main() -> None:
    """Run everything, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    arguments.takes_overrides(parser, "the run's configuration")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="each variant runs this often; the median of the ratios counts",
    )
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--only", choices=KINDS, help="one kind of run")
    arguments.takes_json(parser)
    args = parser.parse_intermixed_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in [args.only] if args.only else KINDS:
            found[kind] = [
                _round(Path(folder), kind, number, args) for number in range(args.rounds)
            ]
    print(
        f"{'':18} {'on, tokens/s':>12} {'off':>8} {'on / off: median':>16} "
        f"{'quartiles':>14} {'step off':>9} {'blocked by saves':>16}"
    )
    for kind, rounds in found.items():
        speeds = {
            which: [figures[which]["tokens_per_second"] for figures in rounds]
            for which in ("on", "off")
        }
        ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        on, off = map(statistics.median, speeds.values())
        blocked = statistics.median(figures["on"]["blocked"] for figures in rounds)
        print(
            f"{kind:18} {on:12,.0f} {off:8,.0f} {middle:16.3f} {low:7.3f}-{high:.3f} "
            f"{BATCH * LENGTH / off:7.2f} s {blocked:16.2%}"
        )
    arguments.write_json(args.json, found)


def _round(
    folder: Path, kind: str, number: int, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Both variants; their order alternates between rounds."""
    print(f"{kind}: round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
    order = ("on", "off") if number % 2 == 0 else ("off", "on")
    more = *KINDS[kind], *args.overrides
    return {
        which: _measured(
            folder, which, f"{which}-{kind.replace(' ', '-')}-{number}", args.steps, more
        )
        for which in order
    }


def _measured(
    folder: Path, which: str, name: str, steps: int, more: tuple[str, ...]
) -> dict[str, float]:
    """Tokens/s between an early step's result and that of the last but one, and the share of the
    time that is blocked by saves."""
    on = (
        f"checkpoint={{every: 1000, tiers: [{{path: '{folder}/ssd', every: 20, keep: 2, "
        f"replicate: 0}}]}}",
    )
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        which,
        *WORK,
        *(on if which == "on" else OFF),
        *more,
        f"train.steps={steps}",
        f"run.name={name}",
        f"run.output_dir={folder}",
        f"run.compilation_cache={folder}/cache",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        sys.exit(f"{' '.join(command[3:])}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    steps_done = rows(folder / name / "metrics.jsonl", "at")
    first, last = steps_done[EARLY - 1], steps_done[-2]
    seconds = last["at"] - first["at"]
    blocked = seconds - sum(row["step_seconds"] for row in steps_done[EARLY:-1])
    return {
        "tokens_per_second": (last["step"] - first["step"]) * BATCH * LENGTH / seconds,
        "blocked": blocked / seconds,
    }


if __name__ == "__main__":
    main()
