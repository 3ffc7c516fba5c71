"""A model of ours as a model folder: which family holds it, its config.json, the dtypes of its
tensors, the files that come along."""

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from maxstack.config import ConfigError, did_you_mean
from maxstack.data import byte_level
from maxstack.data.hub import MORE, TOKENIZER
from maxstack.hf.binding import bind
from maxstack.hf.contents import Contents, check_tensors
from maxstack.hf.families import ALL, FAMILIES
from maxstack.hf.family import SILENT, Family
from maxstack.hf.rows import Shape
from maxstack.hf.table import Mismatch
from maxstack.hf.writer import Read, new_folder, write_tensors
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.mixers import LongRopeScaling

RECORD = "tensors.json"
FLOATS = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
}


def export(
    model: DecoderConfig,
    shapes: Mapping[str, Shape],
    read: Read,
    out: Path,
    *,
    source: Path | None = None,
    dtype: str | None = None,
    shard_size: int = 5 * 10**9,
    architecture: str | None = None,
    length: int | None = None,
    tokenizer: Path | Literal["source", "none"] = "source",
    done: Callable[[int], object] = lambda count: None,
) -> Family:
    """Write `out`, whole or not at all. `shapes` are those of our weights by path, `read` gives a
    weight.

    `source` is a folder with the config.json, tokenizer and dtypes that the model once came with;
    `length` the longest input that it was trained on; `tokenizer` the file of that which the model
    was trained with, or that of `source`, or none that has a file. ConfigError where no family, or
    not the one of that architecture, can say the model.
    """
    given = _json(source / "config.json") if source else {}
    family, config = choose(
        model,
        architecture or next(iter(given.get("architectures") or []), None),
        bool(architecture),
    )
    try:
        bound = bind(family, model, shapes)
    except ValueError as error:
        raise ConfigError(f"cannot be exported: {error}") from error
    dtypes = _dtypes(
        source, dtype or model.param_dtype, [tensor.name for tensor in bound], dtype is None
    )
    kept = {
        key: value
        for key, value in given.items()
        if key in SILENT and key not in ("auto_map", "torch_dtype")
    }
    config = {
        **kept,
        "max_position_embeddings": model.positions or _longest(model, given, length or 0),
        **config,
        "dtype": _usual(dtypes),
    }
    with new_folder(out) as folder:
        (folder / "config.json").write_text(
            json.dumps(dict(sorted(config.items())), indent=2) + "\n"
        )
        _copy(source, tokenizer, folder, config)
        write_tensors(folder, bound, dtypes, read, shard_size, done)
        check_tensors(Contents(folder), bound)
    return family


def _longest(model: DecoderConfig, given: Mapping[str, Any], length: int) -> int:
    """max_position_embeddings: what the model came with, or the longest input in training if that
    is more.

    With LongRoPE it stays, because transformers' attention factor follows from it.
    """
    came = (given.get("text_config") or given).get("max_position_embeddings") or 0
    ropes = [getattr(block.mixer, "rope", None) for block in model.blocks.values()]
    if came and any(rope and isinstance(rope.scaling, LongRopeScaling) for rope in ropes):
        return came
    return max(came, length) or 2048


def choose(model: DecoderConfig, wanted: str | None, must: bool) -> tuple[Family, dict[str, Any]]:
    """The family of an architecture, or, unless it `must` be that one, the first that can say the
    model; and the config.json that does."""
    if must and wanted not in FAMILIES:
        known = ", ".join(family.architecture for family in ALL)
        raise ConfigError(
            f"--architecture {wanted}: not known; known: {known}{did_you_mean(wanted, FAMILIES)}"
        )
    first = [FAMILIES[wanted]] if wanted in FAMILIES else []
    reasons = {}
    for family in first if must else [*first, *(other for other in ALL if other not in first)]:
        try:
            return family, family.write(model)
        except (Mismatch, ConfigError) as error:
            reasons[family.architecture] = str(error)
    said = "; ".join(
        f"{name}: {reason[:300]}"
        for name, reason in list(reasons.items())[: 1 if must or first else None]
    )
    raise ConfigError(f"no architecture of transformers that maxstack knows is this model. {said}")


def record(contents: Contents, folder: Path) -> None:
    """Keep what an export will want to give back: config.json, tokenizer files, dtypes of
    tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents.folder.config, indent=2) + "\n")
    for name in TOKENIZER + MORE:
        if os.path.lexists(contents.folder.path / name):
            shutil.copyfile(contents.folder.file(name), folder / name)
    dtypes = {name: tensor.dtype.name for name, tensor in contents.tensors.items()}
    (folder / RECORD).write_text(json.dumps(dtypes) + "\n")


def _dtypes(source: Path | None, default: str, names: list[str], keep: bool) -> dict[str, np.dtype]:
    if source and keep and (source / RECORD).is_file():
        recorded = {
            name: np.dtype(getattr(ml_dtypes, dtype, dtype))
            for name, dtype in _json(source / RECORD).items()
        }
    elif source and keep and any(source.glob("model*.safetensors*")):
        recorded = {
            name: tensor.dtype
            for name, tensor in Contents(source, ignore_unsafe=True).tensors.items()
        }
    else:
        recorded = {}
    return {name: recorded.get(name, FLOATS[default]) for name in names}


def _usual(dtypes: Mapping[str, np.dtype]) -> str:
    names = [dtype.name for dtype in dtypes.values()]
    return max({*names}, key=names.count)


def _copy(
    source: Path | None, tokenizer: Path | str, folder: Path, config: Mapping[str, Any]
) -> None:
    path = tokenizer if isinstance(tokenizer, Path) and tokenizer.is_file() else None
    came = source / path.name if source and path else None
    same = tokenizer != "none" and (
        path is None or (came and came.is_file() and filecmp.cmp(path, came, shallow=False))
    )
    for name in TOKENIZER + MORE if same else MORE:
        if source and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if path and not same and path.name == byte_level.VOCAB:
        for name in (name for name in TOKENIZER if (path.parent / name).is_file()):
            shutil.copyfile(path.parent / name, folder / name)
    elif path and not same:
        shutil.copyfile(
            path, folder / ("tokenizer.json" if path.suffix == ".json" else "tokenizer.model")
        )
    if not (folder / "generation_config.json").exists():
        ids = {
            key: config[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(key) is not None
        }
        (folder / "generation_config.json").write_text(
            json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n"
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def shard_bytes(text: str) -> int:
    """Bytes of `5GB`, `500MB`, `1GiB` or a plain number."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if not found or float(found[1]) <= 0:
        raise ConfigError(f"--shard-size {text}: allowed is a size such as 5GB, 500MB or 2GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kMGT".index(found[2] or " "))
