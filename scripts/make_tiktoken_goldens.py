"""Makes tests/goldens/tiktoken: a file of ranks that is learnt of this project's text and of many
scripts' characters, and the ids that tiktoken gives of some texts by the patterns of Kimi K2, Qwen
1 and Llama 3; and compares maxstack's with it on 4,000 texts each.

The patterns are written out here as the models' code has them (tokenization_kimi.py of
moonshotai/Kimi-K2-Instruct, tokenization_qwen.py of Qwen/Qwen-7B, llama3/tokenizer.py of
meta-llama/llama3), apart from maxstack's own. Needs tiktoken and regex.

example: python scripts/make_tiktoken_goldens.py --check
"""

import base64
import json
import random
import sys
import tempfile
from pathlib import Path

from bench import arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDER = ROOT / "tests" / "goldens" / "tiktoken"
TEXTS, KEPT, RANKS = 4000, 40, 1500
PATTERNS = {
    "tiktoken.model": "|".join(
        [
            r"[\p{Han}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    "qwen.tiktoken": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tokenizer.model": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
CHARACTERS = (
    *((9, 14), (32, 127), (160, 192), (0x300, 0x340), (0x370, 0x400), (0x400, 0x460)),
    *((0x5D0, 0x5EB), (0x621, 0x64B), (0x905, 0x940), (0xE01, 0xE3B), (0x1100, 0x1160)),
    *((0x2000, 0x202A), (0x3041, 0x3097), (0x4E00, 0x4F00), (0x2F00, 0x2F20), (0xAC00, 0xAC80)),
    *((0x1F5, 0x200), (0x2160, 0x2180), (0x1F600, 0x1F640), (0xFF10, 0xFF3B)),
)


def main() -> int:
    """Make or compare; 1 where something differs."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    check = parser.parse_args().check
    import tiktoken
    import tiktoken.load

    from maxstack.data.tokenizers import open_tokenizer
    from maxstack.schema.data import HuggingFaceTokenizer

    rng = random.Random(0)
    source = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    texts = [_text(rng, source) for _ in range(TEXTS)]
    lines = _learnt(source, texts)
    golden, wrong = {"texts": texts[:KEPT], "ids": {}}, 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, pattern in PATTERNS.items():
            folder = Path(temporary) / name
            folder.mkdir()
            (folder / name).write_text(lines)
            ranks = tiktoken.load.load_tiktoken_bpe(str(folder / name))
            theirs = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
            classes = {"tiktoken.model": "TikTokenTokenizer", "qwen.tiktoken": "QWenTokenizer"}
            config = {"tokenizer_class": classes.get(name)}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            settings = {"kind": "huggingface", "path": str(folder / name)}
            ours = open_tokenizer(HuggingFaceTokenizer.model_validate(settings))
            ids = [theirs.encode_ordinary(text) for text in texts]
            differ = sum(
                ours.encode(text.encode()).tolist() != own
                for text, own in zip(texts, ids, strict=True)
            )
            print(f"{name}: {differ} of {TEXTS:,} texts differ")
            wrong += differ
            golden["ids"][name] = ids[:KEPT]
    files = {"ranks.tiktoken": lines, "golden.json": json.dumps(golden) + "\n"}
    if not check:
        FOLDER.mkdir(exist_ok=True)
        for name, text in files.items():
            (FOLDER / name).write_text(text)
    same = all((FOLDER / name).read_text() == text for name, text in files.items())
    print("same" if same else "differs")
    return 0 if same and not wrong else 1


def _text(rng: random.Random, source: str) -> str:
    """Random characters of many scripts, or a passage with some of them in it."""
    codes = [code for first, after in CHARACTERS for code in range(first, after)]
    odd = "".join(map(chr, rng.choices(codes, k=rng.randint(1, 40))))
    if rng.random() < 0.5:
        return odd
    at = rng.randrange(len(source) - 200)
    passage = source[at : at + rng.randint(1, 160)]
    return passage + rng.choice(("", "'S", "'re", "\r\n ", "12345", " 漢字ABCdef", odd))


def _learnt(source: str, texts: list[str]) -> str:
    """A file of ranks: the bytes, and tokens in the order in which they were learnt."""
    import tokenizers

    from maxstack.data.byte_level import bytes_of

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([source, *texts], vocab_size=RANKS, show_progress=False)
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes_of(token) for token, _ in vocab]
    encoded = (base64.b64encode(token).decode() for token in tokens)
    return "".join(f"{token} {rank}\n" for rank, token in enumerate(encoded))


if __name__ == "__main__":
    sys.exit(main())
