"""The tokenizer of a model folder, as a section of the configuration."""

import json
from pathlib import Path
from typing import Any

LARGEST = 1 << 24


def tokenizer_of(folder: Path) -> dict[str, Any] | None:
    """The mapping of a data.tokenizer for the folder's tokenizer.json, or else its SentencePiece model; None where it has neither.

    Documents begin with the BOS token that tokenizer_config.json names, unless it says add_bos_token: false, and end with its EOS token.
    """
    said = _read(folder / "tokenizer_config.json")
    bos = None if said.get("add_bos_token") is False else _text(said.get("bos_token"))
    eos = _text(said.get("eos_token"))
    if (folder / "tokenizer.json").is_file():
        return {"kind": "huggingface", "path": str(folder / "tokenizer.json"), "bos": bos, "eos": eos}
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
