"""A model of ours as a model folder.

The family that the model came from expresses it, or else the first that can. config.json is what
the family writes over the keys that came along; tensors have the dtypes that they had in the
original folder; tokenizer, generation settings and the settings for pictures come from there,
changed where training used others. The folder is read back before it gets its name.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from maxstack.config.spelling import did_you_mean
from maxstack.data import byte_level
from maxstack.data.chat import JINJA
from maxstack.data.hub import DIFFUSERS, GENERATION, MODEL, PREPROCESSOR, PROCESSOR, TOKENIZER
from maxstack.errors import ConfigError
from maxstack.hf import config_checks, preprocessor
from maxstack.hf.binding import bind
from maxstack.hf.contents import VALUE, Contents, check_tensors
from maxstack.hf.families import ALL, FAMILIES
from maxstack.hf.family import Family
from maxstack.hf.rows import Shape
from maxstack.hf.table import Mismatch
from maxstack.hf.tokenizer_files import Marks, copy, copy_tokenizer, templates
from maxstack.hf.writer import Read, new_folder, write_json, write_tensors
from maxstack.schema.mixers import LongRopeScaling
from maxstack.schema.stack import StackConfig

RECORD = "tensors.json"
CONDITION, MODULATION = "condition/", "modulation"


class Answers(NamedTuple):
    """How a model was trained to read and to answer."""

    template: str | None = None
    """The chat template, unless it is the one that the model came with."""
    ends: frozenset[int] = frozenset()
    """Tokens at which an answer ends."""
    marks: Marks | None = None
    """Tokens around a document; None: unknown, since the data held tokens."""


NO_ANSWERS = Answers()


def export(
    model: StackConfig,
    shapes: Mapping[str, Shape],
    read: Read,
    out: Path,
    *,
    source: Path | None = None,
    dtype: str | None = None,
    shard_size: int = 5 * 10**9,
    architecture: str | None = None,
    length: int | None = None,
    tokenizer: Path | Literal["source", "bytes"] = "source",
    answers: Answers = NO_ANSWERS,
    images: preprocessor.Pictures | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> Family:
    """Write `out`, whole or not at all, and return the family. `shapes` are those of our weights by
    path, `read` gives a weight.

    `source` is a folder with the config.json, tokenizer and dtypes that the model once came with;
    `length` the longest input in training; `tokenizer` the file of the tokenizer in training, that
    of `source`, or one of single bytes; `answers` how it was trained to answer; `images` how its
    pictures became pixels. ConfigError where no family, or not the one of that architecture, can
    express the model.
    """
    came_with = byte_level.read_json(source / "config.json") if source else {}
    tokens = model.tokens is None
    model = model.as_exported
    # A value head is of training; no architecture has it.
    shapes = {path: shape for path, shape in shapes.items() if path != VALUE}
    shapes, read = _repeat_conditions(shapes, read)
    family, config = choose_family(
        model,
        architecture or next(iter(came_with.get("architectures") or []), None),
        bool(architecture),
    )
    try:
        bound = bind(family, model, shapes)
    except ValueError as error:
        raise ConfigError(f"cannot be exported: {error}") from error
    # A folder may mix dtypes, so each tensor gets its own back.
    recorded = _recorded_dtypes(source) if source and dtype is None else {}
    usual = _dtype(dtype or model.param_dtype)
    dtypes = {tensor.name: recorded.get(tensor.name, usual) for tensor in bound}
    names = [dtype.name for dtype in dtypes.values()]
    kept = {
        key: value
        for key, value in came_with.items()
        # auto_map names code that is not exported, torch_dtype is the old name of dtype.
        if config_checks.passed_over(key, value) and key not in ("auto_map", "torch_dtype")
    }
    config = {
        **kept,
        **(_max_length(model, came_with, length or 0) if tokens else {}),
        **_special_ids(came_with, answers.marks),
        # Last: what the family writes is what the model computes.
        **config,
    }
    if family.model_type:
        config["dtype"] = max({*names}, key=names.count)
    with new_folder(out) as folder:
        write_json(folder / "config.json", dict(sorted(config.items())))
        if tokens:
            copy_tokenizer(source, tokenizer, folder, answers.marks)
            if answers.template is not None:
                (folder / JINJA).write_text(answers.template, encoding="utf-8")
            _write_generation(source, folder, config, answers.ends)
        elif family.model_type and images:
            preprocessor.write(folder, images, source)
        stem = MODEL if family.model_type else DIFFUSERS
        body = "" if model.has_head else family.body  # which files of the bare body lack
        write_tensors(folder, bound, dtypes, read, shard_size, done, stem, body)
        # The folder is still unfinished here, so one that cannot be read back never appears.
        check_tensors(Contents(folder), bound)
    return family


def _repeat_conditions(shapes: Mapping[str, Shape], read: Read) -> tuple[Mapping[str, Shape], Read]:
    """Return shapes and a reader with the condition of a diffusion transformer repeated in every
    block, where diffusers keeps it."""
    one = {path: shape for path, shape in shapes.items() if path.startswith(CONDITION)}
    if not one:
        return shapes, read
    # diffusers keeps the embeddings of time and class in each block; ours are one for all.
    own = {
        path.removesuffix(MODULATION) + weight: (*shape[:-3], *one[weight])
        for path, shape in shapes.items()
        if path.endswith(f"/{MODULATION}")
        for weight in one
    }

    def read_own(path: str) -> np.ndarray:
        if path not in own:
            return read(path)
        _, _, weight = path.rpartition(CONDITION)
        # A view: the weight is in memory once.
        return np.broadcast_to(read(CONDITION + weight), own[path])

    return {path: shape for path, shape in shapes.items() if path not in one} | own, read_own


def _special_ids(came_with: Mapping[str, Any], marks: Marks | None) -> dict[str, Any]:
    """Return bos_token_id and eos_token_id of config.json: those of training, or what the model
    came with; null where there is none, since transformers' classes have other defaults."""
    if marks is None:
        return {}
    ids = {f"{key}_token_id": token and token.id for key, token in marks._asdict().items()}
    for key, number in ids.items():
        came = came_with.get(key)
        # Nothing to change: training had none, or one of those that came. A list of ends stays a
        # list.
        if number is None or number == came or (isinstance(came, list) and number in came):
            ids[key] = came
    return ids


def _max_length(model: StackConfig, came_with: Mapping[str, Any], length: int) -> dict[str, int]:
    """Return max_position_embeddings: the size of the model's own table, or what the model came
    with, or the longest input in training if that is more. With LongRoPE it stays, because
    transformers' attention factor follows from it."""
    language_model = came_with.get("text_config") or came_with
    before = language_model.get("max_position_embeddings") or 0
    ropes = [getattr(block.mixer, "rope", None) for block in model.blocks.values()]
    most = max(before, length) or 2048
    # LongRoPE's factor is a function of this length over the original one: another number here
    # would change the model.
    if before and any(rope and isinstance(rope.scaling, LongRopeScaling) for rope in ropes):
        most = before
    return {"max_position_embeddings": getattr(model, "positions", None) or most}


def choose_family(
    model: StackConfig, wanted: str | None, must: bool
) -> tuple[Family, dict[str, Any]]:
    """Return the family of an architecture, or unless it `must` be that one, the first that can
    express the model; and its config.json."""
    if must and wanted not in FAMILIES:
        known = ", ".join(family.architecture for family in ALL)
        raise ConfigError(
            f"--architecture {wanted}: not known; known: {known}{did_you_mean(wanted, FAMILIES)}"
        )
    two_sided = [name for name, block in model.blocks.items() if block.mixer.two_sided]
    if two_sided and model.tokens is None:
        raise ConfigError(
            f"model.blocks.{two_sided[0]}.mixer.causal=false: no architecture of transformers that "
            "maxstack knows sees later positions, so this model cannot be exported"
        )
    # The family that the model came with goes first, since several may express it.
    first = [FAMILIES[wanted]] if wanted in FAMILIES else []
    reasons = []
    others = (other for other in ALL if other not in first and other.schema is type(model))
    for family in first if must else [*first, *others]:
        try:
            return family, family.write(model)
        except (Mismatch, ConfigError) as error:
            reasons.append(f"{family.architecture}: {str(error)[:300]}")
    said = "; ".join(reasons[:1] if first else reasons)
    raise ConfigError(f"no architecture of transformers that maxstack knows is this model. {said}")


def save_source_files(contents: Contents, folder: Path) -> None:
    """Save what an export gives back: config.json, tokenizer files, dtypes of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", contents.folder.config)
    for name in (*TOKENIZER, GENERATION, PREPROCESSOR, PROCESSOR):
        # lexists, so that a link that leads nowhere is refused by file(), not taken for absent.
        if os.path.lexists(contents.folder.path / name):
            shutil.copyfile(contents.folder.file(name), folder / name)
    copy(contents.folder.path, templates(contents.folder.path), folder)
    # The run may outlive the folder, so the dtypes are kept beside it.
    dtypes = {name: tensor.dtype.name for name, tensor in contents.tensors.items()}
    (folder / RECORD).write_text(json.dumps(dtypes) + "\n")


def _recorded_dtypes(source: Path) -> dict[str, np.dtype]:
    """Return the dtypes of tensors in the folder that the model came in; empty if unknown."""
    if (source / RECORD).is_file():
        return {
            name: _dtype(dtype) for name, dtype in byte_level.read_json(source / RECORD).items()
        }
    if any(file for stem in (MODEL, DIFFUSERS) for file in source.glob(f"{stem}*.safetensors*")):
        tensors = Contents(source).tensors
        return {name: tensor.dtype for name, tensor in tensors.items()}
    return {}


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _write_generation(
    source: Path | None, folder: Path, config: Mapping[str, Any], ends: frozenset[int]
) -> None:
    """Copy generation_config.json, or make it of the special tokens of config.json, and add `ends`
    to the tokens at which generation stops."""
    if source:
        copy(source, (GENERATION,), folder)
    path = folder / GENERATION
    settings = byte_level.read_json(path)
    if not path.exists():
        ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        given = {key: value for key, value in ids.items() if value is not None}
        settings = {"_from_model_config": True, **given}
    stops = settings.get("eos_token_id", config.get("eos_token_id"))
    known = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if added := sorted(ends - {*known}):
        # With an end of its own, the file is no longer what config.json says.
        settings = {key: value for key, value in settings.items() if key != "_from_model_config"}
        stops = [*known, *added]
        settings["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    elif path.exists():
        return
    write_json(path, settings)


def shard_bytes(text: str) -> int:
    """Return the bytes of `5GB`, `500MB`, `1GiB` or a plain number."""
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if not size or float(size[1]) <= 0:
        raise ConfigError(f"--shard-size {text}: allowed is a size such as 5GB, 500MB or 2GiB")
    return int(float(size[1]) * (1024 if size[3] else 1000) ** " kMGT".index(size[2] or " "))
