"""The reference work in MaxText on one CPU device: its own trainer with synthetic data, layers
scanned, no remat asked for. Prints one JSON line: tokens/s by the median step of 20 after two, and
seconds from the start of the process to its first loss.

Run it with the interpreter of the environment that scripts/bench/maxtext.sh makes.
example: /tmp/maxtext/bin/python scripts/bench/maxtext_llama.py bf16
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import yaml

STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")
"""A step of MaxText's log; step n is told after step n + 1 has begun."""


def main() -> None:
    """Train, read the log, print the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dtype", choices=("f32", "bf16"))
    parser.add_argument("--tiny", action="store_true", help="few steps, which show that it runs")
    args = parser.parse_args()
    package = find_spec("maxtext")
    if package is None or not package.submodule_search_locations:
        sys.exit(f"{sys.executable} has no maxtext; scripts/bench/maxtext.sh installs it")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(package.submodule_search_locations[0]) / "configs" / "base.yml"
        command = _command(config, args.dtype, 4 if args.tiny else 22, folder)
        print(json.dumps(_measured(command, folder)))


def _command(config: Path, dtype: str, steps: int, folder: str) -> list[str]:
    settings = yaml.safe_load(Path(__file__).with_name("maxtext.yml").read_text())
    settings |= {"base_output_directory": folder, "jax_cache_dir": f"{folder}/cache"}
    settings |= {"steps": steps, "dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype]}
    words = [f"{key}={value}" for key, value in settings.items()]
    trainer = "maxtext.trainers.pre_train.train"
    return [sys.executable, "-u", "-m", trainer, str(config), *words]


def _measured(command: list[str], folder: str) -> dict[str, float]:
    begin, first = time.perf_counter(), 0.0
    seconds: list[float] = []
    said: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,  # `-m` looks for modules there first
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout
    for line in process.stdout:
        said.append(line)
        if step := STEP.search(line):
            first = first or time.perf_counter() - begin
            seconds.append(float(step[2]))
    if process.wait() or len(seconds) < 3:
        sys.exit("MaxText failed:\n" + "".join(said[-20:]))
    ordered = sorted(seconds[2:])  # of the first two it tells how long dispatching them took
    median = ordered[len(ordered) // 2]
    return {"tokens_per_second": 4 * 512 / median, "first_loss_seconds": first}


if __name__ == "__main__":
    main()
