"""The training step's time by layer on this machine's devices: a few steps of a run are traced, as
`maxstack profile` shows them. The rest is time in which the devices were idle. `scripts/plot.py`
draws the JSON.

example: python scripts/profile_step.py bench-reference --rounds 5 --json step.json
         python scripts/profile_step.py configs/quickstart.yml train.batch_size=2
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench import arguments
from bench.cpu_tables import step_tables

from maxstack.profile.analysis import summary

WARM_UP = 5
"""Steps before the trace."""


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("config", help="a YAML file, or the name of a preset")
    arguments.takes_overrides(parser, "the file")
    arguments.takes_rounds(parser, 5, "steps that are traced; the mean counts")
    arguments.takes_json(parser)
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *args.overrides,
            f"run.output_dir={folder}",
            "run.name=step",
            "run.trackers=[]",
            "eval.every=0",
            "checkpoint.every=0",
            f"train.steps={WARM_UP + args.rounds + 1}",
            f"train.profile={{start: {WARM_UP}, steps: {args.rounds}}}",
        ]
        command = [sys.executable, "-m", "maxstack.train", args.config, *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        profile = summary(Path(folder, "step"))
    layers = [{"name": x.name, "count": 1, "seconds": x.total} for x in profile.layers]
    result = {
        "step": {"seconds": profile.step_seconds},
        "components": layers,
        "rest": {"seconds": profile.idle},
        "config": args.config,
        "overrides": args.overrides,
        "device": profile.device_kind,
        "jax": version("jax"),
        "tokens": profile.tokens,
        "rounds": args.rounds,
    }
    print("\n\n".join(step_tables(result)))
    arguments.write_json(args.json, result)


if __name__ == "__main__":
    main()
