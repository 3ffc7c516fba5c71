"""Asks a model tasks: that of a run while it trains, or a trained one.

A task's documents become requests once (task.py); requests are scored in packed rows (scoring.py)
or answered by the engine (generation.py), and metrics are computed from the answers
(task_metrics.py)."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.data.chat import answer_ends
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.evals.generation import Generator
from maxstack.evals.prompts import PLAIN, PromptFormat
from maxstack.evals.scoring import Scored, Scorer, Texts
from maxstack.evals.task import Likelihood, Question, Task
from maxstack.evals.task_files import open_tasks
from maxstack.evals.task_metrics import (
    error_of,
    group_results,
    is_error,
    metric_names,
    results,
    values,
)
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.schema.tasks import GroupConfig

if TYPE_CHECKING:
    from maxstack.run import Run

Results = dict[str, dict[str, float]]
"""Metrics by task or group."""
AT_ONCE = 32
"""Answers generated at a time on each replica, at most."""
USUAL = 4096
"""Tokens of a request at most, where a model folder allows more and nobody asks for more."""


class Tasks:
    """Tasks asked of a run's model, by any weights of it."""

    def __init__(
        self,
        run: "Run",
        opened: Sequence[Task | GroupConfig],
        batch_size: int,
        length: int,
        stop_tokens: Collection[int],
        limit: int | None = None,
        prompt_format: PromptFormat = PLAIN,
    ):
        """`length`: tokens of a row, and of a request at most. `stop_tokens` end an answer.
        `limit`: questions of each task at most. ConfigError where the model gives tokens no
        probability; DataError for a document that does not fit its task."""
        check_can_be_asked(run)
        self.run, self.prompt_format = run, prompt_format
        self.tasks = [
            dataclasses.replace(task, prompt_format=prompt_format)
            for task in opened
            if isinstance(task, Task)
        ]
        self._groups = [part for part in opened if isinstance(part, GroupConfig)]
        self.metrics = metric_names(opened)
        # All requests are made here, so that a document that does not fit is told before the first
        # step of a run.
        self.questions = {task.name: task.questions[:limit] for task in self.tasks}
        self.texts = Texts(run.cfg.data.tokenizer)
        self.scorer = Scorer(run, batch_size, length)
        self._length, self._stop_tokens = length, stop_tokens
        if any(task.cfg.output_type == "generate_until" for task in self.tasks):
            _ = self.generator  # refuses runs of several processes before the first step
        self.requests = {task.name: [*self._requests(task)] for task in self.tasks}

    @functools.cached_property
    def generator(self) -> Generator:
        """Writes answers. ConfigError where the run has several processes."""
        return Generator(self.run, self.texts, AT_ONCE, self._length, self._stop_tokens)

    def _requests(self, task: Task) -> Iterator[list[Scored]]:
        """Yield the texts to score of each question."""
        for number, question in enumerate(self.questions[task.name]):
            try:
                if task.cfg.output_type == "loglikelihood_rolling":
                    yield self.texts.windows(question.text, self.scorer.length)
                else:
                    pairs = [self.texts.pair(*pair) for pair in question.pairs]
                    for pair in pairs:
                        self.scorer.check(pair)
                    yield pairs
            except DataError as error:
                raise DataError(f"task {task.name}, document {number}: {error}") from error

    def too_long(self, task: Task) -> int:
        """Count the requests of a task that lose their beginning."""
        asked = self.requests[task.name]
        return sum(self.scorer.too_long(each) for part in asked for each in part)

    def answers(self, task: Task, params: Any, progress: bool = False) -> list[Any]:
        """Return the answer to each question, in the form that `values` takes."""
        bar = task.name if progress else ""
        if task.cfg.output_type == "generate_until":
            prompts = [question.text for question in self.questions[task.name]]
            return self.generator(params, prompts, task.cfg.generation_kwargs, task.cfg.until, bar)
        asked = self.requests[task.name]
        found = self.score(params, asked, bar)
        rolling = task.cfg.output_type == "loglikelihood_rolling"
        return [join_likelihoods(each) for each in found] if rolling else found

    def score(
        self, params: Any, asked: Sequence[Sequence[Scored]], progress: str
    ) -> list[list[Likelihood]]:
        """Return the likelihoods of groups of requests, scored together."""
        # All questions of a task at once: the more requests, the fuller the rows.
        flat = iter(self.scorer(params, [each for part in asked for each in part], progress))
        return [[*itertools.islice(flat, len(part))] for part in asked]

    def results(self, params: Any, progress: bool = False) -> tuple[Results, list[dict[str, Any]]]:
        """Return metrics by task and group, and a record of each question."""
        found: Results = {}
        records = []
        for task in self.tasks:
            questions = self.questions[task.name]
            answers = self.answers(task, params, progress)
            each = [values(task, q, a) for q, a in zip(questions, answers, strict=True)]
            found[task.name] = results(task, questions, each)
            for number, both in enumerate(zip(questions, answers, each, strict=True)):
                records.append(record(task, number, *both))
        for group in self._groups:
            found[group.group] = group_results(group, found, self.sizes)
        return found, records

    @property
    def sizes(self) -> dict[str, int]:
        """Number of questions by task."""
        return {name: len(questions) for name, questions in self.questions.items()}


class TaskEvaluator:
    """Asks the tasks of eval.tasks by the weights of a step."""

    def __init__(self, run: "Run", log: Log, writer: Writer):
        """ConfigError or DataError for a task that cannot be asked."""
        cfg = run.cfg
        self._log, self._writer = log, writer
        # What ends an answer in the run's data ends it here.
        ends = answer_ends(cfg.data, open_tokenizer(cfg.data.tokenizer))
        size = cfg.eval.batch_size or cfg.train.batch_size
        self._tasks = Tasks(run, open_tasks(cfg.eval.tasks), size, cfg.data.seq_len, ends)
        for task in self._tasks.tasks:
            if cut := self._tasks.too_long(task):
                log.say(
                    f"task {task.name}: {cut} requests have more than data.seq_len="
                    f"{self._tasks.scorer.length} tokens, and lose their beginning"
                )

    @property
    def names(self) -> list[str]:
        """Names of its metrics, without standard errors."""
        by_task = self._tasks.metrics.items()
        names = [f"tasks/{task}/{metric}" for task, metrics in by_task for metric in metrics]
        # Named beforehand, since a run may choose its checkpoint by them.
        more = [f"tasks/{task.name}/centered" for task in self._tasks.tasks]
        return [*names, *more, "tasks/centered"]

    def __call__(self, step: int, params: Any) -> dict[str, float]:
        """Return metrics as tasks/NAME/METRIC, after writing and logging them."""
        began = time.perf_counter()
        found, _ = self._tasks.results(params)
        row = flatten_metrics(found)
        self._writer.write({"step": step, **row, "tasks_seconds": time.perf_counter() - began})
        said = []
        for name, metrics in found.items():
            for metric, value in metrics.items():
                if metric != "centered" and not is_error(metric):
                    error = metrics.get(error_of(metric))
                    said.append(
                        f"{name} {metric} {value:.4g}" + (f" ± {error:.2g}" if error else "")
                    )
        self._log.say(f"tasks at step {step}: {', '.join(said)}")
        return row


def open_model_tasks(
    model: str,
    overrides: Sequence[str],
    opened: Sequence[Task | GroupConfig],
    batch_size: int,
    length: int | None,
    limit: int | None,
    prompt_format: PromptFormat,
    chat: bool,
) -> tuple[Tasks, Any]:
    """Return tasks ready to be asked of a run, one of its checkpoints or a model folder, and the
    model's weights.

    `length`: tokens of a request at most; None: data.seq_len of a run, or what a model folder
    allows. `chat`: use the model's chat template; without it, a line tells that there is one.
    ConfigError where the model cannot be asked, or has no tokenizer.
    """
    from maxstack.inference.engine_setup import (
        chat_template,
        max_length_of,
        model_files,
        open_model_tokenizer,
    )
    from maxstack.inference.trained_model import assemble_model, read_weights

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
    # A run's rows say how long its texts are; a model folder's limit may be more than memory holds.
    length = length or (run.cfg.data.seq_len if own else min(most, USUAL))
    template = None
    # Without --apply-chat-template a template that cannot be read is no fault.
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


def check_can_be_asked(run: "Run") -> None:
    """ConfigError for a model that does not predict the next token."""
    cfg = run.cfg
    if not cfg.objective.FORWARD or cfg.decoder.head.scores:
        raise ConfigError(
            f"tasks: objective.kind={cfg.objective.kind} trains a model that gives no token a "
            "probability by those before it, which tasks need"
        )


def check_finite(run: "Run", records: Sequence[dict[str, Any]]) -> None:
    """DataError where a log-probability is NaN, unless weights that are not finite are allowed."""
    answers = [(each, np.asarray(each["answer"])) for each in records]
    # max() over NaN depends on their order, so accuracies of such answers would look real.
    odd = [each for each, found in answers if found.dtype.kind == "f" and np.isnan(found).any()]
    if odd and not run.cfg.checkpoint.allow_nonfinite:
        raise DataError(
            f"{len(odd)} of {len(records)} questions have log-probabilities that are NaN, the "
            f"first is document {odd[0]['document']} of task {odd[0]['task']}; the weights are "
            "damaged, or too large for model.dtype: try model.dtype=float32, or take it as it is "
            "with --allow-nonfinite"
        )


def flatten_metrics(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return metrics as tasks/NAME/METRIC, and tasks/centered."""
    row = {
        f"tasks/{name}/{metric}": value
        for name, metrics in found.items()
        for metric, value in metrics.items()
    }
    mean = centered(found)
    return row if mean is None else row | {"tasks/centered": mean}


def centered(found: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the mean over tasks of the share of questions beyond chance, (share - chance) / (1 -
    chance), as CORE defines it (DCLM, arXiv:2406.11794); None where no task has a share."""
    # Groups have no `centered`, so no task counts twice.
    shares = [metrics["centered"] for metrics in found.values() if "centered" in metrics]
    return sum(shares) / len(shares) if shares else None


def join_likelihoods(pieces: Sequence[Likelihood]) -> Likelihood:
    """Return the likelihood of a text by those of its pieces."""
    return Likelihood(
        sum(each.logprob for each in pieces),
        all(each.greedy for each in pieces),
        sum(each.tokens for each in pieces),
    )


def record(
    task: Task, number: int, question: Question, answer: Any, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a question and its answer as plain data."""
    made: Any = answer
    if isinstance(answer, Likelihood):
        made = answer.logprob
    elif not isinstance(answer, str):
        made = [each.logprob for each in answer]
    return {
        "task": task.name,
        "document": number,
        "requests": [*question.pairs] or question.text,
        "right": [*question.right],
        "answer": made,
        **values,
    }
