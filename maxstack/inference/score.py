"""`maxstack score`: the log-probability of every token of some texts under a model. Shapes: B rows
T time  V vocab."""

import contextlib
import dataclasses
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tqdm

from maxstack.config import ConfigError, atomic
from maxstack.config.errors import DataError
from maxstack.inference.opened import config_of

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config

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
    from maxstack.data.sources import open_source
    from maxstack.data.tokenizers import open_tokenizer, tokens_of
    from maxstack.hf.tokenizer import unread
    from maxstack.schema.data import JsonlSource

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

    from maxstack.hardware.compiling import in_order

    step = jax.jit(_scorer(run, logits), compiler_options=in_order(run.mesh))
    logprobs = np.zeros(rows.tokens.shape, np.float32)
    with atomic.writing(out) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
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

    from maxstack.schema.mesh import parts

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
