"""`maxstack eval`: runs, checkpoints and model folders; by tasks and by a run's own objective."""

import json

import asked
import jax
import numpy as np
import processes
import pytest
import tiers
import tiny
from served import make

from maxstack import cli, train
from maxstack.inference.trained_model import read_weights

TEXT = {"kind": "text", "files": ["{stdlib}/[a-f]*.py"], "holdout": 0.2}


def trained(folder, cfg, name, *words):
    """A short run, in this process; its folder."""
    where = f"run.output_dir={folder}", f"run.name={name}", "run.trackers=[]"
    more = "run.compilation_cache=null", "checkpoint.every=2", "train.steps=4", *words
    assert cli.run(train.main, [str(tiny.write(folder, cfg)), *where, *more]) == 0
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with tasks, the folder with them and their names."""
    folder = tmp_path_factory.mktemp("run")
    names = asked.write_tasks(folder)
    cfg = tiny.config(
        data=asked.DATA | {"sources": [TEXT]},
        eval={"every": 2, "steps": 2, "tasks": names},
        model=tiny.model(**tiny.ONE_KIND),
    )
    return trained(folder, cfg, "run"), names


@pytest.mark.slow
def test_a_run_and_its_checkpoints_have_the_figures_that_training_wrote(run, tmp_path, maxstack):
    folder, _ = run
    rows = {}
    for row in tiny.metrics(folder):
        rows.setdefault(row["step"], {}).update(row)
    for model, step in ((folder, 4), (folder / "checkpoints" / "2", 2)):
        file = tmp_path / "figures.json"
        out = maxstack(f"eval {model} --json {file}")
        found = json.loads(file.read_text())["figures"]
        assert "eval_bits_per_byte" in out and "tasks/rolling/bits_per_byte" in out
        timed = {name for name in found if name.endswith("seconds")}
        for name in found.keys() - timed:
            assert found[name] == pytest.approx(rows[step][name], rel=2e-4), name


def test_tasks_are_asked_of_a_run_and_every_answer_is_written(run, tmp_path, maxstack):
    folder, names = run
    answers, file = tmp_path / "answers.jsonl", tmp_path / "figures.json"
    words = f"--tasks {','.join(names)} --limit 3 --out {answers} --json {file}"
    out, found = maxstack(f"eval {folder} {words}"), json.loads(file.read_text())
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 3 * len(names) and found["questions"] == dict.fromkeys(asked.TASKS, 3)
    own = [each for each in rows if each["task"] == "choice"]
    assert found["tasks"]["choice"]["acc"] == sum(each["acc"] for each in own) / 3
    assert all(len(each["answer"]) == 3 and each["right"] for each in own)
    assert "rolling" in out and "±" in out and "centered" in out


LOOKAHEAD = {"kind": "lookahead", "sync_period": 3, "slow_step_size": 0.5}
EVALUATED = {
    "lookahead": {"chain": [LOOKAHEAD | {"inner": [{"kind": "adam"}]}]},
    "schedule_free": {"chain": [{"kind": "schedule_free_adamw", "learning_rate": 0.1}]},
    "average": {"chain": [{"kind": "adam"}], "ema": {"decay": 0.9}},
}
EVALUATED["lookahead"] |= {"learning_rate": 0.1}
EVALUATED["average"] |= {"learning_rate": 0.1}


@pytest.mark.parametrize("kind", tiers.of([*EVALUATED], slow=["average"]))
def test_the_weights_that_are_read_back_are_those_that_training_evaluates(tmp_path, maxstack, kind):
    cfg = tiny.config(
        optimizer=EVALUATED[kind] | {"schedule": None},
        data=asked.DATA | {"sources": [TEXT]},
        eval={"every": 4, "steps": 2},
        model=tiny.model(**tiny.ONE_KIND, param_dtype="float32"),
    )
    folder = trained(tmp_path, cfg, "run")
    (wanted,) = (row["eval_loss"] for row in processes.rows(folder, "eval_loss") if row["step"])
    losses, file = {}, tmp_path / "found.json"
    for choice in ("evaluated", "train"):
        maxstack(f"eval {folder} --weights {choice} --json {file}")
        losses[choice] = json.loads(file.read_text())["figures"]["eval_loss"]
    assert losses["evaluated"] == pytest.approx(wanted, rel=1e-5)
    assert abs(losses["train"] - wanted) > 1e-2
    assert kind.replace("_", "-") in maxstack(f"export {folder} --out {tmp_path / 'out'}")


@pytest.mark.slow
def test_a_model_folder_is_asked_by_its_own_tokenizer(run, tmp_path, maxstack):
    (choice,) = (name for name in run[1] if name.endswith("choice.yaml"))
    words = f"eval {make(tmp_path / 'model')} --tasks {choice} --limit 2 --length"
    out = maxstack(f"{words} 256")
    assert "acc_norm" in out and "truncated on the left" not in out
    cut = "task choice: 6 requests have more than 8 tokens and are truncated on the left"
    assert cut in maxstack(f"{words} 8")


def test_a_chat_template_is_used_where_asked_for_and_named_where_not(tmp_path, maxstack):
    names = asked.write_tasks(tmp_path)
    choice = next(name for name in names if name.endswith("choice.yaml"))
    model, out = make(tmp_path / "model"), tmp_path / "answers.jsonl"
    words = f"eval {model} --tasks {choice} --limit 1 --length 256 --out {out}"

    def prompt(*more):
        said = maxstack(words, *more)
        return json.loads(out.read_text().splitlines()[0])["requests"][0], said

    (context, choice), said = prompt()
    assert "has a chat template, and is asked without it; --apply-chat-template uses it" in said
    description, first, second, question = (
        context.replace("Pick. ", "Pick.\0").replace("\n", "\0").split("\0")
    )
    pairs = [example.rpartition(" ") for example in (first, second)]
    (chat, bare), said = prompt("--apply-chat-template", "--system", "Be terse.")
    turns = [("system", f"Be terse.\n{description} ")]
    for asks, _, answer in pairs:
        turns += [("user", asks), ("assistant", answer)]
    turns += [("user", question)]
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert (chat, bare) == (f"{rendered}<|im_start|>assistant\n", choice.lstrip())
    assert "is asked without it" not in said
    (chat, _), _ = prompt("--apply-chat-template", "--fewshot-as-multiturn", "false")
    assert chat.count("<|im_start|>") == 3 and f"{first}\n{second}\n{question}" in chat
    (model / "chat_template.jinja").unlink()
    said = maxstack(words, "--apply-chat-template", code=1)
    assert "no chat template" in said and "eval without --apply-chat-template" in said


def test_what_cannot_be_evaluated_says_why(run, tmp_path, maxstack):
    folder, names = run
    model, tasks = make(tmp_path / "model"), f"--tasks {names[0]}"
    (model / "tokenizer.json").unlink()
    for words, code, says in (
        (model, 1, "is not a run, so it has no held-out data; give --tasks"),
        (f"{folder} --limit 3", 1, "--limit: only valid with --tasks"),
        (f"{folder} --system x", 1, "--system: only valid with --tasks"),
        (
            f"{folder} {tasks} --fewshot-as-multiturn",
            1,
            "--fewshot-as-multiturn: needs --apply-chat",
        ),
        (f"{folder} --tasks pairz", 1, "pairs"),
        (f"{folder} --tasks ,", 1, "--tasks: is empty"),
        (f"{folder} {tasks} --num-fewshot 2", 1, "--num-fewshot: needs --lm-eval"),
        (f"{folder} {tasks} --out /no/such/file", 1, "--out /no/such/file"),
        (f"{model} {tasks}", 1, "tokenizer"),
        (f"{tmp_path / 'none'} {tasks}", 1, "none"),
    ):
        said = maxstack(f"eval {words}", code=code)
        assert says in said and "Traceback" not in said, said


@pytest.mark.slow
def test_weights_that_are_not_finite_are_no_model(run, maxstack, monkeypatch):
    folder, names = run
    monkeypatch.setattr(
        "maxstack.inference.trained_model.read_weights",
        lambda *args: jax.tree.map(lambda leaf: leaf * np.nan, read_weights(*args)),
    )
    words = f"eval {folder} --tasks {names[0]} --limit 2"
    assert "2 of 2 questions have log-probabilities that are NaN" in maxstack(words, code=2)
    maxstack(f"{words} --allow-nonfinite")


@pytest.mark.parametrize(
    ("kind", "figure"),
    tiers.of(
        [
            ("preference", "eval_rewards_accuracies"),
            ("reward", "eval_accuracy"),
            ("masked_diffusion", "eval_hidden_accuracy"),
            ("policy_gradient", "eval_reward/exact"),
        ],
        slow=[("reward", "eval_accuracy")],
    ),
)
def test_other_objectives_are_evaluated_by_their_own_figures(tmp_path, maxstack, kind, figure):
    evaluation, objective = {"every": 4, "steps": 2}, {"kind": kind}
    model = tiny.model(**tiny.ONE_KIND, head={"scores": kind == "reward"})
    source = {"kind": "function", "documents": 64, "holdout": 0.25}
    source |= {"call": "maxstack.data.people:pairs", "record": {"kind": "pairs"}}
    data = {"tokenizer": {"kind": "bytes"}, "template": "plain", "packing": "fit", "seq_len": 96}
    data |= {"sources": [source]}
    if kind == "masked_diffusion":
        data = asked.DATA | {"sources": [TEXT]}
        for block in model["blocks"].values():
            block["mixer"] |= {"causal": False}
    if kind == "policy_gradient":
        cfg = tiny.with_rollouts(eval=evaluation)
    else:
        cfg = tiny.config(objective=objective, data=data, eval=evaluation, model=model)
    folder = trained(tmp_path, cfg, "other")
    lines = maxstack(f"eval {folder}").splitlines()
    (found,) = (line.split()[1] for line in lines if line.split()[:1] == [figure])
    wanted = processes.rows(folder, figure)[-1][figure]
    assert float(found) == pytest.approx(wanted, rel=1e-3, abs=1e-4)
