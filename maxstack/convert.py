"""Converts a Hugging Face model folder to a run's folder, and a run or checkpoint to a model
folder."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maxstack import strict_json
from maxstack.config import storage
from maxstack.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

    from maxstack.checkpoint.weights import Choice, WeightsReader
    from maxstack.hf.contents import Contents
    from maxstack.hf.export import Answers
    from maxstack.schema.config import Config
    from maxstack.schema.stack import StackConfig

BESIDE = "hf"
SOURCE = "source.json"
PLACEHOLDER = (
    "# The data is a placeholder: set data.sources, here or on the command line, before training.\n"
)


def import_folder(
    folder: str,
    out: str | Path,
    *overrides: str,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
) -> Path:
    """Convert a Hugging Face folder, a GGUF file or a model of the hub to a run at step 0 in `out`;
    what an earlier call left unfinished is resumed. `dtype`: of the weights, by default as in the
    folder. ConfigError or DataError, with nothing written, where the folder is refused."""
    from maxstack.hf.contents import Contents

    contents, out = Contents(folder), storage.local(out)
    kept = dtype or contents.dtype
    text, model = _configuration(contents, out, kept, overrides)
    progress = _progress(out, contents, dtype)
    if progress == "done":
        if overrides:
            raise ConfigError(
                f"{out}: is imported from {folder} already, so {' '.join(overrides)} would have no "
                "effect; change its config.yml"
            )
        print(f"{out}: is imported from {folder} already")
        return out
    _check_tokenizer(contents, model)
    try:
        _convert(contents, model, out, dtype, not allow_nonfinite)
        (out / "config.yml").write_text(text)
    except DataError:
        if progress == "new":
            shutil.rmtree(out, ignore_errors=True)
        raise
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    print(f"{folder} -> {out}: {contents.family.architecture}, weights in {kept}")
    return out


def export_folder(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    shard_size: str = "5GB",
    architecture: str | None = None,
    weights: "Choice | None" = None,
) -> Path:
    """Convert a run or checkpoint to a Hugging Face folder at `out`, which must not exist. `dtype`:
    of the tensors, by default that of the import, otherwise that of the run; `shard_size`: of a
    file at most; `architecture`: transformers' class; `weights`: evaluated or trained. ConfigError
    where transformers has no class for the model."""
    from maxstack.checkpoint.weights import with_newest_step
    from maxstack.hf.export import shard_bytes

    out = storage.local(out)
    more = out, dtype, shard_bytes(shard_size), architecture, weights
    with_newest_step(storage.local(run), lambda step: write_folder(step, *more))
    return out


def write_folder(
    run: Path,
    out: Path,
    dtype: str | None = None,
    shard_size: int = 5 * 10**9,
    architecture: str | None = None,
    weights: "Choice | None" = None,
) -> None:
    """Export a run or checkpoint to a new folder, with a progress bar. `shard_size`: bytes of a
    file at most."""
    from tqdm import tqdm

    from maxstack.checkpoint.weights import WeightsReader
    from maxstack.data.hub import TOKENIZER
    from maxstack.hf.contents import VALUE
    from maxstack.hf.export import export
    from maxstack.hf.preprocessor import of_run
    from maxstack.schema.config import Config

    reader = WeightsReader(run)
    data = configured(run, reader)
    cfg = Config.model_validate(data)
    model = cfg.model
    chosen = reader.choose(weights or "evaluated", cfg.optimizer.ema)
    treated = data.get("lora") or data["quantization"]["rules"]
    if treated:
        shapes, read, unlike = _untreated(cfg, reader)
    else:
        shapes, read = reader.shapes, reader.read
        unlike = []
    total = sum(map(math.prod, shapes.values()))
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="writing") as bar:
        family = export(
            model,
            shapes,
            read,
            out,
            source=source_of(run, model),
            dtype=dtype,
            shard_size=shard_size,
            architecture=architecture,
            length=data["data"]["seq_len"],
            tokenizer=_tokenizer(data["data"]),
            answers=_answers(data["data"]),
            images=of_run(str(run), cfg),
            done=bar.update,
        )
    left = ", without the estimate of rewards" if VALUE in shapes else ""
    left += "".join(f", {note}" for note in (chosen, *unlike) if note)
    if model.tokens is None and not any((out / name).exists() for name in TOKENIZER):
        left += "; without a tokenizer: the run has none that the folder can hold"
    print(f"{_run_folder(run)} step {reader.step} -> {out}: {family.architecture}{left}")


def _convert(
    contents: "Contents", model: "StackConfig", out: Path, dtype: str | None, finite: bool
) -> None:
    """Write step 0 of the run at `out`, and the files that an export writes back beside it."""
    import numpy as np
    from tqdm import tqdm

    from maxstack.checkpoint.weights import WeightsWriter
    from maxstack.hf.export import save_source_files
    from maxstack.hf.reader import leading_dims, pieces_of, slab_reader
    from maxstack.models.model import weights_of

    weights = weights_of(model)
    pieces = pieces_of(contents, {path: leaf.shape for path, leaf in weights.items()}, model)
    save_source_files(contents, out / BESIDE)
    (out / BESIDE / SOURCE).write_text(json.dumps(_fingerprint(contents, dtype), indent=2) + "\n")
    if (out / "checkpoints" / "0").exists():
        shutil.rmtree(out / ".importing", ignore_errors=True)
        return
    writer = WeightsWriter(out, weights)
    total = sum(leaf.size for leaf in weights.values())
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="importing") as bar:
        for path, leaf in weights.items():
            if path not in writer.done:
                read = slab_reader(pieces[path], leaf.shape, np.dtype(leaf.dtype), finite)
                writer.fill(path, leading_dims(pieces[path]), read)
            bar.update(leaf.size)
    writer.finish()


def _configuration(
    contents: "Contents", out: Path, dtype: str, overrides: Sequence[str]
) -> "tuple[str, StackConfig]":
    """Return the text of the run's config.yml, and its model. ConfigError where an override changes
    the architecture in anything but the number of tokens."""
    from maxstack.config import dump
    from maxstack.hf import preprocessor
    from maxstack.hf.family import canonical_form
    from maxstack.hf.tokenizer import tokenizer_of
    from maxstack.load import load
    from maxstack.schema import model_rules

    length = min(contents.folder.config.get("max_position_embeddings") or 1024, 1024)
    data = contents.model.placeholder(length)
    if contents.model.tokens and (pictures := preprocessor.pictures(contents.folder)):
        data["image"] = pictures.at(contents.mapping["image_size"])
    if tokenizer := tokenizer_of(contents.folder.path):
        path = out.resolve() / BESIDE / Path(tokenizer["path"]).name
        data["tokenizer"] = tokenizer | {"path": str(path)}
    tree = {
        "run": {"name": out.resolve().name, "output_dir": str(out.parent)},
        "model": contents.mapping
        | {"dtype": "float32" if dtype == "float32" else "bfloat16", "param_dtype": dtype},
        "data": data,
        "checkpoint": {"restore": str(out.resolve())},
    }
    cfg = load(tree, overrides)
    for key, message in model_rules.unsaid(cfg):
        raise ConfigError(f"{key}: {message}")
    source = contents.model
    if cfg.model.extended_tables(source):
        source = source.model_copy(update={"vocab": cfg.decoder.vocab})
    if canonical_form(cfg.model) != canonical_form(source):
        raise ConfigError(
            f"{' '.join(overrides)}: changes the architecture, which the weights in "
            f"{contents.folder.path} do not fit; leave out keys that config.json sets"
        )
    head = f"# Imported by maxstack from {contents.folder.path}.\n{PLACEHOLDER}"
    return head + dump(settings_of(cfg)), cfg.model


def settings_of(cfg: "Config") -> dict[str, Any]:
    """Return the settings of a config.yml beside weights. Without a tokenizer of the model's own
    there is no data.tokenizer, so that text is refused until one is set."""
    from maxstack.config import plain_data

    settings = plain_data(cfg)
    if "tokenizer" not in cfg.data.model_fields_set:
        del settings["data"]["tokenizer"]
    return settings


def _check_tokenizer(contents: "Contents", model: "StackConfig") -> None:
    """DataError for a tokenizer that is damaged or has more tokens than the model."""
    import pydantic

    from maxstack.data.tokenizers import check_fits, open_tokenizer
    from maxstack.hf.tokenizer import tokenizer_of
    from maxstack.schema.data import Tokenizer

    if settings := tokenizer_of(contents.folder.path):
        tokenizer = open_tokenizer(pydantic.TypeAdapter(Tokenizer).validate_python(settings))
        check_fits(tokenizer, model.ids)


def _progress(
    out: Path, contents: "Contents", dtype: str | None
) -> Literal["new", "unfinished", "done"]:
    """Return the state of the import into `out`; ConfigError where something else is there."""
    from maxstack.config import atomic

    mark = out / BESIDE / SOURCE
    if not mark.is_file():
        atomic.check_absent(out)
        return "new"
    if strict_json.read_object(mark) != _fingerprint(contents, dtype):
        raise ConfigError(
            f"--out {out}: holds an import of another folder or dtype, or of this folder before it "
            "changed; choose another name, or delete it"
        )
    return "done" if (out / "config.yml").exists() else "unfinished"


def _fingerprint(contents: "Contents", dtype: str | None) -> dict[str, Any]:
    """Return what must be unchanged for an import to resume."""
    from maxstack.hf.contents import file_states

    files = sorted(file_states(contents.folder.path).items())
    ends = (".safetensors", ".json")
    return {
        "folder": str(contents.folder.path.resolve()),
        "dtype": dtype or "kept",
        "files": {name: [*state] for name, state in files if name.endswith(ends)},
    }


def _run_folder(path: Path) -> Path:
    """Return the run's folder for a path to it, to its checkpoints or to a step."""
    if path.name.isdigit():
        return path.parent.parent
    return path.parent if path.name == "checkpoints" else path


def configured(path: Path, reader: "WeightsReader") -> dict[str, Any]:
    """Return the configuration of the run that wrote a checkpoint. ConfigError without one."""
    from maxstack.config import plain_data
    from maxstack.load import find_learned_tokenizer, load_record

    if data := reader.config():
        if data["run"].get("kinds"):
            load_record(_run_folder(path))  # imports them, where the record is trusted
        tokenizer = data.get("data", {}).get("tokenizer") or {}
        if tokenizer.get("learn"):
            tokenizer["path"] = find_learned_tokenizer(_run_folder(path), tokenizer["path"])
        return data
    own = _run_folder(path)
    file = own / "config.yml"
    if not file.is_file():
        raise ConfigError(
            f"{path}: is a checkpoint of weights alone, and there is no {file} that describes the "
            "model"
        )
    return plain_data(load_record(own))


def _untreated(
    cfg: "Config", reader: "WeightsReader"
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], "np.ndarray"], list[str]]:
    """For a quantized or adapted run, return the shapes of its model's plain weights; a function
    that reads one of them, dequantized or as qat rounds it, with its adapter merged; and notes on
    what the exported folder does not round."""
    import numpy as np

    from maxstack.models.model import weights_of
    from maxstack.weights.rewrite import Rewrite

    rewrite = Rewrite(cfg)
    weights = weights_of(cfg.model)

    def read(path: str) -> np.ndarray:
        return np.asarray(rewrite.original(path, reader.under(path), evaluated=True))

    return {path: leaf.shape for path, leaf in weights.items()}, read, rewrite.unlike


def _tokenizer(data: Mapping[str, Any]) -> 'Path | Literal["source", "bytes"]':
    """Return the tokenizer of a run: a file, bytes, or "source" where the data held tokens."""
    from maxstack.data import hub
    from maxstack.schema.data import holds_text

    if path := data.get("tokenizer", {}).get("path"):
        return Path(hub.resolve_file(path)).expanduser()
    return "bytes" if any(map(holds_text, data["sources"])) else "source"


def _answers(data: Mapping[str, Any]) -> "Answers":
    """Return the tokens and template of a run's answers; nothing where its data held tokens."""
    from maxstack.data.chat import DEFAULT, answer_ends, open_template
    from maxstack.data.tokenizers import open_tokenizer
    from maxstack.hf.export import Answers
    from maxstack.hf.tokenizer_files import Marks, Token
    from maxstack.schema.data import DataConfig, holds_text

    cfg = DataConfig.model_validate(data)
    if not any(map(holds_text, data["sources"])):
        return Answers()
    tokenizer = open_tokenizer(cfg.tokenizer)
    around = [
        Token(ids[0], tokenizer.text_of(ids[0])) if ids else None
        for ids in (tokenizer.bos, tokenizer.eos)
    ]
    template = open_template(cfg).sources[DEFAULT] if cfg.has_records and cfg.template else None
    return Answers(template, frozenset(answer_ends(cfg, tokenizer)), Marks(*around))


def source_of(path: Path, model: "StackConfig") -> Path | None:
    """Return the folder with the config.json and tokenizer that the model, or the run that it
    started from, was imported with; None for a model of its own."""
    from maxstack.data import hub
    from maxstack.load import load_record, run_folder

    beside = _run_folder(path) / BESIDE
    if (beside / "config.json").is_file():
        return beside
    if not model.weights:
        return None
    if earlier := run_folder(model.weights):
        return source_of(earlier, load_record(earlier).model)
    folder = hub.model_folder(model.weights, weights=True)
    return folder if (folder / "config.json").is_file() else None
