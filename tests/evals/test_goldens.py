"""Tasks beside tests/goldens/tasks.json, what lm-evaluation-harness with transformers finds."""

import json

import asked_folders
import pytest
import tiers

from maxstack.evals.prompts import PromptFormat
from maxstack.evals.task_files import open_tasks
from maxstack.evals.tasks import open_model_tasks

GOLDENS = json.loads((asked_folders.GOLDENS / "tasks.json").read_text())
DRAWN = {"perplexity_stderr"}
"""Standard errors that the harness draws."""


def found_of(case, folder):
    """Our results and answers by task."""
    how = asked_folders.CASES[case]
    asked_folders.write_model(folder / "model", case.partition("-")[2])
    asked_folders.write_tasks(folder / "tasks")
    opened = open_tasks(asked_folders.ASKED, library=str(folder / "tasks"))
    prompt_format = PromptFormat(
        how.get("system_instruction", ""), multiturn=how.get("fewshot_as_multiturn", True)
    )
    chat = how.get("apply_chat_template", False)
    length = asked_folders.LENGTH
    overrides = ["model.dtype=float32", "mesh.fsdp=-1"]
    tasks, params = open_model_tasks(
        str(folder / "model"), overrides, opened, 8, length, None, prompt_format, chat=chat
    )
    results, records = tasks.results(params)
    answers = {}
    for each in records:
        made = each["answer"] if isinstance(each["answer"], list) else [each["answer"]]
        answers.setdefault(each["task"], []).append(made)
    return results, answers


@pytest.mark.parametrize("case", tiers.of([*asked_folders.CASES], "plain-named", "chat-added"))
def test_figures_and_answers_are_those_of_the_harness_with_transformers(case, tmp_path):
    results, answers = found_of(case, tmp_path)
    golden = GOLDENS[case]
    for name, wanted in golden["answers"].items():
        for ours, theirs in zip(answers[name], wanted, strict=True):
            said = isinstance(theirs[0], str)
            assert ours == (theirs if said else pytest.approx(theirs, abs=1e-3)), name
    for name, metrics in golden["results"].items():
        wanted = {key: value for key, value in metrics.items() if key not in DRAWN}
        found = {key: results[name][key] for key in wanted}
        assert found == pytest.approx(wanted, rel=1e-5), name
