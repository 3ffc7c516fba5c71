"""Which direction of an evaluation metric is better."""

import re

from maxstack.config.spelling import did_you_mean

USUAL = "eval_loss", "eval_bits_per_byte", "eval_accuracy", "eval_reward", "eval_top5"
"""Metrics to suggest."""
_WORSE = re.compile(r"loss|perplexity|bits_per_byte|_kl$|^kl$")
_BETTER = re.compile(r"acc|exact_match|centered|top\d|reward|margin|agreement|goodput")


def direction(metric: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where the name does not say. A sign before the
    name says it."""
    if metric[:1] in "+-":
        return 1 if metric[:1] == "+" else -1
    name = metric.rpartition("/")[2].removeprefix("eval_").partition(",")[0]
    if name.endswith("_stderr"):
        return 0
    if metric.startswith(("eval_reward/", "reward/", "eval_loss/")):
        return -1 if metric.startswith("eval_loss/") else 1
    return -1 if _WORSE.search(name) else int(bool(_BETTER.search(name)))


def direction_fault(metric: str) -> str | None:
    """The fault of a metric to choose by; None if it has none."""
    if not bare(metric).startswith(("eval_", "tasks/")):
        usual = did_you_mean(bare(metric), USUAL)
        return f"{metric}: no figure of an evaluation; these begin with eval_ or tasks/{usual}"
    if direction(metric):
        return None
    return (
        f"{metric}: whether more or less of it is better is not known; write +{metric} or "
        f"-{metric}, if the name is right{did_you_mean(metric, USUAL)}"
    )


def bare(metric: str) -> str:
    """The name without a sign."""
    return metric.lstrip("+-")
