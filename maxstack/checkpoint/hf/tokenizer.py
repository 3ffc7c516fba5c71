"""The tokenizer of a model folder, as a section of the configuration."""

import json
from pathlib import Path
from typing import Any

LARGEST = 1 << 28


def tokenizer_of(folder: Path) -> dict[str, Any] | None:
    """The mapping of a data.tokenizer for the folder's tokenizer.json, or else its SentencePiece model; None where it has neither.

    Documents end with the EOS token that tokenizer_config.json names, and begin with its BOS token if add_bos_token says so, or, where that is not
    said, the post-processor of tokenizer.json; a SentencePiece model's do unless it says not.
    """
    said, file = _read(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    bos = _text(said.get("bos_token"))
    adds = said.get("add_bos_token")
    if adds is None:
        adds = json.dumps(bos) in json.dumps(_read(file).get("post_processor")) if bos and file.is_file() else True
    bos = bos if adds else None
    eos = _text(said.get("eos_token"))
    if file.is_file():
        return {"kind": "huggingface", "path": str(file), "bos": bos, "eos": eos}
    if (folder / "tokenizer.model").is_file():
        return {"kind": "sentencepiece", "path": str(folder / "tokenizer.model"), "bos": bos is not None, "eos": eos is not None}
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size < LARGEST else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _text(token: Any) -> str | None:
    """A token is written as text, or as a mapping with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
