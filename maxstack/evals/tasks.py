"""Evaluation by tasks: of a model as it is trained, and of one that was."""

import dataclasses
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
"""Answers that are generated at a time on each replica, at most."""


class Tasks:
    """Tasks that a run's model is asked, by any weights of it."""

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
        `limit`: questions of each task at most. ConfigError where the model gives no token a
        probability; DataError for a document that does not fit its task."""
        check_can_be_asked(run)
        self.run, self.prompt_format = run, prompt_format
        named = [part for part in opened if isinstance(part, Task)]
        self.tasks = [dataclasses.replace(task, prompt_format=prompt_format) for task in named]
        self._groups = [part for part in opened if isinstance(part, GroupConfig)]
        self.metrics = metric_names(opened)
        self.questions = {task.name: task.questions[:limit] for task in self.tasks}
        self.texts = Texts(run.cfg.data.tokenizer)
        self.scorer = Scorer(run, batch_size, length)
        self._answers = AT_ONCE, length, stop_tokens
        if any(task.cfg.output_type == "generate_until" for task in self.tasks):
            _ = self.generator
        self.requests = {task.name: [*self._asked(task)] for task in self.tasks}

    @functools.cached_property
    def generator(self) -> Generator:
        """What writes answers. ConfigError where the run has several processes."""
        return Generator(self.run, self.texts, *self._answers)

    def _asked(self, task: Task) -> Iterator[list[Scored]]:
        """What is scored of each question."""
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
        """Requests of a task that lose their beginning."""
        return sum(
            self.scorer.too_long(each) for asked in self.requests[task.name] for each in asked
        )

    def answers(self, task: Task, params: Any, progress: bool = False) -> list[Any]:
        """What `values` takes, for each question."""
        bar = task.name if progress else ""
        if task.cfg.output_type == "generate_until":
            prompts = [question.text for question in self.questions[task.name]]
            return self.generator(params, prompts, task.cfg.generation_kwargs, task.cfg.until, bar)
        asked = self.requests[task.name]
        flat = iter(self.scorer(params, [each for part in asked for each in part], bar))
        found = [[next(flat) for _ in part] for part in asked]
        rolling = task.cfg.output_type == "loglikelihood_rolling"
        return [together(each) for each in found] if rolling else found

    def results(self, params: Any, progress: bool = False) -> tuple[Results, list[dict[str, Any]]]:
        """Metrics by task and group, and a record of each question."""
        found: Results = {}
        records = []
        for task in self.tasks:
            questions = self.questions[task.name]
            answers = self.answers(task, params, progress)
            each = [values(task, q, a) for q, a in zip(questions, answers, strict=True)]
            found[task.name] = results(task, questions, each)
            records += [
                record(task, number, *both)
                for number, both in enumerate(zip(questions, answers, each, strict=True))
            ]
        for group in self._groups:
            found[group.group] = group_results(group, found, self.sizes)
        return found, records

    @property
    def sizes(self) -> dict[str, int]:
        """Questions by task."""
        return {name: len(questions) for name, questions in self.questions.items()}


class TaskEvaluator:
    """The tasks of eval.tasks, by the weights of a step."""

    def __init__(self, run: "Run", log: Log, writer: Writer):
        """ConfigError or DataError for a task that cannot be asked."""
        cfg = run.cfg
        self._log, self._writer = log, writer
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
        """Names of its figures, without those of errors."""
        by_task = self._tasks.metrics.items()
        names = [f"tasks/{task}/{metric}" for task, metrics in by_task for metric in metrics]
        more = [f"tasks/{task.name}/centered" for task in self._tasks.tasks]
        return [*names, *more, "tasks/centered"]

    def __call__(self, step: int, params: Any) -> dict[str, float]:
        """Metrics as tasks/NAME/METRIC; written and said."""
        began = time.perf_counter()
        found, _ = self._tasks.results(params)
        row = flat(found)
        self._writer.write({"step": step, **row, "tasks_seconds": time.perf_counter() - began})
        said = ", ".join(
            f"{name} {metric} {value:.4g}"
            + (f" ± {error:.2g}" if (error := metrics.get(error_of(metric))) else "")
            for name, metrics in found.items()
            for metric, value in metrics.items()
            if metric != "centered" and not is_error(metric)
        )
        self._log.say(f"tasks at step {step}: {said}")
        return row


def check_can_be_asked(run: "Run") -> None:
    """ConfigError for a model that gives no token a probability by those before it."""
    cfg = run.cfg
    if not cfg.objective.FORWARD or cfg.decoder.head.scores:
        raise ConfigError(
            f"tasks: objective.kind={cfg.objective.kind} trains a model that gives no token a "
            "probability by those before it, which tasks need"
        )


def flat(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics as tasks/NAME/METRIC, and tasks/centered."""
    row = {
        f"tasks/{name}/{metric}": value
        for name, metrics in found.items()
        for metric, value in metrics.items()
    }
    mean = centered(found)
    return row if mean is None else row | {"tasks/centered": mean}


def centered(found: Mapping[str, Mapping[str, float]]) -> float | None:
    """The mean over tasks of the share of questions beyond chance, (share - chance) / (1 - chance),
    as CORE has it (DCLM, arXiv:2406.11794); None where no task has a share."""
    shares = [metrics["centered"] for metrics in found.values() if "centered" in metrics]
    return sum(shares) / len(shares) if shares else None


def together(pieces: Sequence[Likelihood]) -> Likelihood:
    """The likelihood of a text by those of its pieces."""
    return Likelihood(
        sum(each.logprob for each in pieces),
        all(each.greedy for each in pieces),
        sum(each.tokens for each in pieces),
    )


def record(
    task: Task, number: int, question: Question, answer: Any, values: Mapping[str, Any]
) -> dict[str, Any]:
    """A question with what the model made of it, as plain data."""
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
