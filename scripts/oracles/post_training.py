"""Post-training beside TRL: a tiny model is trained for ten steps with TRL's trainers and with
maxstack, on the same rows from the same Hugging Face folder, and the losses of every step are
compared; then the answers and rewards of models that maxstack trained and exported with those in
transformers."""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oracle import maxstack, report
from tqdm import tqdm

from maxstack.data import people
from oracles import trl_trainers

HEAD = (
    "| Objective | First and tenth loss of TRL | Of maxstack | Largest difference of ten |",
    "| --- " * 4 + "|",
)
STEPS, ROWS = 10, 8
RATE = 3e-3
CLOSE = 1e-4
QUESTIONS, MOST = 16, 40


class Case(NamedTuple):
    """An objective of maxstack that a trainer of TRL has too."""

    objective: dict[str, Any]
    records: Callable[[int], dict[str, Any]]
    kind: str = "CausalLM"
    """transformers' class of model."""
    rows: int = STEPS * ROWS


CASES = {
    "sft": Case({"kind": "sft"}, people.chat),
    "dft": Case({"kind": "sft", "dft": True}, people.chat),
    "dpo": Case({"kind": "preference", "beta": 0.3}, people.pairs),
    "orpo": Case(
        {"kind": "preference", "loss": {"orpo": 1, "sft": 1}, "beta": 0.1, "sft_on": "sequence"},
        people.pairs,
    ),
    # TRL takes answers to other prompts from the row before in a batch, we from a row after. So
    # each step sees all rows, and TRL in the opposite order.
    "kto": Case({"kind": "unpaired", "beta": 0.3}, people.labelled, rows=ROWS),
    "reward": Case({"kind": "reward", "centre": 0.01}, people.pairs, "SequenceClassification"),
    "gkd": Case({"kind": "distill", "beta": 0.5}, people.chat),
}


def compare(only: list[str] | None) -> list[str]:
    """Print the table -> what is not at par; all objectives write docs/POSTTRAINING.md."""
    lines, bad = [*HEAD], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for kind in ("CausalLM", "SequenceClassification"):
            trl_trainers.make_model(folder / kind, kind, seed=1)
        trl_trainers.make_model(folder / "teacher", "CausalLM", seed=2)
        for name in tqdm(only or CASES, unit=" objectives"):
            case = CASES[name]
            rows = [case.records(i) for i in range(case.rows)][:: -1 if name == "kto" else 1]
            theirs = trl_trainers.losses(folder, case.kind, name, rows, STEPS, ROWS, RATE)
            ours = our_losses(folder, name)
            error = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
            cells = [f"{losses[0]:.6f}, {losses[-1]:.6f}" for losses in (theirs, ours)]
            lines.append(f"| {name} | {' | '.join(cells)} | {error:.1e} |")
            bad += [] if error <= CLOSE else [name]
        if only:
            report(lines, None)
            return bad
        same, error = same_answers(folder), reward_error(folder)
    bad += [] if same == QUESTIONS else ["answers"]
    bad += [] if error <= CLOSE else ["rewards"]
    lines += [
        "",
        f"A Hugging Face folder, trained by SFT and DPO and exported: of {QUESTIONS} questions "
        f"{same} get the same greedy answer from transformers with the folder's chat template, "
        "from `maxstack generate` of the folder, and of the run. Rewards of an exported reward "
        f"model are those of `maxstack score` within {error:.1e}.",
    ]
    report(lines, "POSTTRAINING.md")
    return bad


def our_losses(folder: Path, name: str) -> list[float]:
    """Losses of the steps of maxstack."""
    case = CASES[name]
    teacher = {"teacher": {"from": str(folder / "teacher"), "dtype": "float32"}}
    run = train(folder, name, folder / case.kind, case, **teacher if name == "gkd" else {})
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def train(
    folder: Path,
    name: str,
    model: Path,
    case: Case,
    steps: int = STEPS,
    rate: float = RATE,
    **sections: Any,
) -> Path:
    """A run from a model's folder on the records in their order."""
    record = case.records.__name__
    source = {
        "kind": "function",
        "call": f"maxstack.data.people:{record}",
        "documents": case.rows,
        "record": {"kind": record},
    }
    chain = [
        {"kind": "clip_by_global_norm", "max_norm": 1.0},
        {"kind": "adamw", "b2": 0.99, "weight_decay": 0.0},
    ]
    cfg = {
        "run": {"name": name, "output_dir": str(folder / "runs"), "trackers": []},
        "model": {"from": str(model), "dtype": "float32"},
        "data": {"sources": [source], "packing": "none", "shuffle": False, "seq_len": 128},
        "objective": case.objective,
        "optimizer": {"learning_rate": rate, "schedule": None, "chain": chain},
        "train": {"steps": steps, "batch_size": ROWS},
        "checkpoint": {"every": steps},
    }
    path = folder / f"{name}.yml"
    path.write_text(json.dumps(cfg | sections))
    maxstack("train", path)
    return folder / "runs" / name


def same_answers(folder: Path) -> int:
    """Questions that get the same greedy answer from transformers and from maxstack, of a model
    after SFT and DPO."""
    sft = train(folder, "answer", folder / "CausalLM", CASES["sft"], 40 * STEPS)
    run = train(folder, "prefer", sft, CASES["dpo"], rate=RATE / 10)
    out, questions = folder / "exported", folder / "questions.jsonl"
    maxstack("export", run, "--out", out)
    asked = [people.prompts(10_000 + i) for i in range(QUESTIONS)]
    write(questions, asked)
    ours = []
    for model in (out, run):
        answers = folder / f"of-{model.name}.jsonl"
        maxstack(
            *("generate", model, "--prompts", questions, "--out", answers),
            *("--temperature", 0, "--max-tokens", MOST, "model.dtype=float32"),
        )
        ours.append([row["text"] for row in sorted(read(answers), key=lambda row: row["id"])])
    theirs = trl_trainers.greedy(out, asked, MOST)
    return sum(len({*texts}) == 1 for texts in zip(theirs, *ours, strict=True))


def reward_error(folder: Path) -> float:
    """Largest difference between rewards by `maxstack score` and by transformers of the export."""
    run, out = folder / "runs/reward", folder / "rewarding"
    records, rewards = folder / "pairs.jsonl", folder / "rewards.jsonl"
    maxstack("export", run, "--out", out)
    write(records, [people.pairs(10_000 + i) for i in range(QUESTIONS)])
    maxstack("score", run, "--records", records, "--kind", "pairs", "--out", rewards)
    rows = read(rewards)
    theirs = trl_trainers.rewards(out, rows)
    return max(
        max(abs(chosen - row["chosen_reward"]), abs(rejected - row["rejected_reward"]))
        for (chosen, rejected), row in zip(theirs, rows, strict=True)
    )


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[Mapping[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
