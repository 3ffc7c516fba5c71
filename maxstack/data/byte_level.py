"""Byte-level BPE (Radford et al. 2019) in vocab.json and merges.txt, without tokenizer.json."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.config import quoted
from maxstack.config.errors import DataError
from maxstack.data.json_files import read_object

VOCAB, MERGES = "vocab.json", "merges.txt"
LARGEST = 1 << 28
END = "<|endoftext|>"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Split(NamedTuple):
    """How text is cut into words before merges are applied; the two files do not say it."""

    tokenizer_class: str
    """In tokenizer_config.json, with or without `Fast`."""
    pattern: str | None
    """Of a word, for text in Unicode's composed form; None: GPT-2's own, for text as it is."""
    defaults: dict[str, str]
    """Special tokens that no file needs to name."""


_GPT2 = Split("GPT2Tokenizer", None, {"bos_token": END, "eos_token": END, "unk_token": END})
# From tokenizer.json of Qwen/Qwen2-7B: contractions; words with what is before them; digits one by
# one; punctuation; line ends; spaces.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = Split(
    "Qwen2Tokenizer", _QWEN2_PATTERN, {"eos_token": END, "unk_token": END, "pad_token": END}
)
_QWENS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next")
SPLITS = {"gpt2": _GPT2} | dict.fromkeys(_QWENS, _QWEN2)
"""By `model_type` of config.json. Other models name these classes of tokenizers too, and bring a
pattern of their own in tokenizer.json."""


def split_of(folder: Path) -> Split | None:
    """How the tokenizer of a folder with vocab.json and merges.txt splits text; None: not known."""
    split = SPLITS.get(str(read(folder / "config.json").get("model_type")))
    said = read(folder / "tokenizer_config.json").get("tokenizer_class")
    return (
        split
        if split and said in (None, split.tokenizer_class, f"{split.tokenizer_class}Fast")
        else None
    )


def tokenizer_json(vocab: Path) -> bytes:
    """The tokenizer.json that means the same as vocab.json and the files beside it.

    It is checked against transformers in scripts/oracle.py. DataError where the files do not say
    how text is split; any error of the tokenizers library for files that are damaged.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    folder, split = vocab.parent, split_of(vocab.parent)
    if split is None:
        raise DataError(f"{vocab}: {unknown(folder)}")
    _check_vocabulary(vocab)
    made: Any = Tokenizer(BPE.from_file(str(vocab), str(folder / MERGES)))
    space = bool(read(folder / "tokenizer_config.json").get("add_prefix_space"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=space, use_regex=split.pattern is None
    )
    if split.pattern:
        words = pre_tokenizers.Split(Regex(split.pattern), "isolated")
        made.normalizer, made.pre_tokenizer = (
            normalizers.NFC(),
            pre_tokenizers.Sequence([words, made.pre_tokenizer]),
        )
    made.decoder = decoders.ByteLevel()
    for token, wanted in _added(folder, split):
        made.add_tokens([token])
        if (found := made.token_to_id(token.content)) != (found if wanted is None else wanted):
            raise DataError(
                f"{folder}: added token {token.content!r} has id {wanted}, and after "
                f"{VOCAB} and those before it comes {found}; give it that id, or fill the gap"
            )
    return made.to_str().encode()


def unknown(folder: Path) -> str:
    """Why `split_of` gives nothing."""
    names = ", ".join(
        f"{key}={read(folder / file).get(key)}"
        for file, key in (
            ("config.json", "model_type"),
            ("tokenizer_config.json", "tokenizer_class"),
        )
    )
    return (
        f"{VOCAB} and {MERGES} do not say how text is split before merges, and for {names} "
        "that is not known"
    )


def special_tokens(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; with special_tokens_map.json above it unless it lists added tokens
    itself, as in transformers."""
    said = read(folder / "tokenizer_config.json")
    return (
        said if "added_tokens_decoder" in said else said | read(folder / "special_tokens_map.json")
    )


def content(token: Any) -> str | None:
    """A token is written as text, or as a mapping with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def read(path: Path) -> dict[str, Any]:
    """A JSON object beside a model, empty where there is no such file; DataError for damage."""
    return read_object(path, LARGEST) if os.path.lexists(path) else {}


def _check_vocabulary(vocab: Path) -> None:
    """DataError for a vocabulary of which the tokenizers library would leave tokens out."""
    if not (ids := read(vocab)):
        raise DataError(f"{vocab}: holds no token; get the file anew")
    _check_ids(ids, vocab)


def _check_ids(ids: dict[str, Any], path: Path) -> None:
    """DataError for a token -> id of which an id is no whole number >= 0, or is of two tokens."""
    tokens: dict[int, str] = {}
    for token, number in ids.items():
        if type(number) is not int or number < 0:
            raise DataError(
                f"{path}: token {quoted(token)} has id {quoted(number)}, and ids are whole numbers "
                "from 0 on; get the file anew"
            )
        if number in tokens:
            raise DataError(
                f"{path}: tokens {quoted(tokens[number])} and {quoted(token)} have the same id, "
                f"{number}; get the file anew"
            )
        tokens[number] = token


def _decoded(said: Any, path: Path) -> dict[int, Any]:
    """Id -> token, of the added_tokens_decoder in the tokenizer_config.json at `path`."""
    from tokenizers import AddedToken

    if not isinstance(said, dict):
        raise DataError(f"{path}: added_tokens_decoder={quoted(said)}: must be a mapping of ids")
    found = {}
    for key, token in said.items():
        where = f"{path}: added_tokens_decoder: key {quoted(key)}"
        if re.fullmatch("[0-9]{1,9}", key) is None:
            raise DataError(f"{where} is no id, which is a whole number from 0 on")
        try:
            found[int(key)] = AddedToken(**token)
        except TypeError as error:
            raise DataError(
                f"{where} has {quoted(token)}, which is no mapping of a token's content and "
                f"settings: {error}"
            ) from error
    return found


def _added(folder: Path, split: Split) -> Iterator[tuple[Any, int | None]]:
    """Added tokens by their ids, and then special ones for which no file has an id."""
    from tokenizers import AddedToken

    said = split.defaults | special_tokens(folder)
    listed = [*map(said.get, NAMED)]
    for more in ("additional_special_tokens", "extra_special_tokens"):
        listed += said.get(more) or ()
    named = [text for text in dict.fromkeys(map(content, listed)) if text]
    if "added_tokens_decoder" in said:
        found = _decoded(said["added_tokens_decoder"], folder / "tokenizer_config.json")
    else:
        given = read(folder / "added_tokens.json")
        _check_ids(given, folder / "added_tokens.json")
        found = {
            key: AddedToken(text, special=text in named, normalized=text not in named)
            for text, key in given.items()
        }
    for key in sorted(found):
        found[key].special |= found[key].content in named
        yield found[key], key
    known = {token.content for token in found.values()}
    yield from (
        (AddedToken(text, special=True, normalized=False), None)
        for text in named
        if text not in known
    )
