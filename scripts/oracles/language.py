"""Model families, adapters and tokenizers beside transformers and peft.

For each golden folder our logits and gradients are compared, and the folder is imported, exported
and loaded by transformers, tensor by tensor. One model is trained on 8 virtual devices in between.
"""

import json
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import parity
import tokenizers
import torch
from golden.adapters import logits, logits_of
from golden.tiktoken_ids import draw
from oracle import maxstack, report, same_tensors
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from maxstack.data.byte_level import tokenizer_json

HEAD = [
    "| Family | Parameters checked | Logits error | Same argmax | Gradient error | Round "
    "trip | transformers loads the export |",
    "| --- " * 7 + "|",
]
TRAINED = "qwen3_moe"
ADAPTED = (
    ("llama", "{rank: 4}"),
    ("qwen3", "{rank: 4, dora: true, rslora: true}"),
    ("phi3", "{rank: 2}"),
    ("gpt2", "{rank: 2, dora: true}"),
    ("deepseek_v3", "{rank: 2, targets: ['.*/mixer']}"),
    ("qwen3_next", "{rank: 2, targets: ['.*/mixer']}"),
)
TEXTS, ADDED = 4000, ("<|im_end|>", "<tool>")
TOKENIZERS = tuple(
    (kind, named)
    for kind in ("gpt2", "qwen2", "qwen3", "qwen3_moe")
    for named in ("defaults", "added_tokens.json", "tokenizer_config.json")
)


def compare(only: list[str] | None) -> list[str]:
    """Print the table -> the families that are not at par; all of them write docs/MODELS.md."""
    lines, bad = [*HEAD], []
    for family in tqdm(only or parity.FAMILIES, unit=" families"):
        line, good = row(family)
        lines.append(line)
        bad += [] if good else [family]
    if only:
        report(lines, None)
        return bad
    error = trained()
    adapters = {f"{family}, {settings}": adapted(family, settings) for family, settings in ADAPTED}
    ids = {f"{kind} ({named})": tokenized(kind, named) for kind, named in TOKENIZERS}
    bad += [f"{TRAINED} after training"] if error > parity.LOGITS else []
    bad += [name for name, off in adapters.items() if off > parity.LOGITS]
    bad += [name for name, wrong in ids.items() if wrong]
    told = "; ".join(f"{name}: {off:.1e}" for name, off in adapters.items())
    texts = "; ".join(f"{name}: {wrong or 'none'}" for name, wrong in ids.items())
    lines += [
        "",
        f"{TRAINED}, imported, trained for 5 steps on 8 virtual devices (data 2 x fsdp 2 "
        "x tensor 2), exported, loaded by it: "
        f"logits within {error:.1e} of maxstack's own.",
        "",
        "Adapters trained by maxstack, exported, and loaded by peft over its model; "
        f"logits of that, and of the merged export, against maxstack's own: {told}.",
        "",
        f"Tokenizers read from vocab.json and merges.txt: of {TEXTS:,} texts, those whose "
        f"ids are not transformers': {texts}.",
    ]
    report(lines, "MODELS.md")
    return bad


def row(family: str) -> tuple[str, bool]:
    """The line of a family, and whether it is at par."""
    folder = parity.GOLDENS / family
    measured = parity.measure(folder)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        parity.export_again(folder, out)
        exact = same_tensors(folder, out)
        loads = distance(out, np.load(folder / "golden.npz")) <= parity.LOGITS
    close = measured.logits <= parity.LOGITS and measured.gradient <= parity.GRADIENT
    cells = [
        family,
        f"{measured.parameters:,}",
        f"{measured.logits:.1e}",
        yes(measured.argmax),
        f"{measured.gradient:.1e}",
        "bit for bit" if exact else "**differs**",
        yes(loads),
    ]
    return f"| {' | '.join(cells)} |", measured.argmax and close and exact and loads


def distance(folder: Path, wanted: Mapping[str, np.ndarray]) -> float:
    """Largest difference of transformers' logits from `logits` of `tokens`, over their deviation;
    infinite if it does not load every tensor, and no other."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    if any(report.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return math.inf
    tokens, lengths, expected = (wanted[name] for name in ("tokens", "lengths", "logits"))
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    difference = logits_of(model, tokens, lengths) - expected
    return float(np.abs(difference[real]).max() / expected[real].std())


def score(run: Path, family: str, *words: str) -> Mapping[str, np.ndarray]:
    """Tokens, lengths and maxstack's logits of a trained run, on the tokens of a golden."""
    golden = np.load(parity.GOLDENS / family / "golden.npz")
    tokens, scores = run.with_name("tokens.npz"), run.with_name("scores.npz")
    np.savez(tokens, tokens=golden["tokens"], lengths=golden["lengths"])
    maxstack("score", run, "--tokens", tokens, "--out", scores, "--logits", *words)
    return dict(np.load(scores))


def trained() -> float:
    """Error of transformers' logits for a model that was imported, trained on a mesh and
    exported."""
    with tempfile.TemporaryDirectory() as temporary:
        run, out = Path(temporary) / "run", Path(temporary) / "out"
        maxstack("import", parity.GOLDENS / TRAINED, "--out", run)
        maxstack(
            "train",
            run / "config.yml",
            "train.steps=5",
            "train.batch_size=8",
            "data.seq_len=32",
            "model.dtype=float32",
            "run.virtual_devices=8",
            "mesh.fsdp=2",
            "mesh.tensor=2",
            "optimizer.learning_rate=1e-2",
        )
        scores = score(run, TRAINED, "model.dtype=float32")
        maxstack("export", run, "--out", out)
        return distance(out, scores)


def adapted(family: str, settings: str) -> float:
    """Error of peft's logits, and of transformers' for the merged export, for an adapter that was
    trained on a golden folder."""
    golden = parity.GOLDENS / family
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "run.yml").write_text(
            f"model: {{from: {golden}, dtype: float32}}\nlora: {settings}\n"
        )
        maxstack(
            "train",
            folder / "run.yml",
            "data={sources: [{kind: synthetic, vocab: 100}], seq_len: 16}",
            "run.name=run",
            f"run.output_dir={folder}",
            "train.steps=5",
            "train.batch_size=8",
            "optimizer.learning_rate=2e-2",
            "checkpoint.every=5",
        )
        maxstack("lora", "export", folder / "run", "--out", folder / "adapter")
        maxstack("export", folder / "run", "--out", folder / "merged")
        scores = score(folder / "run", family)
        theirs = logits(golden, folder / "adapter", scores["tokens"], scores["lengths"])
        error = np.abs(theirs - scores["logits"]).max() / theirs.std()
        return float(max(error, distance(folder / "merged", scores)))


def tokenized(model_type: str, named: str) -> int:
    """Number of TEXTS random texts whose ids differ from transformers', by vocab.json and
    merges.txt; added tokens are `named` in a file, or the defaults."""
    rng, source = random.Random(0), Path(__file__).read_text()
    texts = [draw(rng, source) + rng.choice(("", *ADDED)) for _ in range(TEXTS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(
            [source], vocab_size=700, show_progress=False, special_tokens=["<|endoftext|>"]
        )
        trained.save_model(temporary)
        size = trained.get_vocab_size()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        if named == "added_tokens.json":
            ids = {token: size + i for i, token in enumerate(ADDED)}
            (folder / "added_tokens.json").write_text(json.dumps(ids))
            special = {"eos_token": ADDED[0], "additional_special_tokens": [ADDED[0]]}
            (folder / "special_tokens_map.json").write_text(json.dumps(special))
        elif named == "tokenizer_config.json":
            decoder = {
                str(size + i): {"content": token, "special": i == 0}
                for i, token in enumerate(ADDED)
            }
            (folder / named).write_text(json.dumps({"added_tokens_decoder": decoder}))
        theirs = AutoTokenizer.from_pretrained(folder)
        ours = tokenizers.Tokenizer.from_buffer(tokenizer_json(folder / "vocab.json"))
        return sum(
            ours.encode(text, add_special_tokens=False).ids
            != theirs(text, add_special_tokens=False)["input_ids"]
            for text in texts
        )


def yes(value: bool) -> str:
    """A cell of the table."""
    return "yes" if value else "**no**"
