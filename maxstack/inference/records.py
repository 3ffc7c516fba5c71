"""Records scored by a model: log-probabilities of answers, rewards, likeliest tokens.
Shapes: B rows  T time  K likeliest tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack import strict_json
from maxstack.data.examples import Segment, units_of
from maxstack.data.sources import open_source
from maxstack.inference.resumable_file import ResumableFile
from maxstack.inference.score import ROUND, check_length
from maxstack.report.progress import progress
from maxstack.schema.data import ANSWERS, DataConfig, JsonlSource, Record
from maxstack.schema.objective import RowField

if TYPE_CHECKING:
    from maxstack.data.documents import Documents
    from maxstack.run import Run

AT_ONCE = 64
"""Batches whose rows are sorted by length together."""


def score_records(
    run: "Run",
    params: Any,
    model: str,
    file: str,
    record: Record,
    out: str,
    *,
    batch_size: int,
    top: int,
) -> int:
    """Write the records of a JSONL file to `out`, each with the log-probability of its answer
    (`ref_logps`, or `ref_chosen_logps` and `ref_rejected_logps`), or by a reward model its `reward`
    (or `chosen_reward` and `rejected_reward`); with `top`, also the K likeliest tokens at each
    token (`top_tokens` and `top_logprobs`, [tokens, K]). Records are kept in FILE.unfinished as
    they are done, from which a later call of the same `model` goes on -> their number."""
    source = JsonlSource(kind="jsonl", files=(file,), record=record)
    cfg = run.cfg.data.model_copy(update={"sources": (source,), "packing": "none"})
    documents = open_source(source, split="all")
    # All that values depend on; a resumed file with other settings is refused.
    said = [file, record.model_dump(), documents.identity(), model, top]
    settings = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    done = ResumableFile(out, settings)
    left = [index for index in range(len(documents)) if (index, 0) not in done.lines]
    scorer = BatchScorer(run, params, batch_size, top)
    with progress(len(documents), "scoring", "records", len(done.lines)) as shown:
        # Sorted by length, rows of a batch need little padding. Only 64 batches at a time, so that
        # memory is bounded and a killed call loses little.
        for begin in range(0, len(left), batch_size * AT_ONCE):
            part = left[begin : begin + batch_size * AT_ONCE]
            read = {index: _read(documents, index, cfg, run, record) for index in part}
            rows = [(index, i) for index in part for i in range(len(read[index][1]))]
            rows.sort(key=lambda row: len(read[row[0]][1][row[1]].ids))
            found: dict[int, dict[str, Any]] = {index: {} for index in part}
            missing = {index: len(read[index][1]) for index in part}
            for at in range(0, len(rows), batch_size):
                batch = rows[at : at + batch_size]
                segments = [read[index][1][i] for index, i in batch]
                for (index, i), values in zip(batch, scorer(segments), strict=True):
                    name = ANSWERS[record.kind][i]
                    found[index] |= {_key(key, name): value for key, value in values.items()}
                    # A record's segments may lie in different batches; it is written once all are
                    # there.
                    missing[index] -= 1
                    if not missing[index]:
                        done.append((index, 0), {**read[index][0], **found[index]})
                        shown.update()
    done.write()
    return len(documents)


def _key(key: str, name: str) -> str:
    if not name or key.startswith("top_"):
        return key
    return f"{name}_reward" if key == "reward" else f"ref_{name}_logps"


def _read(
    documents: "Documents", index: int, cfg: DataConfig, run: "Run", record: Record
) -> tuple[Mapping[str, Any], list[Segment]]:
    """Read a record and its segments."""
    # A reward is read at the end of a segment.
    fields = {"ends": RowField("batch seq", "float32")} if run.cfg.decoder.head.scores else {}
    (unit,) = units_of(documents, index, cfg, fields)
    for segment in unit.segments:
        check_length(run, len(segment.ids) - 1, documents.where(index))
    text = documents[index]
    assert isinstance(text, bytes)
    return strict_json.parse(text, documents.where(index), strict=False), unit.segments


class BatchScorer:
    """The compiled scoring of a batch of segments."""

    def __init__(self, run: "Run", params: Any, batch_size: int, top: int):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from maxstack.hardware.compiling import in_order
        from maxstack.schema.mesh import parts

        rules, shape = run.cfg.mesh.rules, run.mesh.shape
        over, pieces = parts(rules["batch"], shape), parts(rules["seq"], shape)
        # One height for all batches and a few widths: few programs.
        self._height = -(-batch_size // over) * over
        self._multiple = math.lcm(ROUND, 2 * pieces)
        self._everywhere = NamedSharding(run.mesh, PartitionSpec())
        self._params, self._top = params, top
        self._scores = run.cfg.decoder.head.scores
        compute = run.within(_computed(run, top))
        self._compute = jax.jit(compute, compiler_options=in_order(run.mesh))

    def __call__(self, segments: list[Segment]) -> Iterator[dict[str, Any]]:
        """Yield the values of each segment, by name."""
        import jax

        longest = max(len(segment.ids) for segment in segments) - 1
        width = -(-longest // self._multiple) * self._multiple
        arrays = {
            "tokens": np.zeros((self._height, width), np.int32),
            "targets": np.zeros((self._height, width), np.int32),
            "positions": np.zeros((self._height, width), np.int32),
            "segments": np.zeros((self._height, width), np.int32),
            "mask": np.zeros((self._height, width), np.float32),
        }
        for i, segment in enumerate(segments):
            # The last token is a target alone.
            size = len(segment.ids) - 1
            arrays["tokens"][i, :size] = segment.ids[:-1]
            arrays["targets"][i, :size] = segment.ids[1:]
            arrays["positions"][i, :size] = np.arange(size)
            arrays["segments"][i, :size] = 1
            arrays["mask"][i, :size] = segment.values["mask"][1:]
        batch = jax.device_put(arrays, self._everywhere)
        made = jax.device_get(self._compute(self._params, batch))
        for i, segment in enumerate(segments):
            size = len(segment.ids) - 1
            if self._scores:
                yield {"reward": _brief(made["sum"][i])}
                continue
            values: dict[str, Any] = {"ref_logps": _brief(made["sum"][i])}
            if self._top:
                tokens = made["top_tokens"][i, :size].tolist()
                logps = made["top_logprobs"][i, :size]
                # The first token has none before it; so lists are as long as the tokens.
                nothing = [[0] * self._top]
                values["top_tokens"] = nothing + tokens
                values["top_logprobs"] = nothing + [list(map(_brief, row)) for row in logps]
            yield values


def _computed(run: "Run", top: int) -> Any:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from maxstack.kernels.sequences import natural
    from maxstack.objectives.log_probs import log_probs
    from maxstack.objectives.statistics import map_blocks

    def likeliest(logits_BtV: jax.Array) -> tuple[jax.Array, jax.Array]:
        values_BtK, tokens_BtK = jax.lax.top_k(logits_BtV, top)
        log_z_Bt = jax.nn.logsumexp(logits_BtV, axis=-1, keepdims=True)
        return tokens_BtK, values_BtK - log_z_Bt

    def compute(params: Any, batch: Any) -> dict[str, jax.Array]:
        model = nnx.merge(run.graph, nnx.State(params))
        normed_BTD = model.norm(model.trunk(batch)[0])
        if run.cfg.decoder.head.scores:
            # One position counts (add_end_token), so the sum is its score.
            return {"sum": (model.scores(normed_BTD) * batch["mask"]).sum(axis=1)}
        # A selection, not a product: what is masked may be infinite.
        logps_BT = jnp.where(batch["mask"] > 0, log_probs(model, normed_BTD, batch["targets"]), 0)
        made = {"sum": logps_BT.sum(axis=1)}
        if top:
            # Block by block, so that logits [B, T, V] are never whole.
            found = map_blocks([model], likeliest, [natural(normed_BTD)])
            made["top_tokens"], made["top_logprobs"] = found
        return made

    return compute


def _brief(value: Any) -> float:
    """Return a float32 in the 9 digits that identify it."""
    # Half of the digits that a float64 of the same number would be written with.
    return float(f"{float(value):.9g}")
