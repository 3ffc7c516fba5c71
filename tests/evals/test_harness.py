"""lm-evaluation-harness beside our reading of the same task files."""

import importlib.util

import asked
import pytest

from maxstack.evals import harness

BOOTSTRAPPED = {"perplexity_stderr"}
"""Standard errors that the harness draws, and we compute."""
LENGTH = 80
"""Tokens of a row: an answer of the shipped tasks is a line of at most 72."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed, as `make test-all` does it",
    ),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our results and the harness's, of the same model and files, by task."""
    folder = tmp_path_factory.mktemp("tasks")
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    patch.setenv("HF_HOME", str(folder / "hub"))
    patch.setenv("DISABLE_MULTIPROC", "1")  # it would fork this process, which has threads
    run = asked.run_of()
    names = [*asked.write_tasks(folder, asked.said_by(run)), "pairs"]
    tasks, params = asked.asked(run, names, limit=10, length=LENGTH), run.init().params
    ours, _ = tasks.results(params)
    theirs = harness.evaluate(tasks, params, names, 10, None)
    patch.undo()
    return ours, theirs


@pytest.mark.parametrize("name", [*asked.TASKS, "pairs_letters", "pairs"])
def test_results_are_the_harness_s_to_the_last_digit(both, name):
    ours, theirs = both
    wanted = {key: value for key, value in theirs[name].items() if key not in BOOTSTRAPPED}
    assert wanted and {key: ours[name][key] for key in wanted} == wanted


def test_the_questions_are_not_all_answered_alike(both):
    ours, _ = both
    assert all(0 < ours[name]["acc"] < 1 for name in ("choice", "contexts", "likelihood"))
    assert 0 < ours["generate"]["exact_match,strict"] < 1
    assert ours["rolling"]["bits_per_byte"] > 1
    assert ours["generate"].keys() >= {"exact_match,strict", "exact_match,first"}


@pytest.mark.release
def test_what_the_harness_does_not_know_is_named(tmp_path):
    run = asked.run_of()
    tasks = asked.asked(run, [])
    with pytest.raises(harness.ConfigError, match="knows no task no_such_task"):
        harness.evaluate(tasks, run.init().params, ["no_such_task"], None, None)
    asked.write_tasks(tmp_path)
    odd = asked.write_task(
        tmp_path, "odd", generation_kwargs={"num_beams": 4}, doc_to_text="a", doc_to_target="b"
    )
    with pytest.raises(harness.ConfigError, match="generation_kwargs.num_beams: .*known are until"):
        harness.evaluate(tasks, run.init().params, [odd], None, None)
    asked.write_task(tmp_path, "odd", doc_to_text="{{nothing}}", doc_to_target="b")
    with pytest.raises(harness.ConfigError, match="the harness cannot read odd: Undefined"):
        harness.evaluate(tasks, run.init().params, [odd], None, None)
