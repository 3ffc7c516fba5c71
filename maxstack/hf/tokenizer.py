"""The tokenizer of a model folder, as a section of the configuration."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from maxstack.data import byte_level, tiktoken_files
from maxstack.data.byte_level import read_json, read_special_tokens, token_text
from maxstack.data.gguf.folder import UNREAD
from maxstack.errors import quoted

MODEL = "tokenizer.model"


def tokenizer_of(folder: Path) -> dict[str, Any] | None:
    """Return the mapping of a data.tokenizer for the folder's tokenizer.json, or else its tiktoken
    file, its SentencePiece model, or its vocab.json with merges.txt; None where none can be read,
    as `unread` explains. DataError for a damaged file.

    Documents end with the EOS token that tokenizer_config.json or special_tokens_map.json names.
    They begin with its BOS token if add_bos_token says so; where that is absent, with what the
    post-processor of tokenizer.json puts before a text, or with BOS for a SentencePiece model.
    """
    states = []
    if folder.is_dir():
        for each in os.scandir(folder):
            with contextlib.suppress(OSError):  # a link that leads nowhere
                stat = each.stat()
                states.append((each.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    found = _tokenizer_of(folder, os.getcwd(), *sorted(states))
    return found and dict(found)


# A command asks three times, and to parse a tokenizer.json of 3 MB takes 0.2 s.
@functools.lru_cache(maxsize=16)
def _tokenizer_of(folder: Path, *state: object) -> dict[str, Any] | None:
    """The mapping of a folder in this state."""
    processor, file = None, folder / "tokenizer.json"
    if os.path.lexists(file):
        # A link that leads nowhere must not pass for absence: the next form may give other ids.
        if not file.is_file():
            return None
        processor = read_json(file).get("post_processor")
    elif tiktoken := _of_tiktoken(folder):
        if tiktoken_files.why_unknown(tiktoken):
            return None
        file = tiktoken
    elif (folder / MODEL).is_file():
        # The model alone would write <|im_end|> in pieces, and no answer would end.
        if _added(folder):
            return None
        settings = read_special_tokens(folder)
        bos, eos = (token_text(settings.get(f"{name}_token")) for name in ("bos", "eos"))
        # SentencePiece itself puts nothing before a text; tokenizers of this kind in transformers
        # put BOS unless told otherwise.
        adds = bool(bos) and settings.get("add_bos_token") is not False
        path = str(folder / MODEL)
        return {"kind": "sentencepiece", "path": path, "bos": adds, "eos": eos is not None}
    # The two files lack the pattern that cuts words, so only models whose pattern is known are
    # read.
    elif byte_level.known_split(folder) and _has_vocab(folder):
        file = folder / byte_level.VOCAB
    else:
        return None
    return {"kind": "huggingface", "path": str(file), **byte_level.read_ends(folder, processor)}


def unread(folder: Path) -> str:
    """Say why `tokenizer_of` gives nothing, and a remedy."""
    if (folder / UNREAD).is_file():
        why = (folder / UNREAD).read_text(encoding="utf-8")
    elif os.path.lexists(folder / "tokenizer.json"):
        why = "tokenizer.json is no file (a folder, or a link that leads nowhere)"
    elif tiktoken := _of_tiktoken(folder):
        why = tiktoken_files.why_unknown(tiktoken)
    elif (folder / MODEL).is_file():
        added = _added(folder)
        why = (
            f"{len(added)} tokens such as {quoted(next(iter(added)))} are added beside {MODEL}, "
            "which by itself writes them in pieces"
        )
    elif _has_vocab(folder):
        why = byte_level.why_unknown(folder)
    else:
        why = (
            "it holds neither tokenizer.json, tokenizer.model, tiktoken.model nor vocab.json with "
            "merges.txt"
        )
    return (
        f"{folder} brings no tokenizer that maxstack reads: {why}; save it there as "
        "tokenizer.json (transformers: AutoTokenizer.from_pretrained(FOLDER)"
        ".save_pretrained(FOLDER)), or give data.tokenizer='{kind: huggingface, path: FILE}'"
    )


def _of_tiktoken(folder: Path) -> Path | None:
    paths = (folder / name for name in tiktoken_files.FILES)
    return next(filter(tiktoken_files.is_tiktoken, paths), None)


def _added(folder: Path) -> dict[str, int]:
    """Return the tokens, with ids, that added_tokens.json or tokenizer_config.json add to the
    folder's SentencePiece model, which lacks them under these ids."""
    import sentencepiece

    ids = read_json(folder / "added_tokens.json")
    for number, token in (read_special_tokens(folder).get("added_tokens_decoder") or {}).items():
        # Short numbers only: int() refuses thousands of digits by an error without a file's name.
        if (text := token_text(token)) is not None and number.isdecimal() and len(number) < 10:
            ids[text] = int(number)
    if not ids:
        return {}
    try:
        model: Any = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL))
    except (RuntimeError, OSError):  # reported where it is opened
        return {}
    size = model.vocab_size()
    return {
        token: number
        for token, number in ids.items()
        # Files repeat the model's own special tokens, which are no additions.
        if not 0 <= number < size or model.id_to_piece(number) != token
    }


def _has_vocab(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (byte_level.VOCAB, byte_level.MERGES))
