"""Images on this machine's CPU, beside torch and in turn with it: the training step of vision
transformers beside transformers' ViTForImageClassification, eager and compiled, in float32 with
SGD; and pictures a second of the feed beside torch's DataLoader, with the same decoding and
changes.

example: python scripts/bench_images.py --peer-python .venv-oracle/bin/python --json images.json
         python scripts/bench_images.py --only feed --rounds 1
         python scripts/bench_images.py --tiny
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments
from bench.gpu_processes import lacks
from bench.metrics import rows

HERE = Path(__file__).parent
STEPS = {"vit-ti16": 12, "vit-b16": 4}
WORKERS = 0, 1, 2
PICTURES, SIZE = 400, (500, 375)


def main() -> None:
    """Run everything, print the tables, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns; the median counts")
    parser.add_argument("--only", choices=["step", "feed"], help="one half")
    parser.add_argument("--models", nargs="*", choices=STEPS, default=[*STEPS])
    parser.add_argument("--tiny", action="store_true", help="one round, to show that it runs")
    arguments.takes_json(parser)
    arguments.takes_peer_python(parser)
    args = parser.parse_args()
    if missing := lacks(args.peer_python, ["torch", "transformers"]):
        print(f"torch is left out: {', '.join(missing)} not installed", file=sys.stderr)
    peer = None if missing else args.peer_python
    rounds, found = 1 if args.tiny else args.rounds, {}
    if args.only != "feed":
        for model in args.models[: 1 if args.tiny else None]:
            found[model] = step(model, rounds, peer, args.tiny)
    if args.only != "step":
        found["feed"] = feed(rounds, peer, args.tiny)
    for name, table in found.items():
        print(f"\n{name + ', images/s':26} {'median':>8}  all rounds")
        for kind, values in table.items():
            everything = " ".join(f"{value:.2f}" for value in values)
            print(f"{kind:26} {statistics.median(values):8.2f}  {everything}")
    arguments.write_json(args.json, found)


def step(model: str, rounds: int, peer: str | None, tiny: bool) -> dict[str, list[float]]:
    """Images/s of each program by round."""
    steps, found = 3 if tiny else STEPS[model], dict[str, list[float]]()
    sizes = {"batch": 2, "layers": 1, "size": 32} if tiny else {"batch": 32}
    words = [model, "--steps", str(steps), *(f"--{key}={value}" for key, value in sizes.items())]
    for _ in range(rounds):
        found.setdefault("maxstack", []).append(ours(model, steps, tiny))
        for kind, more in {"torch": [], "torch.compile": ["--compile"]}.items():
            if peer and not (tiny and more):
                made = run(peer, "torch_vit.py", *words, *more)
                found.setdefault(kind, []).append(made)
    return found


def ours(model: str, steps: int, tiny: bool) -> float:
    """Images/s of maxstack's median step after the first."""
    settings: dict[str, Any] = {
        "run": {"name": "run", "tensorboard": False},
        "model": {"preset": model, "dtype": "float32"},
        "data": {"sources": [{"kind": "synthetic", "vocab": 1000, "length": 1}]},
        "objective": {"kind": "classify"},
        "optimizer": {
            "learning_rate": 0.001,
            "schedule": {"kind": "constant"},
            "chain": [{"kind": "sgd"}],
        },
        "train": {"steps": steps, "batch_size": 2 if tiny else 32},
    }
    if tiny:
        settings["model"] |= {"layers": 1, "image_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        settings["run"]["output_dir"] = folder
        (Path(folder) / "run.yml").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "maxstack.train", f"{folder}/run.yml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"maxstack failed:\n{done.stdout}{done.stderr}")
        speeds = rows(Path(folder) / "run" / "metrics.jsonl", "images_per_second")
    return statistics.median([row["images_per_second"] for row in speeds][1:])


def feed(rounds: int, peer: str | None, tiny: bool) -> dict[str, list[float]]:
    """Pictures/s of each program by round."""
    from PIL import Image

    found = dict[str, list[float]]()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(16 if tiny else PICTURES):
            path = Path(folder) / f"{i % 10}" / f"{i:04}.jpg"
            path.parent.mkdir(exist_ok=True)
            coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
            Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(path, quality=90)
        words = [folder, "--batches=2", "--batch=4"] if tiny else [folder]
        for _ in range(rounds):
            for workers in WORKERS[: 1 if tiny else None]:
                more = f"--workers={workers}"
                made = run(sys.executable, "feed_images.py", *words, more)
                found.setdefault(f"maxstack, {workers} workers", []).append(made)
                if peer:
                    made = run(peer, "torch_loader.py", *words, more)
                    found.setdefault(f"DataLoader, {workers} workers", []).append(made)
    return found


def run(python: str, script: str, *words: str) -> float:
    """Images/s of a script."""
    command = [python, str(HERE / "bench" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["images_per_second"]


if __name__ == "__main__":
    main()
