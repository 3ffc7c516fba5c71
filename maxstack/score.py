"""`maxstack score`: the log-probability of every token of some texts under a model. Shapes: B rows
T time  V vocab."""

import argparse
import contextlib
import dataclasses
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tqdm

from maxstack import cli, hub, sharding
from maxstack.config import ConfigError, shortened
from maxstack.data import DataError

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema import Config

ROUND = 32
"""Rows are padded to a multiple of this many tokens, so that few shapes are compiled."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Token rows of unequal length, padded on the right with 0."""

    tokens: np.ndarray
    """int32 [B, T]."""
    lengths: np.ndarray
    """int32 [B]."""

    @property
    def scored(self) -> int:
        """How many tokens have one before them, by which they are scored."""
        return int(np.maximum(self.lengths - 1, 0).sum())


def main(argv: Sequence[str]) -> int:
    """Score what the arguments say; the exit code."""
    args = _arguments(argv)
    out = Path(args.out)
    places = {
        folder: out.with_suffix(f".{Path(folder).resolve().name}{out.suffix}")
        for folder in args.adapter
    }
    if len({out, *places.values()}) <= len(places):
        raise ConfigError("--adapter: two folders of one name; their results would lie in one file")
    run, own = assembled(args.model, args.overrides)
    adapted = {folder: adapted_run(run, folder) for folder in places}
    rows = (
        read_tokens(args.tokens, run.cfg.model.vocab)
        if args.tokens
        else read_texts(args.data, args.model, args.overrides, "--tokens FILE.npz")
    )
    params = read_weights(args.model, run, own)
    _report(run, params, rows, out, args)
    for folder, place in places.items():
        further = with_adapter(adapted[folder], params, folder)
        _report(adapted[folder], further, rows, place, args)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked as far as no run is needed."""
    parser = argparse.ArgumentParser(
        prog="maxstack score",
        description="Write the log-probability of each token of some texts, and print the "
        "perplexity.",
        epilog="example: maxstack score runs/quickstart --data texts.jsonl --out scores.npz",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run's folder, one of its checkpoints, a Hugging Face model folder, or "
        "Org/Name of the hub",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="replaces a value of the run's configuration, such as model.dtype=float32",
    )
    parser.add_argument(
        "--data",
        metavar="FILE.jsonl",
        help='texts, one {"text": ...} a line; BOS as the tokenizer says, no EOS',
    )
    parser.add_argument(
        "--tokens", metavar="FILE.npz", help="instead: tokens int32 [B, T] and lengths int32 [B]"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE.npz",
        help="logprobs float32 [B, T], tokens and lengths",
    )
    parser.add_argument("--logits", action="store_true", help="also logits float32 [B, T, V]")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FOLDER",
        help="in PEFT's format: score with it too, into FILE.NAME.npz; may be given several times",
    )
    parser.add_argument(
        "--batch-size", type=cli.positive, default=8, help="rows at a time (default: 8)"
    )
    cli.takes_weights(parser)
    args = parser.parse_intermixed_args(argv)
    args.overrides += ["checkpoint.allow_nonfinite=true"] * args.allow_nonfinite
    if (args.data is None) == (args.tokens is None):
        raise ConfigError("maxstack score: give either --data FILE.jsonl or --tokens FILE.npz")
    out = Path(args.out)
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(
            f"--out {out}: "
            f"{'is a folder' if out.is_dir() else f'the folder {out.parent} does not exist'}"
        )
    for file in (args.data, args.tokens):
        if file and not Path(file).is_file():
            raise DataError(f"{file}: no such file")
    if args.data and args.data.endswith(".npz"):
        raise ConfigError(f"--data {args.data}: npz goes to --tokens; --data takes texts as JSONL")
    return args


def _report(run: "Run", params: Any, rows: Rows, out: Path, args: argparse.Namespace) -> None:
    """Score, and print the perplexity. DataError for a token without a finite log-probability,
    unless weights that are not finite are allowed."""
    logprobs = score(run, params, rows, out, batch_size=args.batch_size, logits=args.logits)
    odd = np.argwhere(~np.isfinite(logprobs))
    if len(odd) and not run.cfg.checkpoint.allow_nonfinite:
        row, place = odd[0]
        raise DataError(
            f"{out}: {len(odd)} of {rows.scored} scored tokens have a log-probability that is NaN "
            f"or infinite, the first at row {row}, position {place}; the weights are damaged, or "
            "too large for model.dtype: try model.dtype=float32, or take it as it is with "
            "--allow-nonfinite"
        )
    mean = -float(logprobs.sum(dtype=np.float64)) / rows.scored
    print(
        f"{out}: {len(rows.lengths)} rows, {rows.scored} scored tokens, mean negative "
        f"log-likelihood {mean:.6f}, perplexity {np.exp(mean):.4f}"
    )


def adapted_run(run: "Run", folder: str) -> "Run":
    """The run with adapters as a folder in PEFT's format has them; ConfigError where that is no
    adapter of this model."""
    from maxstack.checkpoint.hf.peft import Adapter
    from maxstack.lora.config import LoraConfig
    from maxstack.run import assemble

    if run.cfg.lora:
        raise ConfigError(
            "--adapter: the run has adapters of its own; merge them first: maxstack "
            "export RUN --out FOLDER"
        )
    adapter = Adapter(Path(folder), finite=not run.cfg.checkpoint.allow_nonfinite)
    tensors = (
        tensor
        for tensor in run.bound(adapter)
        if tensor.name.removesuffix(".weight") in adapter.modules
    )
    paths = sorted({target.path for tensor in tensors for target in tensor.targets})
    adapted = assemble(
        run.cfg.model_copy(update={"lora": LoraConfig.model_validate(adapter.settings(paths))}),
        run.mesh,
        trains=False,
    )
    adapted.adapter(folder)
    return adapted


def with_adapter(adapted: "Run", params: Any, folder: str) -> Any:
    """Weights of the run without adapters, which are shared, with the adapter of a folder beside
    them."""
    from flax import nnx

    return adapted.tree(
        adapted.with_adapter(
            adapted.beside(nnx.traversals.flatten_mapping(params, sep="/")), folder
        )
    )


def open_model(model: str, overrides: Sequence[str]) -> tuple["Run", Any]:
    """A run's folder, one of its checkpoints, or a Hugging Face folder -> the assembled run and its
    weights, spread over all devices (fsdp)."""
    run, own = assembled(model, overrides)
    return run, read_weights(model, run, own)


def assembled(model: str, overrides: Sequence[str]) -> tuple["Run", Path | None]:
    """The run of a model over all devices, and its folder, None for a Hugging Face folder."""
    placed = [f"mesh.{axis}=1" for axis in sharding.AXES]
    cfg, own = config_of(model, ["run.virtual_devices=null", *placed, "mesh.fsdp=-1", *overrides])
    import jax

    from maxstack.run import assemble

    return assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()), trains=False), own


def read_weights(model: str, run: "Run", own: Path | None) -> Any:
    """The weights of an assembled run."""
    from maxstack.checkpoint.hf.reader import load_params
    from maxstack.checkpoint.weights import WeightsReader

    if own is not None:
        return run.tree(WeightsReader(Path(model)).load(run.weights, run.sources))
    assert run.cfg.model.weights
    finite = not run.cfg.checkpoint.allow_nonfinite
    return run.tree(run.treated(load_params(run.cfg.model.weights, run.untreated, finite=finite)))


def config_of(model: str, overrides: Sequence[str]) -> tuple["Config", Path | None]:
    """The configuration of a model, and the run's folder, None for a Hugging Face folder."""
    from maxstack import config
    from maxstack.schema import Config

    if not Path(model).is_dir() and not hub.named(model):
        raise ConfigError(
            f"{shortened(model, 200)}: {hub.NOWHERE}; give a run's folder, one of its checkpoints, "
            "a Hugging Face folder, or such a name"
        )
    if (Path(model) / "hf" / "source.json").is_file() and not (
        Path(model) / "config.yml"
    ).is_file():
        raise ConfigError(
            f"{model}: an import that was not finished; give the same `maxstack import` again"
        )
    folder = Path(model)
    places = (folder, folder.parent, folder.parent.parent) if folder.is_dir() else ()
    own = next((place for place in places if (place / "config.yml").is_file()), None)
    if own is None:
        data = {
            "sources": [{"kind": "synthetic", "vocab": 2}],
            "seq_len": 1,
        }  # rows have lengths of their own
        cfg = config.load(Config, {"model": {"from": model}, "data": data}, overrides)
    else:
        cfg = config.load(Config, own / "config.yml", overrides)
    return cfg, own


def read_tokens(file: str, vocab: int) -> Rows:
    """The arrays `tokens` and `lengths` of an npz file. DataError if they are missing, misshapen or
    beyond the vocabulary."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            tokens, lengths = arrays["tokens"], arrays["lengths"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: not an npz file; numpy.savez(FILE, tokens=..., lengths=...) makes one"
        ) from error
    except KeyError as error:
        raise DataError(
            f"{file}: {error.args[0]}; wanted: tokens int32 [B, T] and lengths int32 [B]"
        ) from error
    if (
        tokens.ndim != 2
        or lengths.shape != tokens.shape[:1]
        or tokens.dtype.kind not in "iu"
        or lengths.dtype.kind not in "iu"
    ):
        raise DataError(
            f"{file}: tokens {tokens.dtype}{[*tokens.shape]}, lengths "
            f"{lengths.dtype}{[*lengths.shape]}; "
            "wanted: int32 [B, T] and int32 [B]"
        )
    if lengths.size and not (0 <= lengths.min() and lengths.max() <= tokens.shape[1]):
        raise DataError(
            f"{file}: lengths go from {lengths.min()} to {lengths.max()}, but rows hold "
            f"{tokens.shape[1]} tokens"
        )
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    beyond = np.argwhere(real & ((tokens < 0) | (tokens >= vocab)))
    if len(beyond):
        row, place = beyond[0]
        raise DataError(
            f"{file}: row {row}, position {place}: token {tokens[row, place]} is outside "
            f"the model's vocabulary of {vocab}"
        )
    return _checked(file, np.where(real, tokens, 0), lengths)


def read_texts(file: str, model: str, overrides: Sequence[str], instead: str) -> Rows:
    """The texts of a JSONL file as tokens, with a model's tokenizer; begun with BOS where it says
    so, never ended with EOS. ConfigError where no tokenizer is known, DataError where it is not the
    model's; `instead` is the option that takes tokens."""
    from maxstack.checkpoint.hf.tokenizer import unread
    from maxstack.data.config import JsonlSource
    from maxstack.data.sources import open_source
    from maxstack.data.tokenizers import open_tokenizer, tokens_of

    cfg, own = config_of(model, overrides)
    if not _names_tokenizer(cfg, own, overrides):
        beside = own / "hf" if own else Path(model)
        folder = beside if beside.is_dir() else Path(cfg.model.weights or model)
        raise ConfigError(f"{unread(folder)}; or give {instead}")
    given = cfg.data.tokenizer
    tokenizer = open_tokenizer(
        given.model_copy(update={"eos": None if given.kind == "huggingface" else False})
    )
    if tokenizer.vocab_size > cfg.model.vocab:
        raise DataError(
            f"data.tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and "
            f"{model} only {cfg.model.vocab}, so it is not the "
            f"model's; give {instead}, or the right data.tokenizer"
        )
    documents = open_source(JsonlSource(kind="jsonl", files=(file,)), split="all")
    rows = [tokens_of(documents, i, tokenizer) for i in range(len(documents))]
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(lengths)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return _checked(file, tokens, lengths)


def _names_tokenizer(cfg: "Config", own: Path | None, overrides: Sequence[str]) -> bool:
    """Whether data.tokenizer is more than a default: it is given, or came with a model folder, or
    served the texts of a run."""
    if own is None:
        return "tokenizer" in cfg.data.model_fields_set
    said = cfg.data.tokenizer.kind != "bytes" or any(
        word.startswith("data.tokenizer") for word in overrides
    )
    imported = cfg.model.weights is not None or (own / "hf").is_dir()
    return said or not imported or any(source.kind != "synthetic" for source in cfg.data.sources)


def _checked(file: str, tokens: np.ndarray, lengths: np.ndarray) -> Rows:
    if not (lengths > 1).any():
        raise DataError(f"{file}: no row has two tokens or more, so there is nothing to score")
    return Rows(tokens.astype(np.int32), lengths.astype(np.int32))


def score(
    run: "Run", params: Any, rows: Rows, out: Path, *, batch_size: int, logits: bool
) -> np.ndarray:
    """Write `out` and return logprobs float32 [B, T]: position t scores token t given those before
    it; 0 at position 0 and beyond a row's length.

    A row's numbers do not depend on the rows and the padding beside it, but for rounding in the
    last place.
    """
    import jax

    from maxstack.compiling import in_order

    step = jax.jit(_scorer(run, logits), compiler_options=in_order(run.mesh))
    logprobs = np.zeros(rows.tokens.shape, np.float32)
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(unfinished, "w") as archive:
            with (
                _entry(archive, "logits", (*rows.tokens.shape, run.cfg.model.vocab))
                if logits
                else contextlib.nullcontext() as stream
            ):
                for begin, found in _batches(run, params, rows, batch_size, step):
                    end = min(begin + batch_size, len(rows.lengths))
                    width = min(found["logprobs"].shape[1], rows.tokens.shape[1])
                    logprobs[begin:end, :width] = found["logprobs"][: end - begin, :width]
                    if stream:
                        _write_logits(
                            stream, found["logits"][: end - begin, :width], rows.tokens.shape[1]
                        )
            for name, array in (
                ("logprobs", logprobs),
                ("tokens", rows.tokens),
                ("lengths", rows.lengths),
            ):
                with _entry(archive, name, array.shape, array.dtype) as entry:
                    entry.write(array.tobytes())
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return logprobs


def _scorer(run: "Run", logits: bool) -> Any:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from maxstack.kernels.cross_entropy import cross_entropy

    def step(params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> dict[str, jax.Array]:
        places_T = jnp.arange(tokens_BT.shape[1])
        real_BT = places_T < lengths_B[:, None]
        batch = {
            "tokens": tokens_BT,
            "positions": jnp.where(real_BT, places_T, 0),
            "segments": real_BT.astype(jnp.int32),
        }
        model = nnx.merge(run.graph, nnx.State(params))
        with run.treatment.counting(real_BT):
            logits_BTV = model.logits(model.hidden(batch))
        nll_BT, _ = cross_entropy(logits_BTV[:, :-1], tokens_BT[:, 1:])
        found = {"logprobs": jnp.pad(jnp.where(real_BT[:, 1:], -nll_BT, 0.0), ((0, 0), (1, 0)))}
        return (
            found | {"logits": jnp.where(real_BT[..., None], logits_BTV, 0.0)} if logits else found
        )

    return run.within(step)


def _batches(
    run: "Run", params: Any, rows: Rows, batch_size: int, step: Any
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(first row, results [batch_size and longest row, rounded up to what the mesh divides, ...])
    with a progress bar."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from maxstack.sharding import parts

    everywhere = NamedSharding(run.mesh, PartitionSpec())
    over, pieces = (
        parts(run.cfg.mesh.rules[logical], run.mesh.shape) for logical in ("batch", "seq")
    )
    height, multiple = -(-batch_size // over) * over, math.lcm(ROUND, 2 * pieces)
    for begin in tqdm.tqdm(
        range(0, len(rows.lengths), batch_size), desc="scoring", unit=" batches", disable=None
    ):
        lengths = rows.lengths[begin : begin + batch_size]
        width = -(-max(2, lengths.max()) // multiple) * multiple
        tokens = np.zeros((height, width), np.int32)
        kept = rows.tokens[begin : begin + batch_size, :width]
        tokens[: len(lengths), : kept.shape[1]] = kept
        given = jax.device_put((tokens, np.pad(lengths, (0, height - len(lengths)))), everywhere)
        yield begin, jax.device_get(step(params, *given))


@contextlib.contextmanager
def _entry(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: Any = np.float32
) -> Iterator[Any]:
    """One array of an npz file, written piece by piece after its header."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": tuple(map(int, shape)),
        }
        np.lib.format.write_array_header_1_0(stream, header)  # type: ignore[arg-type]
        yield stream


def _write_logits(stream: Any, logits: np.ndarray, width: int) -> None:
    for row in logits:
        stream.write(np.pad(row, ((0, width - len(row)), (0, 0))).astype(np.float32).tobytes())
