"""Training curves of the quickstart's model in bfloat16 and in low precision: each recipe in a real
run, the same batches for all.

Writes docs/quantization/curves.json, the plot and the table of docs/QUANTIZATION.md; --plot makes
these again from the figures that are there.
example: python scripts/quantization_curves.py --steps 300
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments
from bench.metrics import rows
from bench.svg import Panel, line_chart
from tqdm import tqdm

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCKS = '".*/(mixer|mlp)/.*"'
RECIPES = {
    "bfloat16": "{}",
    "int8 QAT": "{preset: int8, mode: qat}",
    "int8 QT": f"{{rules: [{{module_path: {BLOCKS}, weight_qtype: int8, act_qtype: int8, "
    "bwd_qtype: "
    f"int8}}]}}",
    "fp8 QAT": f"{{mode: qat, rules: [{{module_path: {BLOCKS}, weight_qtype: float8_e4m3fn, "
    f"act_qtype: float8_e4m3fn}}]}}",
    "fp8 QT": "{preset: fp8}",
    "int4 weights QAT": "{preset: int4, mode: qat}",
    "int4 weights QT": f"{{rules: [{{module_path: {BLOCKS}, weight_qtype: int4, tile_size: 32, "
    "bwd_qtype: "
    f"int8}}]}}",
}
LIMITS = {"int8": 1, "fp8": 2, "int4 weights": 4}
"""Per cent that the final held-out loss may lie above that of bfloat16."""
SHOWN = (10, 20, 40, 75, 150, 300)


def main() -> None:
    """Run, keep, plot."""
    parser = arguments.parser(__doc__)
    arguments.takes_overrides(parser, "the quickstart's configuration")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--only",
        choices=RECIPES,
        action="append",
        help="these alone; the others keep the figures that are there",
    )
    parser.add_argument("--plot", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_intermixed_args()
    path = args.docs / "quantization" / "curves.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in tqdm([] if args.plot else args.only or RECIPES, unit=" runs", disable=None):
        found[name] = run(RECIPES[name], args.steps, args.overrides) | {
            "steps": args.steps,
            "machine": f"{platform.machine()}, CPU",
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    path.with_suffix(".svg").write_text(plot(found))
    page = args.docs / "QUANTIZATION.md"
    arguments.write_block(page, "<!-- curves -->", "<!-- end -->", f"\n{table(found)}\n")


def run(recipe: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Losses of the steps, and held-out losses, of one recipe."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "maxstack.train",
                "quickstart",
                f"run.output_dir={folder}",
                "run.name=curve",
                "run.tensorboard=false",
                "model.dtype=bfloat16",
                f"quantization={recipe}",
                f"train.steps={steps}",
                f"eval={{every: {steps // 4}, baselines: false, tasks: []}}",
                "checkpoint.every=0",
                *overrides,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        metrics = Path(folder) / "curve" / "metrics.jsonl"
        return {
            "losses": [row["loss"] for row in rows(metrics, "loss")],
            "held_out": {row["step"]: row["eval_loss"] for row in rows(metrics, "eval_loss")},
        }


def plot(found: dict[str, Any]) -> str:
    """Mean training loss of the ten steps up to some steps, and held-out losses."""
    training = {
        name: [
            (step, sum(one["losses"][step - 10 : step]) / 10)
            for step in SHOWN
            if step <= len(one["losses"])
        ]
        for name, one in found.items()
    }
    held_out = {
        name: [(int(step), loss) for step, loss in one["held_out"].items() if int(step)]
        for name, one in found.items()
    }
    return line_chart(
        "Training in low precision: the quickstart's model, the same batches",
        "natural logarithm, a byte; CPU",
        (
            Panel("training loss", "step", "nats, mean of ten steps", training),
            Panel("held-out loss", "step", "nats", held_out),
        ),
    )


def table(found: dict[str, Any]) -> str:
    """The last held-out loss of each recipe, beside bfloat16's and the limit."""
    last = {name: [*one["held_out"].values()][-1] for name, one in found.items()}
    rows = []
    for name, loss in last.items():
        limit = next((limit for kind, limit in LIMITS.items() if name.startswith(kind)), None)
        rows.append(
            f"| {name} | {loss:.4f} | {loss / last['bfloat16'] - 1:+.2%} | "
            f"{f'{limit} %' if limit else ''} |"
        )
    head = [
        "![training curves](quantization/curves.svg)",
        "",
        "| | held-out loss | against bfloat16 | limit |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    main()
