"""Byte-level BPE (Radford et al. 2019) in vocab.json and merges.txt, without tokenizer.json.

The two files lack the pattern that splits a text into words before merges are applied. Another
pattern gives other ids than those of training, so only models whose pattern is known are read
(SPLITS). Added and special tokens come from the files beside them. All of it becomes one
tokenizer.json, so that the class that reads such files reads these too.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.errors import DataError, quoted
from maxstack.strict_json import read_object

VOCAB, MERGES = "vocab.json", "merges.txt"
MOST_IDS = 1 << 22
"""Ids of a vocabulary: tables of so many entries are made. Published ones have 10**6 at most."""
END = "<|endoftext|>"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's: a printable byte is the character of its number, the others follow from 256 on.
_BYTES = {256 + index: byte for index, byte in enumerate(_OTHERS)}
_WRITTEN = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(code) for code, b in _BYTES.items()}
_ALPHABET = frozenset(map(chr, (*_PRINTABLE, *_BYTES)))


class Split(NamedTuple):
    """The division of text into words before merges are applied, which the two files lack."""

    tokenizer_class: str
    """In tokenizer_config.json, with or without `Fast`."""
    pattern: str | None
    """A word's, in Unicode's composed form; None: GPT-2's own pattern, for text as it is."""
    defaults: dict[str, str]
    """Special tokens of models whose files do not name them."""


_GPT2 = Split("GPT2Tokenizer", None, {"bos_token": END, "eos_token": END, "unk_token": END})
# From tokenizer.json of Qwen/Qwen2-7B: contractions; words with the character before them; single
# digits; punctuation; line ends; spaces.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = Split(
    "Qwen2Tokenizer", QWEN2_PATTERN, {"eos_token": END, "unk_token": END, "pad_token": END}
)
_QWENS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next")
SPLITS = {"gpt2": _GPT2} | dict.fromkeys(_QWENS, _QWEN2)
"""By `model_type` of config.json. Other models name these classes of tokenizers too, with a pattern
of their own in tokenizer.json."""


def bytes_of(token: str) -> bytes:
    """Return the bytes that a token of a vocabulary writes as one character each; those of a token
    with other characters are its UTF-8."""
    if _ALPHABET.issuperset(token):
        return token.translate(_BYTES).encode("latin-1")
    return token.encode()


def to_letters(token: bytes) -> str:
    """Return bytes as a vocabulary writes them: the inverse of `bytes_of`."""
    return "".join(_WRITTEN[byte] for byte in token)


def known_split(folder: Path) -> Split | None:
    """Return the split of a folder's vocab.json and merges.txt; None if config.json and
    tokenizer_config.json do not name a known one."""
    split = SPLITS.get(str(read_json(folder / "config.json").get("model_type")))
    named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if split and named in (None, split.tokenizer_class, f"{split.tokenizer_class}Fast"):
        return split
    return None


def tokenizer_json(vocab: Path) -> bytes:
    """Return the tokenizer.json equivalent to vocab.json and the files beside it.

    scripts/oracle.py checks it against transformers. DataError if the split is not known; any error
    of the tokenizers library for damaged files.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    folder, split = vocab.parent, known_split(vocab.parent)
    if split is None:
        raise DataError(f"{vocab}: {why_unknown(folder)}")
    if not (ids := read_json(vocab)):
        raise DataError(f"{vocab}: holds no token; download the file again")
    _check_ids(ids, vocab)  # the tokenizers library would drop some of them
    tokenizer: Any = Tokenizer(BPE.from_file(str(vocab), str(folder / MERGES)))
    space = bool(read_json(folder / "tokenizer_config.json").get("add_prefix_space"))
    # The expression of ByteLevel is GPT-2's; beside another pattern it would split words again.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=space, use_regex=split.pattern is None
    )
    if split.pattern:
        words = pre_tokenizers.Split(Regex(split.pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, tokenizer.pre_tokenizer])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, wanted in _added_tokens(folder, split):
        tokenizer.add_tokens([token])
        number = tokenizer.token_to_id(token.content)
        # The library numbers added tokens on from the vocabulary, whatever the files say.
        if wanted not in (None, number):
            raise DataError(
                f"{folder}: added token {token.content!r} has id {wanted}, and after "
                f"{VOCAB} and those before it comes {number}; give it that id, or fill the gap"
            )
    return tokenizer.to_str().encode()


def bytes_tokenizer_files() -> dict[str, Any]:
    """Return files that make transformers' tokenizer of single bytes, whose id 256 is END."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {_WRITTEN[byte]: byte for byte in range(256)}
    tokenizer: Any = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": named | {"clean_up_tokenization_spaces": False},
    }


def why_unknown(folder: Path) -> str:
    """Return the reason why `known_split` gives None."""
    model_type = read_json(folder / "config.json").get("model_type")
    tokenizer_class = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    return (
        f"{VOCAB} and {MERGES} do not say how text is split before merges, and for "
        f"model_type={model_type}, tokenizer_class={tokenizer_class} that is not known"
    )


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json. Unless it lists added tokens itself, special_tokens_map.json
    replaces its keys, as in transformers."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | read_json(folder / "special_tokens_map.json")


def read_ends(folder: Path, processor: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return bos and eos, the text of the tokens that begin and end a document by the files of a
    folder. Without add_bos_token the post_processor of tokenizer.json decides about bos."""
    split = known_split(folder)
    settings = (split.defaults if split else {}) | read_special_tokens(folder)
    bos, adds = token_text(settings.get("bos_token")), settings.get("add_bos_token")
    # Files that do not say it leave it to the post-processor, which transformers runs on each text.
    if adds is None:
        before = tokens_before(processor)
        adds, bos = bool(before), bos if bos in before else next(iter(before), None)
    return {"bos": bos if adds else None, "eos": token_text(settings.get("eos_token"))}


def tokens_before(processor: Mapping[str, Any] | None) -> list[str]:
    """Return special tokens that the post_processor of a tokenizer.json puts before a text."""
    tokens = []
    for part in processor.get("processors", [processor]) if processor else ():
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            tokens.append(part["cls"][0])
        for item in part.get("single", ()):
            # What follows the text is no beginning.
            if "SpecialToken" not in item:
                break
            tokens.append(item["SpecialToken"]["id"])
    return tokens


def token_text(token: Any) -> str | None:
    """Return the text of a token, which is written as text or as a mapping with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object beside a model, empty if there is no such file; DataError for damage."""
    return read_object(path) if os.path.lexists(path) else {}


def _check_ids(ids: dict[str, Any], path: Path) -> None:
    """Raise DataError if an id of token -> id is no whole number >= 0, or two tokens share one."""
    tokens: dict[int, str] = {}
    for token, number in ids.items():
        # isinstance would take true and false of JSON for 1 and 0.
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise DataError(
                f"{path}: token {quoted(token)} has id {quoted(number)}, and ids are whole numbers "
                f"from 0 on, below {MOST_IDS:,}; download the file again"
            )
        if number in tokens:
            raise DataError(
                f"{path}: tokens {quoted(tokens[number])} and {quoted(token)} have the same id, "
                f"{number}; download the file again"
            )
        tokens[number] = token


def _parse_decoder(decoder: Any, path: Path) -> dict[int, Any]:
    """Return id -> token, from the added_tokens_decoder in the tokenizer_config.json at `path`."""
    from tokenizers import AddedToken

    if not isinstance(decoder, dict):
        raise DataError(f"{path}: added_tokens_decoder={quoted(decoder)}: must be a mapping of ids")
    tokens = {}
    for key, token in decoder.items():
        where = f"{path}: added_tokens_decoder: key {quoted(key)}"
        # int() takes "+1", "1_0" and digits of other scripts too.
        if re.fullmatch("[0-9]{1,9}", key) is None:
            raise DataError(f"{where} is no id, which is a whole number from 0 on")
        try:
            tokens[int(key)] = AddedToken(**token)
        except TypeError as error:
            raise DataError(
                f"{where} has {quoted(token)}, which is no mapping of a token's content and "
                f"settings: {error}"
            ) from error
    return tokens


def _added_tokens(folder: Path, split: Split) -> Iterator[tuple[Any, int | None]]:
    """Yield added tokens with their ids, in the order of these, and then special tokens for which
    no file has an id, with None."""
    from tokenizers import AddedToken

    config = split.defaults | read_special_tokens(folder)
    special = [config.get(key) for key in NAMED]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        special += config.get(key) or ()
    names = [text for text in dict.fromkeys(map(token_text, special)) if text]
    if "added_tokens_decoder" in config:
        tokens = _parse_decoder(config["added_tokens_decoder"], folder / "tokenizer_config.json")
    else:
        ids = read_json(folder / "added_tokens.json")
        _check_ids(ids, folder / "added_tokens.json")
        tokens = {
            number: AddedToken(text, special=text in names, normalized=text not in names)
            for text, number in ids.items()
        }
    for number, token in sorted(tokens.items()):
        token.special |= token.content in names
        yield token, number
    numbered = {token.content for token in tokens.values()}
    for text in names:
        if text not in numbered:
            yield AddedToken(text, special=True, normalized=False), None
