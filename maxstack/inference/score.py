"""Scores: the log-probability of every token of texts under a model.

Rows are padded to a multiple of 32 tokens and batches to a fixed number of rows, so that few shapes
are compiled; padding has a segment of its own and is masked. Position t scores token t given those
before it. Shapes: B rows  T time  V vocab.
"""

import dataclasses
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from maxstack.config import storage
from maxstack.data import hub
from maxstack.data.npz_files import read_arrays
from maxstack.errors import ConfigError, DataError
from maxstack.inference.trained_model import config_of

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
        """Number of scored tokens: all but the first of each row."""
        return int(np.maximum(self.lengths - 1, 0).sum())


def check_length(run: "Run", tokens: int, where: str) -> None:
    """Raise DataError for more tokens than a learned table of positions has rows."""
    most = run.cfg.decoder.positions
    if most and tokens > most:
        raise DataError(
            f"{where}: {tokens} tokens, and the model has positions for {most} alone; cut it"
        )


def read_tokens(file: str, vocab: int) -> Rows:
    """Read `tokens` and `lengths` of an npz file. DataError if they are missing, misshapen or
    outside the vocabulary."""
    tokens, lengths = read_arrays(file, ("tokens", "lengths"))
    kinds = {tokens.dtype.kind, lengths.dtype.kind}
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or not kinds <= {"i", "u"}:
        raise DataError(
            f"{file}: tokens {tokens.dtype}{[*tokens.shape]}, lengths "
            f"{lengths.dtype}{[*lengths.shape]}; wanted: int32 [B, T] and int32 [B]"
        )
    if lengths.size and not (0 <= lengths.min() and lengths.max() <= tokens.shape[1]):
        raise DataError(
            f"{file}: lengths go from {lengths.min()} to {lengths.max()}, but rows hold "
            f"{tokens.shape[1]} tokens"
        )
    # Padding may hold anything, such as -1.
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    beyond = np.argwhere(real & ((tokens < 0) | (tokens >= vocab)))
    if len(beyond):
        row, position = beyond[0]
        raise DataError(
            f"{file}: row {row}, position {position}: token {tokens[row, position]} is outside "
            f"the model's vocabulary of {vocab}"
        )
    # Whatever the padding held, it is a valid token now.
    return _check_rows(file, np.where(real, tokens, 0), lengths)


def read_texts(file: str, model: str, overrides: Sequence[str], instead: str) -> Rows:
    """Read the texts of a JSONL file as tokens of a model's tokenizer, with its BOS if it has one,
    without EOS. ConfigError where the model has no tokenizer, DataError where the tokenizer does
    not fit it; `instead` is the option that takes tokens, for these messages."""
    from maxstack.data.sources import open_source
    from maxstack.data.tokenizers import open_prompt_tokenizer, tokenize
    from maxstack.hf.tokenizer import unread
    from maxstack.schema.data import JsonlSource

    cfg, own = config_of(model, overrides)
    if not _names_tokenizer(cfg, own, overrides):
        beside = own / "hf" if own else Path(model)
        if not beside.is_dir():
            beside = hub.model_folder(cfg.model.weights or model, weights=False)
        raise ConfigError(f"{unread(beside)}; or give {instead}")
    tokenizer = open_prompt_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.decoder.vocab:
        raise DataError(
            f"data.tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and "
            f"{model} only {cfg.decoder.vocab}, so it is not the "
            f"model's; give {instead}, or the right data.tokenizer"
        )
    documents = open_source(JsonlSource(kind="jsonl", files=(file,)), split="all")
    rows = [tokenize(documents, i, tokenizer) for i in range(len(documents))]
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(lengths)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return _check_rows(file, tokens, lengths)


def _names_tokenizer(cfg: "Config", own: Path | None, overrides: Sequence[str]) -> bool:
    """Return True if data.tokenizer is more than a default: it is set, or came with a model folder,
    or was used for the texts of a run."""
    if own is None:
        return "tokenizer" in cfg.data.model_fields_set
    # `bytes` is the default, so it may mean that nothing was said.
    if cfg.data.tokenizer.kind != "bytes":
        return True
    if any(word.startswith("data.tokenizer") for word in overrides):
        return True
    imported = cfg.model.weights is not None or (own / "hf").is_dir()
    return not imported or any(source.kind != "synthetic" for source in cfg.data.sources)


def _check_rows(file: str, tokens: np.ndarray, lengths: np.ndarray) -> Rows:
    if not (lengths > 1).any():
        raise DataError(f"{file}: no row has two tokens or more, so there is nothing to score")
    return Rows(tokens.astype(np.int32), lengths.astype(np.int32))


def score(
    run: "Run", params: Any, rows: Rows, out: str, *, batch_size: int, logits: bool
) -> np.ndarray:
    """Write `out`, an npz file of logprobs, tokens, lengths and, if asked for, logits; return
    logprobs."""
    shape = (*rows.tokens.shape, run.cfg.decoder.vocab)
    # The file appears whole or not at all.
    with storage.replacing(out) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        if logits:
            # Written as it is computed, because [B, T, V] may not fit in memory. zip64, because a
            # member may pass 4 GiB.
            with archive.open("logits.npy", "w", force_zip64=True) as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
                logprobs = logprobs_of(run, params, rows, batch_size, file)
        else:
            logprobs = logprobs_of(run, params, rows, batch_size)
        arrays = {"logprobs": logprobs, "tokens": rows.tokens, "lengths": rows.lengths}
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)
    return logprobs


def logprobs_of(
    run: "Run", params: Any, rows: Rows, batch_size: int, logits: IO[bytes] | None = None
) -> np.ndarray:
    """Return logprobs float32 [B, T]: position t scores token t given those before it; 0 at
    position 0 and beyond a row's length. The file `logits` gets float32 [B, T, V].

    A row's values do not depend on other rows and padding, except for rounding in the last place.
    """
    import jax
    import tqdm
    from jax.sharding import NamedSharding, PartitionSpec

    from maxstack.hardware.compiling import in_order
    from maxstack.schema.mesh import parts

    step = jax.jit(make_scorer(run, logits is not None), compiler_options=in_order(run.mesh))
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    rules, shape = run.cfg.mesh.rules, run.mesh.shape
    over, pieces = parts(rules["batch"], shape), parts(rules["seq"], shape)
    # A ring over `seq` cuts each row in two pieces for each device.
    height, multiple = -(-batch_size // over) * over, math.lcm(ROUND, 2 * pieces)
    count, length = rows.tokens.shape
    logprobs = np.zeros((count, length), np.float32)
    for begin in tqdm.tqdm(
        range(0, count, batch_size), desc="scoring", unit=" batches", disable=None
    ):
        lengths = rows.lengths[begin : begin + batch_size]
        # Two tokens at least, so that there is one to score.
        width = -(-max(2, lengths.max()) // multiple) * multiple
        real, used = len(lengths), min(width, length)
        # The last batch is padded to full height too: another shape would be another program.
        tokens = np.zeros((height, width), np.int32)
        tokens[:real, :used] = rows.tokens[begin : begin + real, :used]
        batch = jax.device_put((tokens, np.pad(lengths, (0, height - real))), everywhere)
        results = jax.device_get(step(params, *batch))
        logprobs[begin : begin + real, :used] = results["logprobs"][:real, :used]
        if logits:
            for row_TV in results["logits"][:real, :used]:
                padded_TV = np.pad(row_TV, ((0, length - used), (0, 0)))
                logits.write(padded_TV.astype(np.float32).tobytes())
    return logprobs


def mean_loss(logprobs: np.ndarray, rows: Rows) -> float:
    """Return the mean negative log-likelihood of the scored tokens, in nats."""
    # float64: a sum of millions in float32 loses digits.
    return -float(logprobs.sum(dtype=np.float64)) / rows.scored


def text_batch(tokens_BT: Any, lengths_B: Any) -> tuple[dict[str, Any], Any]:
    """Return a batch with one text per row, and its mask of real tokens, bool [B, T]."""
    import jax.numpy as jnp

    positions_T = jnp.arange(tokens_BT.shape[1])
    real_BT = positions_T < lengths_B[:, None]
    batch = {
        "tokens": tokens_BT,
        "positions": jnp.where(real_BT, positions_T, 0),
        "segments": real_BT.astype(jnp.int32),
    }
    return batch, real_BT


def make_scorer(run: "Run", logits: bool) -> Any:
    """Return the function (weights, tokens int32 [B, T], lengths int32 [B]) -> logprobs float32 [B,
    T], and if asked for logits float32 [B, T, V], 0 beyond a row's length."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from maxstack.kernels.cross_entropy import cross_entropy

    def step(params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> dict[str, jax.Array]:
        batch, real_BT = text_batch(tokens_BT, lengths_B)
        model = nnx.merge(run.graph, nnx.State(params))
        # Quantization errors are counted at real tokens alone.
        with run.weights.rewrite.count_only(real_BT):
            logits_BTV = model.logits(model.hidden(batch))
        nll_BT, _ = cross_entropy(logits_BTV[:, :-1], tokens_BT[:, 1:])
        # The first token has none before it: 0 in its place keeps positions of tokens and scores
        # equal.
        results = {"logprobs": jnp.pad(jnp.where(real_BT[:, 1:], -nll_BT, 0.0), ((0, 0), (1, 0)))}
        if logits:
            results["logits"] = jnp.where(real_BT[..., None], logits_BTV, 0.0)
        return results

    return run.within(step)
