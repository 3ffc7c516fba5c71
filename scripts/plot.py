"""Draw the pictures of the docs, and write the tables of docs/PERFORMANCE.md, from the figures that
lie beside them: docs/performance/*.json (bench_gpu.py, bench_cpu.py and profile_step.py write
them) and docs/pictures.

--metrics, --tasks, --plan and --profile take new figures for docs/pictures first. Pictures need
the extra `plots`; --check compares the tables alone.

example: python scripts/plot.py --metrics runs/quickstart/metrics.jsonl
         python scripts/plot.py --check
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments
from bench.charts import Panel, bar_chart, line_chart, screen
from bench.cpu_tables import draw_peers, draw_step, peer_tables, step_tables
from bench.gpu_tables import rate, tables
from bench.metrics import rows

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLAN = (
    "maxstack plan synthetic model=llama-3.1-8b mesh=v5e-256 data.seq_len=8192 "
    "train.batch_size=256 model.remat.policy=full --topology v5e:16x16 --tokens 15T --mfu 0.4"
)
LAYERS = 10
"""Layers in their picture, those that take longest."""
MEAN = 10
"""Steps in one point of a curve of training."""
Found = dict[str, Any]


def main() -> None:
    """Take new figures, draw, and write the page."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="of a run of the quickstart")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="of one with more evaluations")
    parser.add_argument("--plan", action="store_true", help="run the plan again (extra plan-tpu)")
    parser.add_argument("--profile", metavar="RUN", help="a run with a trace")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    parser.add_argument("--check", action="store_true", help="1 if the tables are out of date")
    args = parser.parse_args()
    pictures = args.docs / "pictures"
    if args.metrics:
        (pictures / "loss.json").write_text(json.dumps(losses(args.metrics)) + "\n")
    if args.tasks:
        (pictures / "tasks.json").write_text(json.dumps(shares(args.tasks)) + "\n")
    if args.plan:
        (pictures / "plan.txt").write_text(run_command(PLAN))
    if args.profile:
        profile(args.profile, pictures)
    page = args.docs / "PERFORMANCE.md"
    text = page.read_text(encoding="utf-8")
    for source in sorted((args.docs / "performance").glob("*.json")):
        text = with_figures(text, page, source, draws=not args.check)
    if not args.check:
        draw_pictures(pictures)
    arguments.write_or_check({page: text}, args.check)


def with_figures(text: str, page: Path, source: Path, draws: bool) -> str:
    """The page with the pictures and tables of what was measured between its marks."""
    found = json.loads(source.read_text(encoding="utf-8"))
    draw, tell = next(both for key, both in KINDS.items() if key in found)
    names = draw(found, source.with_suffix("")) if draws else names_in(text, source.stem)
    shown = [f"![{name.removesuffix('.svg')}](performance/{name})" for name in names]
    block = "\n\n".join([*shown, *tell(found)])
    begin = f"<!-- {source.stem} -->"
    return arguments.with_block(text, page, begin, "<!-- end -->", f"\n{block}\n")


def names_in(text: str, stem: str) -> list[str]:
    """The pictures that a page shows of one source."""
    block = text.partition(f"<!-- {stem} -->")[2].partition("<!-- end -->")[0]
    return [line.partition("/")[2][:-1] for line in block.splitlines() if line[:2] == "!["]


def draw_attention(found: Found, stem: Path) -> list[str]:
    """Draw attention by sequence length, a file for each mask and head dim -> their names."""
    own = [row for row in found["rows"] if row["section"] == "attention" and row["status"] == "ok"]
    factor, unit = rate(found["device"])
    names = []
    for mask, dim in sorted({(row["mask"], row["head_dim"]) for row in own}):
        chosen = [row for row in own if (row["mask"], row["head_dim"]) == (mask, dim)]
        kind, x = ("log", "linear"), "sequence length"
        panels = [
            Panel(way, x, unit, by_backend(chosen, f"{way}_tflops", factor), kind)
            for way in ("forward", "backward")
        ]
        memory = by_backend(chosen, "temporary_bytes", 2**-20)
        panels.append(Panel("Memory of both", x, "MiB", memory, ("log", "log")))
        first, name = chosen[0], f"{stem.name}-attention-{mask}-{dim}.svg"
        title = f"Attention, {mask}, head_dim {dim}, {first['heads']} heads, {first['dtype']}"
        where = found["device"]["kind"] if factor == 1 else found["machine"]["processor"]
        panels = [panel for panel in panels if panel.series]
        line_chart(stem.with_name(name), title, f"{where}, {found['date'][:10]}", panels)
        names.append(name)
    return names


def by_backend(rows: list[Found], key: str, scale: float) -> dict[str, list[tuple[float, float]]]:
    """A figure of every backend by length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(key):
            series.setdefault(row["backend"], []).append((row["length"], row[key] * scale))
    return series


KINDS = {
    "components": (draw_step, step_tables),
    "rows": (draw_attention, tables),
    "tokens_per_second": (draw_peers, peer_tables),
}
"""What draws a file of docs/performance, and makes its tables, by a key of the file."""


def losses(metrics: Path) -> Found:
    """The training loss as means of MEAN steps and every held-out loss: (step, nats a token)."""
    every = [(row["step"], row["loss"]) for row in rows(metrics, "loss")]
    groups = [every[i : i + MEAN] for i in range(0, len(every) - MEAN + 1, MEAN)]
    training = []
    for group in groups:
        mean = sum(loss for _, loss in group) / MEAN
        training.append((group[-1][0], round(mean, 4)))
    held_out = rows(metrics, "eval_loss")
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "training": training,
        "held_out": [(row["step"], round(row["eval_loss"], 4)) for row in held_out],
    }


def shares(metrics: Path) -> Found:
    """The share of right answers by task, by its first metric, as (step, share)."""
    found = rows(metrics, "tasks_seconds")
    keys: dict[str, str] = {}
    for key in found[0]:
        if key.endswith(("/acc", "/acc_norm")):
            keys.setdefault(key.split("/")[1], key)
    keys.pop("pairs", None)  # the group of the others
    shares: Found = {}
    for name, key in keys.items():
        shares[name] = [(row["step"], row[key]) for row in found]
    return shares


def run_command(line: str, *more: str) -> str:
    """A command and what it prints; `more` words are given and not shown."""
    command = [sys.executable, "-m", "maxstack.cli", *shlex.split(line)[1:], *more]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "".join(f"{line.rstrip()}\n" for line in [f"$ {line}", *printed.splitlines()])


def profile(run: str, pictures: Path) -> None:
    """Write the screen of a run's profile, and ms of its layers by direction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        (pictures / "profile.txt").write_text(
            run_command(f"maxstack profile {run}", "--json", str(path))
        )
        figures = json.loads(path.read_text())
    layers: Found = {}
    for row in figures["layers"][:LAYERS]:
        layers[row["name"]] = {way: round(1e3 * s, 2) for way, s in row["seconds"].items()}
    note = f"{figures['tokens']:,} tokens a step; {os.cpu_count()} cores, {platform.machine()}"
    (pictures / "profile.json").write_text(json.dumps({"note": note, "layers": layers}) + "\n")


def draw_pictures(folder: Path) -> None:
    """Draw docs/pictures: the quickstart's loss, tasks, plan and profile, and GRPO's rewards."""
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    loss, tasks, reward = read["loss"], read["tasks"], read["rl"]
    curves = {f"training, mean of {MEAN} steps": loss["training"]}
    curves["held-out files"] = loss["held_out"]
    note = f"loss, nats a token; {loss['machine']}, CPU"
    panel = Panel("Python's standard library", "step", "nats", curves)
    line_chart(folder / "loss.svg", "maxstack train quickstart", note, [panel])
    panel = Panel("50 questions each", "step", "share", tasks)
    note = "chance: 0.5, of cloze 0.25"
    line_chart(folder / "tasks.svg", "The quickstart's tasks", note, [panel])
    code = reward.pop("quickstart")
    panels = []
    for key, title in (("training", "samples"), ("held_out", "1,024 held-out prompts")):
        series = {name: run[key] for name, run in reward.items()}
        panels.append(Panel(title, "step", "share of right answers", series))
    series = {"samples": code["training"], "held out": code["held_out"]}
    title = "grpo-code.yml, from quickstart's model"
    panels.append(Panel(title, "step", "share that begins as wanted", series))
    note = "GRPO from a reward of 1 for eight digits in order, 100,160 parameters, on a CPU"
    line_chart(folder / "rl.svg", "maxstack train configs/recipes/grpo-sort.yml", note, panels)
    title = "maxstack profile: a step of the quickstart by layer and direction"
    layers = read["profile"]
    bar_chart(folder / "layers.svg", title, layers["note"], "ms", layers["layers"])
    for name in ("plan", "profile"):
        text = (folder / f"{name}.txt").read_text()
        screen(folder / f"{name}.svg", f"maxstack {name}", text)


if __name__ == "__main__":
    main()
