"""Trains the recipes of post-training one after the other, from quickstart's model, and says how
each answers held-out questions: the table in docs/POSTTRAINING.md.

An answer is right in form if it is the JSON object or the sentence that the question asks for,
whatever value it holds. Wins are counted against the answers of sft.yml's model to the same
questions: JSON beats words, and words beat anything else; equals count half. KL is the mean over
sampled answers that ended of log p(answer) - log p(answer) of sft.yml's model, in nats.

example: python scripts/measure_recipes.py --run runs/quickstart --out measured
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maxstack.data import people  # noqa: E402

BEGIN, END = "<!-- written by scripts/measure_recipes.py -->", "<!-- end -->"
FIRST = 1_000_000
"""Number of the first question: beyond those of training."""
TEMPLATE = ROOT / "maxstack/data/templates/plain.jinja"
RECIPES = {
    "sft": "quickstart",
    "sft-lora": "quickstart",
    "orpo": "quickstart",
    "dpo": "sft",
    "dpo-lora": "sft",
    "kto": "sft",
}
"""Recipes, and the run that each begins from."""


class Answers(NamedTuple):
    """Answers to the questions, in their order."""

    rows: list[dict[str, Any]]
    """With `text`, `logprobs` and `finish_reason`."""
    grades: list[int]
    """2: JSON, 1: words, 0: neither."""
    right: int
    """Answers that are exactly one of the two that the question asks for."""


def main() -> None:
    """Train, ask, and write the table."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="quickstart's run")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--questions", type=int, default=256, help="(default: 256)")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    arguments.takes_overrides(parser, "every recipe")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {"quickstart": args.run}
    asked = [people.prompts(FIRST + i) for i in range(args.questions)]
    questions = args.out / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    lines = [
        "| Model | JSON | Words | Neither | Right value | Wins against sft | KL to sft |",
        "| --- " * 7 + "|",
    ]
    found: dict[str, Answers] = {}
    for name in ("quickstart", *args.recipes):
        if before := RECIPES.get(name):
            runs[name] = args.out / name
            maxstack(
                *("train", ROOT / f"configs/recipes/{name}.yml", f"model.from={runs[before]}"),
                *(f"run.output_dir={args.out}", *args.overrides),
            )
        answers = found[name] = ask(runs[name], questions, asked, args.out / f"{name}.jsonl")
        shares = [answers.grades.count(grade) / len(asked) for grade in (2, 1, 0)]
        cells = [name, *(f"{share:.3f}" for share in shares), f"{answers.right / len(asked):.3f}"]
        compared = name not in ("quickstart", "sft") and "sft" in found
        cells.append(f"{wins(answers, found['sft']):.3f}" if compared else "")
        cells.append(f"{divergence(answers, asked, runs['sft'], args.out):.2f}" if compared else "")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "\n".join([*lines, "", f"Of {len(asked)} held-out questions, at temperature 1."])
    print(text)
    if args.write:
        arguments.write_block(ROOT / "docs/POSTTRAINING.md", BEGIN, END, text)


def maxstack(*words: object) -> None:
    """A command of maxstack, which ends this script where it fails."""
    command = [sys.executable, "-m", "maxstack.cli", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def ask(run: Path, questions: Path, asked: list[dict[str, Any]], out: Path) -> Answers:
    """A run's answers, one to each question."""
    maxstack(
        *("generate", run, "--prompts", questions, "--out", out, "--max-tokens", 64),
        *("--chat-template", TEMPLATE),
    )
    rows = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["id"])
    grades = [grade(row["text"], about) for row, about in zip(rows, asked, strict=True)]
    right = sum(
        row["text"] in (about["json"], about["words"])
        for row, about in zip(rows, asked, strict=True)
    )
    return Answers(rows, grades, right)


def grade(text: str, about: dict[str, Any]) -> int:
    """2 for the JSON object that a question asks for, 1 for the sentence, 0 for anything else."""
    (field,) = json.loads(about["json"])
    try:
        said = json.loads(text)
    except ValueError:
        return int(bool(re.fullmatch(rf"The {field} is \w+\.", text)))
    return 2 * (isinstance(said, dict) and [*said] == [field])


def wins(answers: Answers, others: Answers) -> float:
    """Share of questions at which the first has the better grade."""
    pairs = [*zip(answers.grades, others.grades, strict=True)]
    return sum(1.0 * (a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


def divergence(answers: Answers, asked: list[dict[str, Any]], base: Path, out: Path) -> float:
    """Mean of log p(answer) over that of `base`, of answers that ended; NaN where none did."""
    ended = [
        (row, about)
        for row, about in zip(answers.rows, asked, strict=True)
        if row["finish_reason"] == "stop" and row["text"]
    ]
    if not ended:
        return math.nan
    records, scored = out / "answers.jsonl", out / "scored.jsonl"
    records.write_text(
        "".join(
            json.dumps({"prompt": about["messages"], "completion": row["text"], "label": True})
            + "\n"
            for row, about in ended
        )
    )
    scored.unlink(missing_ok=True)
    maxstack("score", base, "--records", records, "--kind", "labelled", "--out", scored)
    stored = [json.loads(line)["ref_logps"] for line in scored.read_text().splitlines()]
    own = [sum(row["logprobs"]) for row, _ in ended]
    return sum(a - b for a, b in zip(own, stored, strict=True)) / len(own)


if __name__ == "__main__":
    main()
