"""Metrics of tasks: values of each question, and their aggregates over all questions with standard
errors.

A value is a number or a pair (sum, size), of which the ratio of the totals counts. Errors of means
are s / sqrt(n) with the sample's deviation s; those of functions of a mean follow by the
derivative; those of ratios by their residuals (Cochran 1977, Sampling Techniques, 6.4).
"""

import functools
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxstack.config.own_kinds import is_own, last_name, resolve
from maxstack.errors import ConfigError, DataError
from maxstack.evals.task import Likelihood, Question, Task
from maxstack.schema.tasks import METRICS, FilterConfig, FilterStep, GroupConfig, MetricConfig

CHANGES: dict[str, Callable[[str], str]] = {
    "remove_whitespace": str.strip,
    "lowercase": str.lower,
    "uppercase": str.upper,
    "take_first": str,
}
"""Filter steps other than regex."""


def values(task: Task, question: Question, answer: Any) -> dict[str, Any]:
    """Return the values of a task's metrics for a question. `answer`: the Likelihood of each pair,
    or of the text; or the text that the model wrote."""
    metrics = task.cfg.metrics
    if task.cfg.output_type == "generate_until":
        found = {}
        for kept in task.cfg.filter_list or (FilterConfig(name="none", filter=()),):
            # Each list of filters gives a metric of its own, from the same answer.
            filtered = _filter(kept, answer)
            for each in metrics:
                if is_own(each.metric):
                    value = _own(each.metric)(filtered, question.right)
                else:
                    value = any(_matches_exactly(each, filtered, other) for other in question.right)
                found[_name(each.metric, kept.name)] = float(value)
        return found
    of: dict[str, Any]
    if task.cfg.output_type == "loglikelihood":
        (only,) = answer
        of = {"perplexity": only.logprob, "acc": float(only.greedy)}
    elif task.cfg.output_type == "loglikelihood_rolling":
        per_byte = (answer.logprob, len(question.text.encode()))
        # As lm-evaluation-harness counts words: by white space, with empty ones at the ends.
        words = (answer.logprob, len(re.split(r"\s+", question.text)))
        of = {"word_perplexity": words, "byte_perplexity": per_byte, "bits_per_byte": per_byte}
    else:
        of = _choice_values(question, answer)
    return {each.metric: of[each.metric] for each in metrics}


def _choice_values(question: Question, answer: Sequence[Likelihood]) -> dict[str, float]:
    lengths = {
        "acc": [1 for _ in answer],
        # Longer choices are less likely; lengths in characters, bytes or tokens make them
        # comparable.
        "acc_norm": [len(choice) for choice in question.choices],
        "acc_bytes": [len(choice.encode()) for choice in question.choices],
        "acc_tokens": [each.tokens for each in answer],
    }
    of = {}
    for name, sizes in lengths.items():
        shares = [
            # An empty choice has no share and never wins.
            each.logprob / size if size else -math.inf
            for each, size in zip(answer, sizes, strict=True)
        ]
        best = shares.index(max(shares))  # the first of equals
        # A question may have several right choices.
        of[name] = float(best in question.right)
    return of | {"exact_match": float(any(answer[number].greedy for number in question.right))}


def _matches_exactly(metric: MetricConfig, answer: str, right: str) -> bool:
    def plain(text: str) -> str:
        for pattern in metric.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        ignored = string.punctuation if metric.ignore_punctuation else ""
        ignored += string.digits if metric.ignore_numbers else ""
        text = text.lower() if metric.ignore_case else text
        return text.translate(str.maketrans("", "", ignored))

    return plain(answer) == plain(right)


def _filter(kept: FilterConfig, answer: str) -> str:
    for step in kept.filter:
        answer = _apply(step, answer)
    return answer


def _apply(step: FilterStep, answer: str) -> str:
    if step.function != "regex":
        return CHANGES[step.function](answer)
    matches = re.findall(step.regex_pattern, answer)
    if not -len(matches) <= step.group_select < len(matches):
        return step.fallback
    match = matches[step.group_select]
    if isinstance(match, tuple):
        # Of several groups of a pattern the first that matched counts, as in lm-evaluation-harness.
        match = next((part for part in match if part), step.fallback)
    return match.strip()


def results(
    task: Task, questions: Sequence[Question], all_values: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return metrics over the values of all questions; for two or more each with its standard
    error, named by `error_of`; and `centered` of the first that is a share of questions. DataError
    where all texts are empty."""
    found: dict[str, float] = {}
    for metric in all_values[0]:
        items = [each[metric] for each in all_values]
        # Ratios of totals, such as bits per byte, have no value over nothing.
        if isinstance(items[0], tuple) and not sum(size for _, size in items):
            raise DataError(f"task {task.name}: all its texts are empty")
        kind = METRICS[task.cfg.output_type].get(metric.partition(",")[0], "mean")
        found[metric], error = _aggregate(kind, items)
        if len(items) > 1:
            found[error_of(metric)] = error
    if (share := next((name for name in found if _is_share(name)), None)) is not None:
        chance = task.cfg.metadata.get("baseline")
        if chance is None:
            chance = 0.0
            if task.cfg.output_type == "multiple_choice":
                # Questions of one task may have different numbers of choices.
                chance = sum(1 / len(each.choices) for each in questions) / len(questions)
        # Where every guess is right there is nothing beyond chance.
        if chance < 1:
            found["centered"] = (found[share] - chance) / (1 - chance)
    return found


def error_of(metric: str) -> str:
    """Return the name of a metric's standard error: METRIC_stderr, or METRIC_stderr,FILTER."""
    name, comma, kept = metric.partition(",")
    return f"{name}_stderr{comma}{kept}"


def is_error(metric: str) -> bool:
    """Return True for the name of a standard error."""
    return metric.partition(",")[0].endswith("_stderr")


def metric_names(opened: Sequence[Task | GroupConfig]) -> dict[str, list[str]]:
    """Return the names of metrics by task and group. ConfigError where a group names a metric that
    a task of it does not have."""
    found: dict[str, list[str]] = {}
    for part in opened:
        if isinstance(part, Task):
            kept = [each.name for each in part.cfg.filter_list] or ["none"]
            metrics = [each.metric for each in part.cfg.metrics]
            found[part.name] = [_name(metric, name) for name in kept for metric in metrics]
        else:
            found[part.group] = [name for name, _ in _aggregates(part, found)]
    return found


def _aggregates(
    group: GroupConfig, by_task: Mapping[str, Iterable[str]]
) -> Iterator[tuple[str, bool]]:
    """Yield the names of a group's metrics, and whether tasks count by their size."""
    for each in group.aggregate_metric_list:
        kept = each.filter_list
        if kept is None:
            there = {name for task in group.members for name in by_task[task]}
            names = sorted(name for name in there if name.partition(",")[0] == each.metric)
        else:
            filters = [kept] if isinstance(kept, str) else kept
            names = [_name(each.metric, name) for name in filters]
        for name in names or [each.metric]:
            for task in group.members:
                if name not in by_task[task]:
                    raise ConfigError(
                        f"group {group.group}: aggregate_metric_list: {task} has no metric {name}; "
                        f"it has {', '.join(by_task[task])}"
                    )
            yield name, each.weight_by_size


def _name(metric: str, kept: str) -> str:
    """Return the name of a metric after a filter."""
    metric = last_name(metric)
    return metric if kept == "none" else f"{metric},{kept}"


@functools.cache
def _own(metric: str) -> Callable[[str, Sequence[str]], float]:
    """The function of a metric of one's own. ConfigError where it cannot be imported."""
    found: Callable[[str, Sequence[str]], float] = resolve(metric)
    return found


def _is_share(metric: str) -> bool:
    return metric.startswith(("acc", "exact_match")) and not is_error(metric)


def group_results(
    group: GroupConfig, by_name: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return a group's metrics: means over its tasks. The standard error is pooled over samples of
    `sizes` where tasks count by these, else that of a mean of independent values."""
    found: dict[str, float] = {}
    for name, weighted in _aggregates(group, by_name):
        counts = [sizes[task] for task in group.members]
        weights = counts if weighted else [1] * len(counts)
        scores = [by_name[task][name] for task in group.members]
        found[name] = sum(s * w for s, w in zip(scores, weights, strict=True)) / sum(weights)
        tasks = [task for task in group.members if error_of(name) in by_name[task]]
        errors = [by_name[task][error_of(name)] for task in tasks]
        # Without the error of one task there is none of the group: it would look smaller than it
        # is.
        if len(tasks) == len(counts) and not weighted:
            found[error_of(name)] = math.sqrt(sum(error**2 for error in errors)) / len(counts)
        elif len(tasks) == len(counts) < sum(counts):
            pairs = zip(counts, errors, strict=True)
            spread = sum((count - 1) * error**2 * count for count, error in pairs)
            variance = spread / (sum(counts) - len(counts))
            found[error_of(name)] = math.sqrt(variance / sum(counts))
    return found


def _aggregate(kind: str, items: Sequence[Any]) -> tuple[float, float]:
    """Return a value over all questions and its standard error."""
    count = len(items)
    if kind in ("mean", "perplexity"):
        mean = sum(items) / count
        # The sample's deviation divides by n - 1; a single value has none, and no error is told for
        # it.
        spread = sum((each - mean) ** 2 for each in items) / max(count - 1, 1)
        error = math.sqrt(spread) / math.sqrt(count)
        if kind == "mean":
            return mean, error
        # The derivative of exp(-x): the harness draws this error by bootstrap instead.
        return math.exp(-mean), math.exp(-mean) * error
    total = sum(size for _, size in items)
    ratio = sum(value for value, _ in items) / total
    # The delta method: a ratio's error comes from how far each value lies from the ratio times its
    # size.
    residuals = sum((value - ratio * size) ** 2 for value, size in items)
    error = math.sqrt(count / max(count - 1, 1) * residuals) / total
    if kind == "bits_per_byte":
        return -ratio / math.log(2), error / math.log(2)
    return math.exp(-ratio), math.exp(-ratio) * error
