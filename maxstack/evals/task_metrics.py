"""Metrics of tasks: values of a question, and what they come to over all questions."""

import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxstack.errors import ConfigError, DataError
from maxstack.evals.task import Question, Task
from maxstack.schema.tasks import METRICS, FilterConfig, FilterStep, GroupConfig, MetricConfig

CHANGES: dict[str, Callable[[str], str]] = {
    "remove_whitespace": str.strip,
    "lowercase": str.lower,
    "uppercase": str.upper,
    "take_first": str,
}
"""Steps of filters but for regex."""


def values(task: Task, question: Question, answer: Any) -> dict[str, Any]:
    """Values of a task's metrics for a question: numbers, or a sum and what it is divided by.
    `answer`: Likelihood of each pair, or of the text; or the text that the model wrote."""
    cfg, metrics = task.cfg, task.cfg.metrics
    if cfg.output_type == "generate_until":
        filters = cfg.filter_list or (FilterConfig(name="none", filter=()),)
        return {
            _named(each.metric, kept.name): float(
                any(_same(each, _filtered(kept, answer), right) for right in question.right)
            )
            for kept in filters
            for each in metrics
        }
    if cfg.output_type == "loglikelihood":
        (only,) = answer
        of = {"perplexity": only.logprob, "acc": float(only.greedy)}
    elif cfg.output_type == "loglikelihood_rolling":
        size = len(question.text.encode())
        per_byte = (answer.logprob, size)
        words = (answer.logprob, len(re.split(r"\s+", question.text)))
        of = {"word_perplexity": words, "byte_perplexity": per_byte, "bits_per_byte": per_byte}
    else:
        sizes = {
            "acc": [1.0] * len(answer),
            "acc_norm": [float(len(choice)) for choice in question.choices],
            "acc_bytes": [float(len(choice.encode())) for choice in question.choices],
            "acc_tokens": [float(each.tokens) for each in answer],
        }
        of = {
            name: float(_best([each.logprob for each in answer], lengths) in question.right)
            for name, lengths in sizes.items()
        }
        of["exact_match"] = float(any(answer[number].greedy for number in question.right))
    return {each.metric: of[each.metric] for each in metrics}


def _best(logprobs: Sequence[float], lengths: Sequence[float]) -> int:
    """Number of the choice with the highest log-probability for its length; the first of equals."""
    shares = [
        logprob / length if length else -float("inf")
        for logprob, length in zip(logprobs, lengths, strict=True)
    ]
    return shares.index(max(shares))


def _same(metric: MetricConfig, answer: str, right: str) -> bool:
    """exact_match."""

    def plain(text: str) -> str:
        for pattern in metric.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        text = text.lower() if metric.ignore_case else text
        gone = (
            string.punctuation * metric.ignore_punctuation + string.digits * metric.ignore_numbers
        )
        return text.translate(str.maketrans("", "", gone))

    return plain(answer) == plain(right)


def _filtered(kept: FilterConfig, answer: str) -> str:
    for step in kept.filter:
        answer = _changed(step, answer)
    return answer


def _changed(step: FilterStep, answer: str) -> str:
    if step.function != "regex":
        return CHANGES[step.function](answer)
    matches = re.findall(step.regex_pattern, answer)
    if not -len(matches) <= step.group_select < len(matches):
        return step.fallback
    match = matches[step.group_select]
    if isinstance(match, tuple):
        match = next((part for part in match if part), step.fallback)
    return match.strip()


def results(
    task: Task, questions: Sequence[Question], all_values: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Metrics over the values of all questions, each with its standard error by the name
    `error_of` where there are two or more, and of the first that is a share of questions,
    `centered`. DataError where all texts are empty."""
    found: dict[str, float] = {}
    for metric in all_values[0]:
        items = [each[metric] for each in all_values]
        if isinstance(items[0], tuple) and not sum(size for _, size in items):
            raise DataError(f"task {task.name}: all its texts are empty")
        kind = METRICS[task.cfg.output_type][metric.partition(",")[0]]
        value, error = _aggregated(kind, items)
        found[metric] = value
        if len(items) > 1:
            found[error_of(metric)] = error
    if (share := next((name for name in found if is_share(name)), None)) is not None:
        chance = task.cfg.metadata.get("baseline")
        if chance is None:
            chance = 0.0
            if task.cfg.output_type == "multiple_choice":
                choices = [len(question.choices) for question in questions]
                chance = sum(1 / count for count in choices) / len(choices)
        if chance < 1:
            found["centered"] = (found[share] - chance) / (1 - chance)
    return found


def error_of(metric: str) -> str:
    """The name of a metric's standard error: METRIC_stderr, or METRIC_stderr,FILTER."""
    name, comma, kept = metric.partition(",")
    return f"{name}_stderr{comma}{kept}"


def is_error(metric: str) -> bool:
    """True for such a name."""
    return metric.partition(",")[0].endswith("_stderr")


def metric_names(opened: Sequence[Task | GroupConfig]) -> dict[str, list[str]]:
    """Names of metrics by task and group. ConfigError where a group names one that a task of it
    has not."""
    found: dict[str, list[str]] = {}
    for part in opened:
        if isinstance(part, Task):
            kept = [each.name for each in part.cfg.filter_list] or ["none"]
            metrics = [each.metric for each in part.cfg.metrics]
            found[part.name] = [_named(metric, name) for name in kept for metric in metrics]
        else:
            found[part.group] = [name for name, _ in _aggregates(part, found)]
    return found


def _aggregates(
    group: GroupConfig, by_task: Mapping[str, Iterable[str]]
) -> Iterator[tuple[str, bool]]:
    """Names of a group's metrics, and whether tasks count by their size."""
    for each in group.aggregate_metric_list:
        kept = each.filter_list
        if kept is None:
            there = {name for task in group.members for name in by_task[task]}
            names = sorted(name for name in there if name.partition(",")[0] == each.metric)
        else:
            names = [
                _named(each.metric, name) for name in ([kept] if isinstance(kept, str) else kept)
            ]
        for name in names or [each.metric]:
            for task in group.members:
                if name not in by_task[task]:
                    raise ConfigError(
                        f"group {group.group}: aggregate_metric_list: {task} has no metric {name}; "
                        f"it has {', '.join(by_task[task])}"
                    )
            yield name, each.weight_by_size


def _named(metric: str, kept: str) -> str:
    """A metric of answers as a filter leaves them."""
    return metric if kept == "none" else f"{metric},{kept}"


def is_share(metric: str) -> bool:
    """True for a metric that is a share of questions."""
    return metric.startswith(("acc", "exact_match")) and not is_error(metric)


def group_results(
    group: GroupConfig, by_name: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Metrics of a group: means over its tasks, with the pooled standard error of samples of these
    sizes where tasks count by them, else that of a mean of independent values."""
    found: dict[str, float] = {}
    for name, weighted in _aggregates(group, by_name):
        counts = [sizes[task] for task in group.members]
        weights = counts if weighted else [1] * len(counts)
        scores = [by_name[task][name] for task in group.members]
        found[name] = sum(s * w for s, w in zip(scores, weights, strict=True)) / sum(weights)
        tasks = [task for task in group.members if error_of(name) in by_name[task]]
        errors = [by_name[task][error_of(name)] for task in tasks]
        if len(tasks) == len(counts) and not weighted:
            found[error_of(name)] = math.sqrt(sum(error**2 for error in errors)) / len(counts)
        elif len(tasks) == len(counts) < sum(counts):
            pairs = zip(counts, errors, strict=True)
            spread = sum((count - 1) * error**2 * count for count, error in pairs)
            variance = spread / (sum(counts) - len(counts))
            found[error_of(name)] = math.sqrt(variance / sum(counts))
    return found


def _aggregated(kind: str, items: Sequence[Any]) -> tuple[float, float]:
    """A value over all questions and its standard error: of a mean s / sqrt(n) with the sample's
    deviation s, of functions of it by their derivative; of a ratio of sums by its residuals
    (Cochran 1977, Sampling Techniques, 6.4)."""
    count = len(items)
    if kind in ("mean", "perplexity"):
        mean = sum(items) / count
        spread = sum((each - mean) ** 2 for each in items) / max(count - 1, 1)
        error = math.sqrt(spread) / math.sqrt(count)
        if kind == "mean":
            return mean, error
        return math.exp(-mean), math.exp(-mean) * error
    total = sum(size for _, size in items)
    ratio = sum(value for value, _ in items) / total
    residuals = sum((value - ratio * size) ** 2 for value, size in items)
    error = math.sqrt(count / max(count - 1, 1) * residuals) / total
    if kind == "bits_per_byte":
        return -ratio / math.log(2), error / math.log(2)
    return math.exp(-ratio), math.exp(-ratio) * error
