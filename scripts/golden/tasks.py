"""tasks.json: for each case of tests/asked_folders.py, what lm-evaluation-harness with
transformers (HFLM, one request at a time) finds of the tasks there: results by task and group, and
the answers to each question."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import asked_folders

NAMES, CLOSE = ["tasks"], 1e-6


def make(name: str, out: Path) -> None:
    """Write the file."""
    found = {}
    for case, settings in asked_folders.CASES.items():
        with tempfile.TemporaryDirectory() as made:
            os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=f"{made}/hub")
            asked_folders.write_model(Path(made, "model"), case.partition("-")[2])
            asked_folders.write_tasks(Path(made, "tasks"))
            found[case] = evaluate(f"{made}/model", f"{made}/tasks", settings)
    text = json.dumps(found, indent=0, sort_keys=True)
    (out / "tasks.json").write_text(text + "\n")


def evaluate(model: str, tasks: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Results and answers of the tasks in a folder."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    length = asked_folders.LENGTH
    lm = HFLM(model, device="cpu", dtype="float32", max_length=length, batch_size=1)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    names = asked_folders.ASKED
    found = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, **settings)
    answers: dict[str, list[Any]] = {}
    for task, samples in found["samples"].items():
        documents = {sample["doc_id"]: sample["resps"] for sample in samples}
        answers[task] = [flat(documents[index]) for index in sorted(documents)]
    results: dict[str, dict[str, float]] = {}
    for task, metrics in found["results"].items():
        floats = {key: value for key, value in metrics.items() if isinstance(value, float)}
        figures = {key for key in floats if key.endswith(",none")}
        results[task] = {key.removesuffix(",none"): floats[key] for key in figures}
    return {"results": results, "answers": answers}


def flat(responses: list[Any]) -> list[Any]:
    """Log-probabilities or texts of a document's requests."""
    first = [each[0] for each in responses]
    return [round(each[0], 6) if isinstance(each, list | tuple) else each for each in first]
