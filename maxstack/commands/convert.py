"""`maxstack import` and `maxstack export`: a Hugging Face model folder becomes a run's folder, and
a run or checkpoint becomes a model folder."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maxstack import cli
from maxstack.data import hub

if TYPE_CHECKING:
    import numpy as np

    from maxstack.checkpoint.weights import WeightsReader
    from maxstack.hf.contents import Contents
    from maxstack.schema.config import Config
    from maxstack.schema.decoder import DecoderConfig

DTYPES = ("float32", "bfloat16", "float16")
BESIDE = "hf"
SOURCE = "source.json"
PLACEHOLDER = (
    "# Its data is a placeholder: give data.sources, here or on the command line, before "
    "training.\n"
)


def import_model(argv: Sequence[str]) -> int:
    """Convert a model folder into a run at step 0. ConfigError or DataError, with nothing written,
    where the folder is refused."""
    parser = argparse.ArgumentParser(
        prog="maxstack import",
        description="Make a run of a Hugging Face model folder. Stopped, it goes on where it was "
        "when started again.",
        epilog="example: maxstack import ./Qwen3-0.6B --out runs/qwen && maxstack train "
        "runs/qwen/config.yml train.steps=100",
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="holds config.json and safetensors; or a model of the hub, Org/Name or "
        "Org/Name@REVISION",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b.c=value",
        help="change a value of the run's configuration",
    )
    parser.add_argument(
        "--out", required=True, metavar="RUN", type=Path, help="the run's folder, to be made"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: as in the folder)"
    )
    parser.add_argument(
        "--ignore-unsafe",
        action="store_true",
        help="leave pickles and code in the folder aside instead of refusing it",
    )
    cli.takes_weights(parser)
    args = parser.parse_intermixed_args(argv)

    from maxstack.config import ConfigError
    from maxstack.config.errors import DataError
    from maxstack.hf.contents import Contents

    contents = Contents(args.folder, ignore_unsafe=args.ignore_unsafe)
    text = _configuration(contents, args.out, args.dtype or contents.dtype, args.overrides)
    state = _state(args.out, contents, args.dtype)
    if state == "done":
        if args.overrides:
            raise ConfigError(
                f"{args.out} is {args.folder} already, so {' '.join(args.overrides)} "
                "would not be applied; change its config.yml"
            )
        print(f"{args.out} is {args.folder} already")
        return 0
    _check_tokenizer(contents)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        _convert(contents, args.out, args.dtype, not args.allow_nonfinite)
        (args.out / "config.yml").write_text(text)
    except DataError:
        if state == "new":
            shutil.rmtree(args.out, ignore_errors=True)
        raise
    except OSError as error:
        raise ConfigError(
            f"--out {args.out}: cannot be written: {error.strerror or error}"
        ) from error
    print(
        f"{args.folder} -> {args.out}: {contents.family.architecture}, weights in "
        f"{args.dtype or contents.dtype}"
    )
    return 0


def export_model(argv: Sequence[str]) -> int:
    """Convert a run or checkpoint into a model folder. ConfigError where no architecture of
    transformers is the run's model."""
    parser = argparse.ArgumentParser(
        prog="maxstack export",
        description="Make a Hugging Face model folder of a run or checkpoint, as transformers' "
        "from_pretrained reads it.",
        epilog="example: maxstack export runs/qwen --out ./qwen-hf --dtype bfloat16",
    )
    parser.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        type=Path,
        help="a run's folder (its newest checkpoint), or one step inside",
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", type=Path, help="the folder to make"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the tensors (default: as they were imported, or as the run has them)",
    )
    parser.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="bytes of a safetensors file at most (default: 5GB)",
    )
    parser.add_argument(
        "--architecture",
        metavar="NAME",
        help="the class of transformers to write for (default: the one that fits)",
    )
    args = parser.parse_intermixed_args(argv)

    from maxstack.config import ConfigError
    from maxstack.hf.exported import export, shard_bytes

    size = shard_bytes(args.shard_size)
    if not args.run.is_dir():
        raise ConfigError(
            f"{args.run}: no such folder; give a run's folder, or one step inside its "
            "checkpoints folder"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    from tqdm import tqdm

    from maxstack.checkpoint.weights import WeightsReader

    reader = WeightsReader(args.run)
    data = configured(args.run, reader)
    model, length, tokenizer = _model(data)
    cfg = data if data.get("lora") or data["quantization"]["rules"] else None
    shapes, read = (reader.shapes, reader.read) if cfg is None else _untreated(cfg, reader)
    total = sum(_count(shape) for shape in shapes.values())
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="writing") as bar:
        family = export(
            model,
            shapes,
            read,
            args.out,
            source=source_of(args.run, model),
            dtype=args.dtype,
            shard_size=size,
            architecture=args.architecture,
            length=length,
            tokenizer=tokenizer,
            done=bar.update,
        )
    print(f"{args.run} step {reader.step} -> {args.out}: {family.architecture}")
    return 0


def _convert(contents: "Contents", out: Path, dtype: str | None, finite: bool) -> None:
    import jax
    import numpy as np
    from tqdm import tqdm

    from maxstack.checkpoint.weights import WeightsWriter
    from maxstack.hf.exported import record
    from maxstack.hf.reader import leading, pieces_of, reading
    from maxstack.models.model import abstract

    model = contents.model.model_copy(update={"param_dtype": dtype or contents.dtype})
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in _leaves(abstract(model)[1])
    }
    pieces = pieces_of(contents, {path: leaf.shape for path, leaf in shapes.items()})
    record(contents, out / BESIDE)
    (out / BESIDE / SOURCE).write_text(json.dumps(_fingerprint(contents, dtype), indent=2) + "\n")
    if (out / "checkpoints" / "0").exists():
        shutil.rmtree(out / ".importing", ignore_errors=True)
        return
    writer = WeightsWriter(out, shapes)
    with tqdm(
        total=sum(leaf.size for leaf in shapes.values()),
        unit=" weights",
        unit_scale=True,
        desc="importing",
    ) as bar:
        for path, leaf in shapes.items():
            if path not in writer.done:
                read = reading(pieces[path], leaf.shape, np.dtype(leaf.dtype), finite)
                writer.fill(path, leading(pieces[path]), read)
            bar.update(leaf.size)
    writer.finish()


def _leaves(state: Any) -> Any:
    import jax
    from flax import nnx

    return jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))


def _configuration(contents: "Contents", out: Path, dtype: str, overrides: Sequence[str]) -> str:
    """The text of the run's config.yml, checked."""
    from maxstack.config import ConfigError
    from maxstack.hf.family import meaning
    from maxstack.load import load

    model = contents.mapping | {
        "dtype": "float32" if dtype == "float32" else "bfloat16",
        "param_dtype": dtype,
    }
    length = min(contents.folder.config.get("max_position_embeddings") or 1024, 1024)
    sources = [{"kind": "synthetic", "vocab": contents.model.vocab}]
    data = {
        "sources": sources,
        "seq_len": contents.model.positions or length,
        **_tokenizer(contents, out),
    }
    run = {"name": out.resolve().name, "output_dir": str(out.parent)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(
            json.dumps(
                {
                    "run": run,
                    "model": model,
                    "data": data,
                    "checkpoint": {"restore": str(out.resolve())},
                }
            )
        )
        cfg = load(path, overrides)
    if meaning(cfg.model) != meaning(contents.model):
        raise ConfigError(
            f"{' '.join(overrides)}: changes the architecture, and the weights in "
            f"{contents.folder.path} are not of that; leave what "
            "config.json says of the model as it is"
        )
    return f"# Imported by maxstack from {contents.folder.path}.\n{PLACEHOLDER}" + resolved(cfg)


def resolved(cfg: "Config") -> str:
    """The text of a config.yml beside weights; without a data.tokenizer that nobody gave, so that
    text is refused until somebody does."""
    from maxstack.config import dump, plain_data

    settings = plain_data(cfg)
    if "tokenizer" not in cfg.data.model_fields_set:
        del settings["data"]["tokenizer"]
    return dump(settings)


def _tokenizer(contents: "Contents", out: Path) -> dict[str, Any]:
    """The tokenizer that comes along, as data.tokenizer; nothing where none does."""
    from maxstack.hf.tokenizer import tokenizer_of

    found = tokenizer_of(contents.folder.path)
    return (
        {"tokenizer": found | {"path": str(out.resolve() / BESIDE / Path(found["path"]).name)}}
        if found
        else {}
    )


def _check_tokenizer(contents: "Contents") -> None:
    """DataError for a tokenizer that is broken or has more tokens than the model."""
    import pydantic

    from maxstack.data.tokenizers import check_fits, open_tokenizer
    from maxstack.hf.tokenizer import tokenizer_of
    from maxstack.schema.data import Tokenizer

    if found := tokenizer_of(contents.folder.path):
        check_fits(
            open_tokenizer(pydantic.TypeAdapter(Tokenizer).validate_python(found)),
            contents.model.vocab,
        )


def _state(out: Path, contents: "Contents", dtype: str | None) -> str:
    """new, unfinished or done; ConfigError where something else lies at `out`."""
    from maxstack.config import ConfigError

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return "new"
    mark = out / BESIDE / SOURCE
    if not mark.is_file():
        raise ConfigError(f"--out {out}: is there already; choose another name, or delete it")
    if json.loads(mark.read_text()) != _fingerprint(contents, dtype):
        raise ConfigError(
            f"--out {out}: holds an import of another folder or dtype, or of this one "
            "before it changed; choose another name, or "
            "delete it"
        )
    return "done" if (out / "config.yml").exists() else "unfinished"


def _fingerprint(contents: "Contents", dtype: str | None) -> dict[str, Any]:
    from maxstack.hf.contents import states

    files = sorted(states(contents.folder.path).items())
    return {
        "folder": str(contents.folder.path.resolve()),
        "dtype": dtype or "kept",
        "files": {
            name: [*state] for name, state in files if name.endswith((".safetensors", ".json"))
        },
    }


def _run_folder(path: Path) -> Path:
    return (
        path.parent.parent
        if path.name.isdigit()
        else path.parent
        if path.name == "checkpoints"
        else path
    )


def configured(path: Path, reader: "WeightsReader") -> dict[str, Any]:
    """The configuration of the run that a checkpoint is of."""
    from maxstack.config import ConfigError, plain_data
    from maxstack.load import load

    if data := reader.config():
        return data
    file = _run_folder(path) / "config.yml"
    if not file.is_file():
        raise ConfigError(
            f"{path}: a checkpoint of weights alone, and there is no {file} that says of what model"
        )
    return plain_data(load(file))


def _untreated(
    data: Mapping[str, Any], reader: "WeightsReader"
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], "np.ndarray"]]:
    """Shapes of the weights that those of a run stand for, and how to read one: out of low
    precision, with its adapter merged into it."""
    import numpy as np
    from flax import nnx

    from maxstack.models.model import abstract
    from maxstack.schema.config import Config
    from maxstack.weights.rewrite import Rewrite

    cfg = Config.model_validate(data)
    rewrite = Rewrite(cfg)
    plain = nnx.traversals.flatten_mapping(nnx.to_pure_dict(abstract(cfg.model)[1]), sep="/")

    def read(path: str) -> np.ndarray:
        return np.asarray(rewrite.original(path, reader.under(path))).astype(plain[path].dtype)

    return {path: leaf.shape for path, leaf in plain.items()}, read


def _model(
    data: Mapping[str, Any],
) -> tuple["DecoderConfig", int, 'Path | Literal["source", "none"]']:
    """The model of a run, the length of its rows, and the file of its tokenizer; bytes have none,
    and tokens that came ready are of the source's."""
    from maxstack.schema.data import holds_text
    from maxstack.schema.decoder import DecoderConfig

    path = data["data"].get("tokenizer", {}).get("path")
    without: Literal["source", "none"] = (
        "none" if any(map(holds_text, data["data"]["sources"])) else "source"
    )
    tokenizer = Path(path).expanduser() if path else without
    return DecoderConfig.model_validate(data["model"]), data["data"]["seq_len"], tokenizer


def source_of(path: Path, model: "DecoderConfig") -> Path | None:
    """The folder with what the model once came with."""
    beside = _run_folder(path) / BESIDE
    if (beside / "config.json").is_file():
        return beside
    if model.weights and hub.named(model.weights):
        return hub.snapshot(model.weights, weights=True)
    return (
        Path(model.weights)
        if model.weights and (Path(model.weights) / "config.json").is_file()
        else None
    )


def _count(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
