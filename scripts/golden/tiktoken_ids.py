"""tiktoken/: a file of ranks that is learnt from this project's text and many scripts' characters,
and the ids that tiktoken gives for some texts by the patterns of Kimi K2, Qwen 1 and Llama 3.
Maxstack's ids are compared on 4,000 texts each. Ranks and texts that are there stay, since the
project's text changes; delete the folder to learn new ones.
"""

import base64
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import tiktoken
import tiktoken.load
import tokenizers
from make_goldens import GOLDENS, ROOT, TABLE

from maxstack.data.byte_level import bytes_of
from maxstack.data.tokenizers import open_tokenizer
from maxstack.schema.data import HuggingFaceTokenizer

NAMES, CLOSE = ["tiktoken"], 0.0
TEXTS, KEPT = 4000, 40
RANKS = 1500


def make(name: str, out: Path) -> None:
    """Write the files; SystemExit if maxstack's ids are not tiktoken's."""
    rng = random.Random(0)
    source = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    texts = [draw(rng, source) for _ in range(TEXTS)]
    kept = GOLDENS / "tiktoken"
    if kept.exists():
        lines = (kept / "ranks.tiktoken").read_text()
        texts[:KEPT] = json.loads((kept / "golden.json").read_text())["texts"]
    else:
        lines = learn(source, texts)
    ids = {}
    for file, pattern in TABLE["tiktoken"]["patterns"].items():
        with tempfile.TemporaryDirectory() as temporary:
            theirs, ours = encoders(Path(temporary), file, pattern, lines)
        expected = [theirs.encode_ordinary(text) for text in texts]
        pairs = zip(texts, expected, strict=True)
        differ = sum(ours.encode(text.encode()).tolist() != own for text, own in pairs)
        if differ:
            raise SystemExit(f"{file}: {differ} of {TEXTS:,} texts have other ids")
        ids[file] = expected[:KEPT]
    (out / "tiktoken").mkdir()
    (out / "tiktoken" / "ranks.tiktoken").write_text(lines)
    golden = json.dumps({"texts": texts[:KEPT], "ids": ids})
    (out / "tiktoken" / "golden.json").write_text(golden + "\n")


def encoders(folder: Path, file: str, pattern: str, lines: str) -> tuple[Any, Any]:
    """tiktoken's and maxstack's tokenizer for a file of ranks."""
    (folder / file).write_text(lines)
    config = json.dumps({"tokenizer_class": TABLE["tiktoken"]["classes"].get(file)})
    (folder / "tokenizer_config.json").write_text(config)
    ranks = tiktoken.load.load_tiktoken_bpe(str(folder / file))
    theirs = tiktoken.Encoding(file, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    settings = {"kind": "huggingface", "path": str(folder / file)}
    return theirs, open_tokenizer(HuggingFaceTokenizer.model_validate(settings))


def draw(rng: random.Random, source: str) -> str:
    """Random characters of many scripts, or a passage with some of them in it."""
    codes = [
        code for first, after in TABLE["tiktoken"]["characters"] for code in range(first, after)
    ]
    odd = "".join(map(chr, rng.choices(codes, k=rng.randint(1, 40))))
    if rng.random() < 0.5:
        return odd
    at = rng.randrange(len(source) - 200)
    passage = source[at : at + rng.randint(1, 160)]
    return passage + rng.choice(("", "'S", "'re", "\r\n ", "12345", " 漢字ABCdef", odd))


def learn(source: str, texts: list[str]) -> str:
    """A file of ranks: the bytes, and tokens in the order in which they were learnt."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([source, *texts], vocab_size=RANKS, show_progress=False)
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes_of(token) for token, _ in vocab]
    encoded = (base64.b64encode(token).decode() for token in tokens)
    return "".join(f"{token} {rank}\n" for rank, token in enumerate(encoded))
