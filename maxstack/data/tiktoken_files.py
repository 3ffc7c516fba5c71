"""Byte-level BPE in the files of tiktoken, a line for each token with its bytes in base64 and its
rank, as Kimi K2, Qwen 1 and the original Llama 3 are published.

tiktoken merges the pair whose union has the lowest rank, and takes a word that is a token whole.
The tokenizers library merges by an order of pairs: here all pairs of tokens whose union is a token,
by the rank of that. How texts are cut into words, and what the special tokens are called, stands in
code beside the files, which is not run: it is known here of these models alone.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.config import storage
from maxstack.data.byte_level import read_json, to_letters, token_text
from maxstack.errors import DataError
from maxstack.regular_file import open_regular, read_regular

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS, _LINES = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_RESERVED = 256
LLAMA_RESERVED = 256
QWEN_RESERVED = 205


class Known(NamedTuple):
    """What a model's own code says of its tokenizer."""

    pattern: str
    """A word's."""
    special: Callable[[int, Path], dict[int, tuple[str, bool]]]
    """A function of the number of ranks and the folder to the tokens after them: their text, and
    whether they are special."""


def _of_kimi(first: int, folder: Path) -> dict[int, tuple[str, bool]]:
    """Return those that tokenizer_config.json names, and names for the others of 256."""
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    named: dict[int, tuple[str, bool]] = {}
    for number, token in decoder.items():
        text = token_text(token)
        if text is not None and number.isdecimal():
            named[int(number)] = text, bool(token.get("special"))
    ids = range(first, first + KIMI_RESERVED)
    return {i: named.get(i, (f"<|reserved_token_{i}|>", True)) for i in ids}


def _of_llama(first: int, folder: Path) -> dict[int, tuple[str, bool]]:
    reserved = "<|reserved_special_token_{}|>".format
    names = ["<|begin_of_text|>", "<|end_of_text|>", *map(reserved, range(4))]
    names += ["<|start_header_id|>", "<|end_header_id|>", reserved(4), "<|eot_id|>"]
    names += map(reserved, range(5, LLAMA_RESERVED - 5))
    return {first + i: (name, True) for i, name in enumerate(names)}


def _of_qwen(first: int, folder: Path) -> dict[int, tuple[str, bool]]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names += [f"<|extra_{i}|>" for i in range(QWEN_RESERVED)]
    return {first + i: (name, True) for i, name in enumerate(names)}


KIMI = Known(
    rf"[\p{{Han}}]+|{_WORDS}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORDS}{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_LINES}",
    _of_kimi,
)
LLAMA = Known(rf"{_ENDINGS}|{_WORDS}\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}", _of_llama)
QWEN = Known(rf"{_ENDINGS}|{_WORDS}\p{{L}}+|\p{{N}}|{_LINES}", _of_qwen)
FILES = {"tiktoken.model": KIMI, "qwen.tiktoken": QWEN, "tokenizer.model": LLAMA}
CLASSES = {"tiktoken.model": "TikTokenTokenizer", "qwen.tiktoken": "QWenTokenizer"}
"""tokenizer_class in tokenizer_config.json, by which the code is known that a file needs."""


def is_tiktoken(path: Path) -> bool:
    """Return True for a file of tiktoken: by its name, or, of tokenizer.model, which may be one of
    SentencePiece, by how it begins."""
    if path.name not in FILES or not path.is_file():
        return False
    if path.name != "tokenizer.model":
        return True
    with open_regular(path) as file:
        token, _, rank = file.readline(200).partition(b" ")
    return rank.strip().isdigit() and b"\0" not in token


def why_unknown(path: Path) -> str:
    """Why a file of tiktoken cannot be read; empty if it can."""
    wanted, folder = CLASSES.get(path.name), path.parent
    named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if wanted is None or named == wanted:
        return ""
    return (
        f"{path.name} does not say how text is cut into words; that is known of "
        f"tokenizer_class={wanted}, and tokenizer_config.json names {named}"
    )


def tokenizer_json(path: Path) -> bytes:
    """Return the tokenizer.json that is equivalent to a file of tiktoken and to what its model's
    code does with it. DataError for a file that is damaged, or of an unknown model."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    if why := why_unknown(path):
        raise DataError(f"{path}: {why}")
    ranks, known = _ranks(path), FILES[path.name]
    merges = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            first, second = ranks.get(token[:at]), ranks.get(token[at:])
            if first is not None and second is not None:
                merges.append((rank, first, second))
    written = {rank: to_letters(token) for token, rank in ranks.items()}
    pairs = [(written[first], written[second]) for _, first, second in sorted(merges)]
    vocab = {text: rank for rank, text in written.items()}
    made: Any = Tokenizer(BPE(vocab, pairs, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(known.pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    made.decoder = decoders.ByteLevel()
    for number, (text, special) in sorted(known.special(len(ranks), path.parent).items()):
        made.add_tokens([AddedToken(text, special=special, normalized=False)])
        if (found := made.token_to_id(text)) != number:
            raise DataError(f"{path}: token {text!r} has id {number} and {found}")
    return made.to_str().encode()


def _ranks(path: Path) -> Mapping[bytes, int]:
    """Return token -> rank, from 0 on without a gap."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_regular(path, storage.WHOLE).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}:{number}: must be a token in base64 and its rank; download the file again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(
            f"{path}: ranks are not 0 to {len(ranks) - 1}, each once; download it again"
        )
    return ranks
