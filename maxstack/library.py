"""Functions of docs/PYTHON.md that open a trained model, its data or its figures in a script."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.data.dataset import Batches
    from maxstack.data.tokenizers import Tokenizer
    from maxstack.run import Run
    from maxstack.schema.config import Config


class Model(NamedTuple):
    """A trained model."""

    module: Any
    """The NNX module with its weights: module(tokens int32 [B, T]) -> float32 logits [B, T, V]."""
    tokenizer: "Tokenizer | None"
    """encode(bytes) -> int32 ids, decode(ids) -> bytes; None where the model has none."""
    run: "Run"
    """Its configuration, shapes and shardings."""


def model(name: str | Path, *overrides: str) -> Model:
    """Open a run, a checkpoint, a Hugging Face folder, a GGUF file or a model of the hub.
    ConfigError or DataError where it cannot be read."""
    from flax import nnx

    from maxstack.inference.engine_setup import model_files, open_model_tokenizer
    from maxstack.inference.trained_model import assemble_model, read_weights

    run, own = assemble_model(str(name), overrides)
    module = nnx.merge(run.graph, nnx.State(read_weights(str(name), run, own)))
    tokenizer, cfg = None, run.cfg
    if cfg.model.tokens is None:  # a language model
        tokenizer, _ = open_model_tokenizer(cfg, own, model_files(cfg, own))
    return Model(module, tokenizer, run)


def dataset(
    cfg: "Config", *, process: int = 0, processes: int = 1, evaluation: bool = False
) -> "Batches":
    """The batches that a run trains on, a grain.IterDataset without end; with `evaluation` those of
    its held-out documents, once. Number `process` of `processes` gets its share of the rows."""
    from maxstack.data.dataset import Batches

    return Batches(cfg, process=process, processes=processes, evaluation=evaluation)


def evaluate(run: str | Path, *overrides: str) -> dict[str, float]:
    """Evaluate a run by its own objective on its held-out data, and on its tasks -> figures by
    name, as in metrics.jsonl. ConfigError for a model that is no run."""
    from maxstack import startup
    from maxstack.inference.trained_model import assemble_model, read_weights
    from maxstack.load import run_folder
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer

    own = run_folder(str(run))
    if own is None:
        raise ConfigError(
            f"{run}: is not a run, so it has no held-out data; give --tasks, or evaluate a run "
            "that starts from it"
        )
    assembled, _ = assemble_model(str(run), ["eval.every=1", *overrides], trains=True)
    with contextlib.ExitStack() as ending:
        _, maker = startup.open_feed(assembled, own, ending)
        silent = Log(own, assembled.cfg.train.steps, False), Writer(own, first=False)
        evaluation = startup.evaluator(assembled, *silent, startup.frozen_weights(assembled), maker)
        assert evaluation
        return evaluation.figures(0, read_weights(str(run), assembled, own))
