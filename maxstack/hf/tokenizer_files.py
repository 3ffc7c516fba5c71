"""The tokenizer of a run as files of a model folder that encode texts as in training.

The files of the original folder are copied if the run used that tokenizer, else those beside the
tokenizer's file, or files made of a SentencePiece model. Then they are changed where they would
begin or end a text otherwise than training did.
"""

import filecmp
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from maxstack.data import byte_level
from maxstack.data.byte_level import read_json, read_special_tokens, token_text, tokens_before
from maxstack.data.hub import FURTHER, TOKENIZER
from maxstack.hf import sentencepiece_files
from maxstack.hf.tokenizer import tokenizer_of
from maxstack.hf.writer import write_json

SETTINGS, SPELT = "tokenizer_config.json", "special_tokens_map.json"
AROUND = "TemplateProcessing", "BertProcessing", "RobertaProcessing"
"""Processors of tokenizer.json that put tokens around a text."""


class Token(NamedTuple):
    """A token's id and text."""

    id: int
    text: str


class Marks(NamedTuple):
    """The tokens around a document in training; None: none."""

    bos: Token | None
    eos: Token | None


def copy_tokenizer(
    source: Path | None, tokenizer: Path | str, folder: Path, marks: Marks | None
) -> None:
    """Copy the tokenizer's files, all those of `source` where it is the same. A SentencePiece model
    alone gets the files that transformers reads besides. They put `marks` around a text; None: as
    the files say."""
    path = tokenizer if isinstance(tokenizer, Path) and tokenizer.is_file() else None
    came = source / path.name if source and path else None
    # Compared by content: a run names its tokenizer by any path.
    if path is None or (came and came.is_file() and filecmp.cmp(path, came, shallow=False)):
        if tokenizer == "bytes":
            for name, made in byte_level.bytes_tokenizer_files().items():
                write_json(folder / name, made)
        elif source:
            copy(source, (*TOKENIZER, *templates(source)), folder)
    elif path.name in TOKENIZER:
        copy(path.parent, (*TOKENIZER, *templates(path.parent)), folder)
    else:
        name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
        shutil.copyfile(path, folder / name)
    alone = folder / "tokenizer.model"
    if alone.is_file() and not any((folder / name).is_file() for name in sentencepiece_files.NAMES):
        for name, made in sentencepiece_files.files_of(alone).items():
            write_json(folder / name, made)
    if marks and tokenizer_of(folder):
        _mark(folder, marks)


def copy(source: Path, names: tuple[str, ...], folder: Path) -> None:
    """Copy the files that exist."""
    for name in names:
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def templates(source: Path) -> tuple[str, ...]:
    """Return the names of chat templates beside the default one."""
    return tuple(f"{FURTHER}/{path.name}" for path in sorted((source / FURTHER).glob("*.jinja")))


def _mark(folder: Path, marks: Marks) -> None:
    """Change files that name other tokens, or put others before a text."""
    settings, named = read_special_tokens(folder), dict[str, Any]()
    for key, token in marks._asdict().items():
        # Tokens that training did not use keep their names; only where they are put changes.
        if token and token_text(settings.get(f"{key}_token")) != token.text:
            named[f"{key}_token"] = token.text
    bos = [marks.bos.text] if marks.bos else []
    made = read_json(file := folder / "tokenizer.json")
    # transformers encodes by this file, where it exists.
    if made and tokens_before(made.get("post_processor")) != bos:
        made["post_processor"] = _processor(made.get("post_processor"), marks.bos)
        write_json(file, made)
    # An absent key means what tokenizer.json puts before a text.
    if settings.get("add_bos_token", bool(bos and made)) != bool(bos):
        named["add_bos_token"] = bool(bos)
    if not named:
        return
    write_json(folder / SETTINGS, read_json(folder / SETTINGS) | named)
    # An older file that repeats some names and would contradict the others.
    if spelt := read_json(folder / SPELT):
        write_json(folder / SPELT, spelt | {k: v for k, v in named.items() if k in spelt})


def _processor(found: dict[str, Any] | None, bos: Token | None) -> dict[str, Any] | None:
    """Return a post_processor that puts BOS alone before a text, or nothing around it."""
    parts = found.get("processors", [found]) if found else []
    # Others, such as ByteLevel's offsets, put no tokens around a text and stay.
    parts = [part for part in parts if part["type"] not in AROUND]
    if bos:
        before, text = _part("SpecialToken", bos.text), _part("Sequence", "A")
        parts.append(
            {
                "type": "TemplateProcessing",
                "single": [before, text],
                "pair": [before, text, _part("Sequence", "B", 1)],
                "special_tokens": {
                    bos.text: {"id": bos.text, "ids": [bos.id], "tokens": [bos.text]}
                },
            }
        )
    if len(parts) > 1:
        return {"type": "Sequence", "processors": parts}
    return parts[0] if parts else None


def _part(kind: str, name: str, type_id: int = 0) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": type_id}}
