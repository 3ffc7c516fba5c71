"""SFT and DPO of the same model on the same records: maxstack and TRL in turn, in several rounds,
as tokens/s and ratios, with the most memory of each process.

The model is a Qwen3 of 9 million weights in float32 with AdamW. Steps are timed from the third on;
tokens are those of records, without padding. TRL and `maxstack, one a row` take the same records a
step, `maxstack, packed` as many as fit in half as many rows. TRL keeps its default of computing
activations again switched off.

example: python scripts/bench_post.py --peer-python .venv-oracle/bin/python --json post.json
         python scripts/bench_post.py --tiny
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments, metrics
from bench.gpu_processes import lacks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maxstack.data import people  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ROOT / "maxstack/data/templates/chatml.jinja"
OBJECTIVES = {
    "sft": ("chat", {"kind": "sft"}, 512),
    "dpo": ("pairs", {"kind": "preference", "beta": 0.1}, 1024),
}
"""Kind of records, section, and tokens of a row."""
MODEL = {
    "vocab": 8192,
    "embed": 256,
    "layers": 6,
    "unroll": 6,
    "dtype": "float32",
    "blocks": {
        "block": {
            "mixer": {
                **{"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 64},
                **{"qk_norm": {"kind": "rms"}},
            },
            "mlp": {"kind": "gated", "hidden": 768},
        }
    },
}
SKIPPED = 2
"""Steps at the beginning that are not timed."""
CHILD = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def main() -> None:
    """Run everything, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--steps", type=int, default=12, help="of a process (default: 12)")
    parser.add_argument("--records", type=int, default=16, help="of a step (default: 16)")
    parser.add_argument("--tiny", action="store_true", help="only shows that everything runs")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the interpreter that has trl, if another; where it has none, maxstack runs alone",
    )
    arguments.takes_json(parser)
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.steps, args.records = 1, 4, 4
        MODEL.update(embed=32, layers=1, unroll=1)
    missing = lacks(args.peer_python, ["torch", "transformers", "trl"])
    if missing:
        print(f"left out: TRL, since {args.peer_python} lacks {', '.join(missing)}")
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in OBJECTIVES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tokenizer(folder)
        write_records(folder, args.records * args.steps)
        for turn in range(args.rounds):
            for name, figures in found.items():
                for title, packing in (("packed", "fit"), ("one a row", "none")):
                    row = ours(folder, name, packing, args, turn)
                    figures.setdefault(f"maxstack, {title}", []).append(row)
                if not missing:
                    figures.setdefault("TRL", []).append(theirs(folder, name, args))
    for name, figures in found.items():
        table(name, figures)
    arguments.write_json(args.json, found)


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of made-up people, as files of Hugging Face."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    texts = [json.dumps(people.chat(i)) for i in range(200)]
    trained.train_from_iterator(texts, vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    trained.save(str(folder / "tokenizer.json"))
    named = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "bos_token": None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


def write_records(folder: Path, count: int) -> None:
    """Conversations of one to eight questions, and preferences between their last answers."""
    draw = random.Random(0)
    with (folder / "sft.jsonl").open("w") as chats, (folder / "dpo.jsonl").open("w") as pairs:
        for index in range(count):
            turns = [people.chat(index * 8 + i) for i in range(draw.randint(1, 8))]
            messages = [message for turn in turns for message in turn["messages"]]
            chats.write(json.dumps({"messages": messages}) + "\n")
            last = people.pairs(index * 8)
            record = {"prompt": [*messages[:-2], *last["prompt"]]}
            for key in ("chosen", "rejected"):
                record[key] = [{"role": "assistant", "content": last[key]}]
            pairs.write(json.dumps(record) + "\n")


def ours(
    folder: Path, name: str, packing: str, args: argparse.Namespace, turn: int
) -> dict[str, float]:
    """Tokens/s and memory of a run of maxstack."""
    record, objective, length = OBJECTIVES[name]
    source = {"kind": "jsonl", "files": [str(folder / f"{name}.jsonl")]}
    rows = args.records if packing == "none" else args.records // 2
    cfg = {
        "run": {
            "name": f"{name}-{packing}-{turn}",
            "output_dir": str(folder),
            "tensorboard": False,
        },
        "model": MODEL,
        "data": {
            "sources": [source | {"record": {"kind": record}}],
            "tokenizer": {"kind": "huggingface", "path": str(folder / "tokenizer.json")},
            "packing": packing,
            "shuffle": False,
            "seq_len": length,
        },
        "objective": objective,
        "optimizer": {"preset": "adamw", "learning_rate": 1e-4},
        "train": {"steps": args.steps, "batch_size": rows},
    }
    path = folder / "run.yml"
    path.write_text(json.dumps(cfg))
    peak = process([sys.executable, "-c", CHILD, sys.executable, "-m", "maxstack.train", path])
    steps = metrics.rows(folder / f"{name}-{packing}-{turn}" / "metrics.jsonl", "step_seconds")
    seconds = [row["step_seconds"] for row in steps[SKIPPED:]]
    tokens = real_tokens(path, args.steps)[SKIPPED:]
    return {"tokens_per_second": sum(tokens) / sum(seconds), "peak_mib": float(peak)}


def real_tokens(path: Path, steps: int) -> list[int]:
    """Tokens of records in the batches of a run, the last of a record, which is no input, too."""
    from maxstack.data.feed import Feed
    from maxstack.load import load
    from maxstack.objectives.objective import objective_of

    cfg = load(path)
    size = cfg.train.batch_size
    feed = Feed(cfg.data, range(size), size, fields=objective_of(cfg).fields)
    try:
        batches = [next(feed) for _ in range(steps)]
    finally:
        feed.close()
    return [
        int((batch["segments"] > 0).sum() + batch["segments"].max(1).sum()) for batch in batches
    ]


def theirs(folder: Path, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s and memory of TRL."""
    words = ["--folder", folder, "--objective", name]
    words += ["--records", args.records, "--steps", args.steps, "--model", json.dumps(MODEL)]
    said = process([args.peer_python, ROOT / "scripts/bench/post_trl.py", *words])
    figures = json.loads(said.splitlines()[-1])
    seconds, tokens = figures["seconds"][SKIPPED - 1 :], figures["tokens"][SKIPPED:]
    return {"tokens_per_second": sum(tokens) / sum(seconds), "peak_mib": figures["peak_mib"]}


def process(words: list[Any]) -> str:
    """What a process prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*map(str, words)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout


def table(name: str, figures: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, and ratios round by round to the peer."""
    print(f"| {name} | tokens/s | over TRL (quartiles) | peak MiB |\n{'| --- ' * 4}|")
    for title, rounds in figures.items():
        rates = [row["tokens_per_second"] for row in rounds]
        peak = statistics.median(row["peak_mib"] for row in rounds)
        ratio = ""
        if "TRL" in figures and title != "TRL":
            peer = [row["tokens_per_second"] for row in figures["TRL"]]
            ratios = sorted(a / b for a, b in zip(rates, peer, strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            ratio = f"{statistics.median(ratios):.2f} ({low:.2f}, {high:.2f})"
        print(f"| {title} | {statistics.median(rates):,.0f} | {ratio} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
