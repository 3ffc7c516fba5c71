"""The texts of tasks, for what must not hold them."""

import dataclasses

from maxstack.evals.task import Task
from maxstack.evals.task_files import open_tasks


def texts_of(name: str) -> list[str]:
    """The questions of a task or group, each with each of its answers, without examples before
    them. ConfigError or DataError for a task that cannot be opened."""
    texts: list[str] = []
    for part in open_tasks([name]):
        if isinstance(part, Task):
            cfg = part.cfg.model_copy(update={"num_fewshot": 0, "description": ""})
            for question in dataclasses.replace(part, cfg=cfg).questions:
                pairs = [before + after for before, after in question.pairs]
                answers = [f"{question.text} {answer}" for answer in question.right]
                texts += pairs or (answers if question.text else []) or [question.text]
    return texts
