"""Pooling of a decoder's hidden states into the embedding of a text, as described by
sentence-transformers' files in a model's folder. Runs on the host, imports no jax."""

import dataclasses
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.data.byte_level import read_json
from maxstack.errors import ConfigError
from maxstack.regular_file import read_regular


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Makes a vector of the hidden state of the last token."""

    after: tuple[int, ...] = ()
    """Tokens that the tokenizer appends to a text; the last is pooled."""
    normalize: bool = True
    """Divide by the Euclidean norm."""
    sizes: Collection[int] | None = ()
    """Sizes that a vector may be cut to (matryoshka, arXiv:2205.13147); None: any."""

    def check(self, size: int | None) -> None:
        """Raise ConfigError for a size that the model was not trained for."""
        if size is not None and self.sizes is not None and size not in self.sizes:
            known = ", ".join(map(str, sorted(self.sizes))) or "none"
            raise ConfigError(
                f"dimensions={size}: config.json must name the sizes that vectors may be cut to "
                f"(matryoshka_dimensions, or is_matryoshka: true); it names {known}"
            )

    def vector(self, hidden: np.ndarray, size: int | None) -> np.ndarray:
        """Return float32 [size] of the last token's hidden state [D]."""
        vector = hidden[:size]
        if not self.normalize and size is None:
            return vector
        # A vector that was cut is normalized in any case: its length has changed.
        return vector / max(float(np.linalg.norm(vector)), 1e-12)


def read_pooling(folder: Path) -> Pooling:
    """Read the pooling of a model's folder: by modules.json, else normalized. ConfigError for
    unsupported modules."""
    config, normalize = read_json(folder / "config.json"), True
    file = folder / "modules.json"
    if file.is_file():
        kinds = {}
        for module in strict_json.parse(read_regular(file, strict_json.SMALL), str(file)):
            kinds[module["type"].rpartition(".")[2]] = folder / module["path"]
        # Without modules.json the vectors are normalized.
        normalize = "Normalize" in kinds
        _check(file, kinds)
    sizes = config.get("matryoshka_dimensions") or ()
    return Pooling(
        tuple(_after(read_json(folder / "tokenizer.json").get("post_processor") or {})),
        normalize,
        None if config.get("is_matryoshka") and not sizes else frozenset(sizes),
    )


def _check(file: Path, kinds: dict[str, Path]) -> None:
    if others := {*kinds} - {"Transformer", "Pooling", "Normalize"}:
        raise ConfigError(f"{file}: {', '.join(sorted(others))}: such modules are not supported")
    pooling = read_json(kinds["Pooling"] / "config.json") if "Pooling" in kinds else {}
    # sentence-transformers writes a flag for each mode, or the mode's name as a text.
    modes = [key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True]
    if "Pooling" in kinds and (modes or [str(pooling.get("pooling_mode"))]) != ["lasttoken"]:
        raise ConfigError(
            f"{kinds['Pooling']}: its config.json asks for another pooling than that of the last "
            "token (pooling_mode_lasttoken), which alone is supported"
        )


def _after(processor: dict[str, Any]) -> list[int]:
    """Return the tokens that the post-processor of tokenizer.json appends to a text."""
    return [
        token
        for each in processor.get("processors", [processor])
        # Only what stands behind the text; tokens before it are the tokenizer's own to write.
        for part in itertools.dropwhile(lambda part: "Sequence" not in part, each.get("single", ()))
        if "SpecialToken" in part
        for token in each["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    ]
