"""Makes tests/goldens/tasks.json: for each of asked_folders.CASES, what lm-evaluation-harness with
transformers (HFLM, one request at a time) finds of the tasks there: results by task and group, and
the answers to each question. Needs lm_eval, torch and transformers.

example: python scripts/make_task_goldens.py
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import asked_folders  # noqa: E402
from bench import arguments  # noqa: E402


def main() -> None:
    """Write the file."""
    arguments.parser(__doc__).parse_args()
    found = {}
    for case, how in asked_folders.CASES.items():
        with tempfile.TemporaryDirectory() as made:
            os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=f"{made}/hub")
            asked_folders.write_model(Path(made, "model"), case.partition("-")[2])
            asked_folders.write_tasks(Path(made, "tasks"))
            found[case] = asked(f"{made}/model", f"{made}/tasks", how)
    path = ROOT / "tests" / "goldens" / "tasks.json"
    path.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def asked(model: str, tasks: str, how: dict[str, Any]) -> dict[str, Any]:
    """Results and answers of the tasks in a folder."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    length = asked_folders.LENGTH
    lm = HFLM(model, device="cpu", dtype="float32", max_length=length, batch_size=1)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    names = asked_folders.ASKED
    found = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, **how)
    answers: dict[str, list[Any]] = {}
    for name, samples in found["samples"].items():
        documents = {sample["doc_id"]: sample for sample in samples}
        answers[name] = [number_or_text(documents[i]["resps"]) for i in sorted(documents)]
    results = {
        name: {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if key.endswith(",none") and isinstance(value, float)
        }
        for name, metrics in found["results"].items()
    }
    return {"results": results, "answers": answers}


def number_or_text(answers: list[Any]) -> list[Any]:
    """Log-probabilities, or what was written, of the requests of a document."""
    flat = [each[0] for each in answers]
    return [round(each[0], 6) if isinstance(each, list | tuple) else each for each in flat]


if __name__ == "__main__":
    main()
