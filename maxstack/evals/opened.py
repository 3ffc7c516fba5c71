"""Tasks asked of a model that was trained: a run, one of its checkpoints, or a model folder."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.errors import ConfigError, DataError
from maxstack.evals.prompts import PromptFormat
from maxstack.evals.task import Task
from maxstack.evals.tasks import Tasks
from maxstack.inference.engine_setup import (
    chat_template,
    max_length_of,
    model_files,
    open_model_tokenizer,
)
from maxstack.inference.trained_model import assemble_model, read_weights
from maxstack.schema.tasks import GroupConfig

if TYPE_CHECKING:
    from maxstack.run import Run

USUAL = 4096
"""Tokens of a row at most, where a model folder allows more and nobody asks for more."""


def ask(
    model: str,
    overrides: Sequence[str],
    opened: Sequence[Task | GroupConfig],
    batch_size: int,
    length: int | None,
    limit: int | None,
    prompt_format: PromptFormat,
    chat: bool,
) -> tuple[Tasks, Any]:
    """Tasks ready to be asked, and the model's weights. `length`: tokens of a request at most;
    None: data.seq_len of a run, or what a model folder allows. `chat`: by the model's chat
    template; where it has one and is asked without, a line says so. ConfigError where the model
    cannot be asked, or has no tokenizer."""
    run, own = assemble_model(model, overrides)
    folder = model_files(run.cfg, own)
    tokenizer, ends = open_model_tokenizer(run.cfg, own, folder)
    if tokenizer is None:
        raise ConfigError(
            f"{model}: no tokenizer in it that can be read; give data.tokenizer, as in "
            "'data.tokenizer={kind: huggingface, path: tokenizer.json}'"
        )
    most = max_length_of(run.cfg, own, folder)
    if length and run.cfg.decoder.positions and length > most:
        raise ConfigError(f"--length {length}: the model has positions for {most} tokens alone")
    length = length or (run.cfg.data.seq_len if own else min(most, USUAL))
    template = None
    with contextlib.nullcontext() if chat else contextlib.suppress(ConfigError, DataError):
        template = chat_template(model, run.cfg, own)
    if chat:
        prompt_format = dataclasses.replace(prompt_format, template=template)
    elif template:
        print(
            f"{model} has a chat template, and is asked without it; --apply-chat-template uses it"
        )
    tasks = Tasks(run, opened, batch_size, length, ends, limit, prompt_format)
    return tasks, read_weights(model, run, own)


def check_finite(run: "Run", records: Sequence[dict[str, Any]]) -> None:
    """DataError where a log-probability is NaN, unless weights that are not finite are allowed."""
    answers = [(each, np.asarray(each["answer"])) for each in records]
    odd = [each for each, found in answers if found.dtype.kind == "f" and np.isnan(found).any()]
    if odd and not run.cfg.checkpoint.allow_nonfinite:
        raise DataError(
            f"{len(odd)} of {len(records)} questions have log-probabilities that are NaN, the "
            f"first is document {odd[0]['document']} of task {odd[0]['task']}; the weights are "
            "damaged, or too large for model.dtype: try model.dtype=float32, or take it as it is "
            "with --allow-nonfinite"
        )
