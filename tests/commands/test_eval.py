"""`maxstack eval`: runs, checkpoints and model folders; by tasks and by a run's own objective."""

import json

import asked
import jax
import numpy as np
import pytest
import tiers
import tiny
from served import make

from maxstack import cli, train
from maxstack.config import dump
from maxstack.inference.trained_model import read_weights

ONE = "mesh.fsdp=1", "mesh.data=1"


def trained(folder, cfg, name, *words):
    """A short run, in this process; its folder."""
    path = folder / f"{name}.yml"
    path.write_text(dump(cfg))
    where = f"run.output_dir={folder}", f"run.name={name}", "run.trackers=[]"
    more = "run.compilation_cache=null", "checkpoint.every=2", "train.steps=4", *words
    assert cli.run(train.main, [str(path), *where, *more]) == 0
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with tasks, the folder with them and their names."""
    folder = tmp_path_factory.mktemp("run")
    names = asked.write_tasks(folder)
    text = {"kind": "text", "files": ["{stdlib}/[a-f]*.py"], "holdout": 0.2}
    cfg = tiny.config(
        data=asked.DATA | {"sources": [text]},
        eval={"every": 2, "steps": 2, "tasks": names},
        model=tiny.model(**tiny.ONE_KIND),
    )
    return trained(folder, cfg, "run"), names


def figures(capsys, *words):
    assert cli.main(["eval", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_run_and_its_checkpoints_have_the_figures_that_training_wrote(run, tmp_path, capsys):
    folder, _ = run
    rows = {}
    for row in tiny.metrics(folder):
        rows.setdefault(row["step"], {}).update(row)
    for model, step in ((folder, 4), (folder / "checkpoints" / "2", 2)):
        out = figures(capsys, model, "--json", tmp_path / "figures.json")
        found = json.loads((tmp_path / "figures.json").read_text())["figures"]
        assert "eval_bits_per_byte" in out and "tasks/rolling/bits_per_byte" in out
        timed = {name for name in found if name.endswith("seconds")}
        for name in found.keys() - timed:
            assert found[name] == pytest.approx(rows[step][name], rel=2e-4), name


def test_tasks_are_asked_of_a_run_and_every_answer_is_written(run, tmp_path, capsys):
    folder, names = run
    files = "--out", tmp_path / "answers.jsonl", "--json", tmp_path / "figures.json"
    out = figures(capsys, folder, "--tasks", ",".join(names), "--limit", 3, *files)
    found = json.loads((tmp_path / "figures.json").read_text())
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 3 * len(names) and found["questions"] == dict.fromkeys(asked.TASKS, 3)
    own = [each for each in answers if each["task"] == "choice"]
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
def test_the_weights_that_are_read_back_are_those_that_training_evaluates(tmp_path, capsys, kind):
    cfg = tiny.config(
        optimizer=EVALUATED[kind] | {"schedule": None},
        data=asked.DATA
        | {"sources": [{"kind": "text", "files": ["{stdlib}/[a-b]*.py"], "holdout": 0.2}]},
        eval={"every": 4, "steps": 2},
        model=tiny.model(**tiny.ONE_KIND, param_dtype="float32"),
    )
    folder = trained(tmp_path, cfg, "run")
    (wanted,) = [
        each["eval_loss"]
        for each in tiny.metrics(folder)
        if each["step"] == 4 and "eval_loss" in each
    ]
    losses = {}
    for choice in ("evaluated", "train"):
        figures(capsys, folder, "--weights", choice, "--json", tmp_path / "found.json")
        losses[choice] = json.loads((tmp_path / "found.json").read_text())["figures"]["eval_loss"]
    assert losses["evaluated"] == pytest.approx(wanted, rel=1e-5)
    assert abs(losses["train"] - wanted) > 1e-2
    assert cli.main(f"export {folder} --out {tmp_path / 'out'}".split()) == 0
    assert kind.replace("_", "-") in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_folder_is_asked_by_its_own_tokenizer(run, tmp_path, capsys):
    _, names = run
    choice = next(name for name in names if name.endswith("choice.yaml"))
    model = make(tmp_path / "model")
    out = figures(capsys, model, "--tasks", choice, "--limit", 2, "--length", 256)
    assert "acc_norm" in out and "truncated on the left" not in out
    out = figures(capsys, model, "--tasks", choice, "--limit", 2, "--length", 8)
    assert "task choice: 6 requests have more than 8 tokens and are truncated on the left" in out


def test_a_chat_template_is_used_where_asked_for_and_named_where_not(tmp_path, capsys):
    names = asked.write_tasks(tmp_path)
    choice = next(name for name in names if name.endswith("choice.yaml"))
    model, out = make(tmp_path / "model"), tmp_path / "answers.jsonl"
    words = model, "--tasks", choice, "--limit", 1, "--length", 256, "--out", out

    def prompt(*more):
        said = figures(capsys, *words, *more)
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
    assert cli.main(["eval", *map(str, words), "--apply-chat-template"]) == 1
    said = capsys.readouterr().err
    assert "no chat template" in said and "eval without --apply-chat-template" in said


def test_what_cannot_be_evaluated_says_why(run, tmp_path, capsys):
    folder, names = run
    model = make(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    for words, says in (
        ([model], "is not a run, so it has no held-out data; give --tasks"),
        ([folder, "--limit", "3"], "--limit: only valid with --tasks"),
        ([folder, "--system", "x"], "--system: only valid with --tasks"),
        (
            [folder, "--tasks", names[0], "--fewshot-as-multiturn"],
            "--fewshot-as-multiturn: needs --apply-chat-template",
        ),
        ([folder, "--tasks", "pairz"], "pairs"),
        ([folder, "--tasks", ", "], "--tasks: is empty"),
        ([folder, "--tasks", names[0], "--num-fewshot", "2"], "--num-fewshot: needs --lm-eval"),
        ([folder, "--tasks", names[0], "--out", "/no/such/file"], "--out /no/such/file"),
        ([model, "--tasks", names[0]], "tokenizer"),
        ([tmp_path / "none", "--tasks", names[0]], "none"),
    ):
        assert cli.main(["eval", *map(str, words)]) in (1, 2)
        said = capsys.readouterr().err
        assert says in said and "Traceback" not in said, said


@pytest.mark.slow
def test_weights_that_are_not_finite_are_no_model(run, capsys, monkeypatch):
    folder, names = run
    monkeypatch.setattr(
        "maxstack.inference.trained_model.read_weights",
        lambda *args: jax.tree.map(lambda leaf: leaf * np.nan, read_weights(*args)),
    )
    words = ["eval", str(folder), "--tasks", names[0], "--limit", "2"]
    assert cli.main(words) == 2
    assert "2 of 2 questions have log-probabilities that are NaN" in capsys.readouterr().err
    assert cli.main([*words, "--allow-nonfinite"]) == 0


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
def test_other_objectives_are_evaluated_by_their_own_figures(tmp_path, capsys, kind, figure):
    evaluation = {"every": 4, "steps": 2}
    objective = {"kind": kind}
    source = {"kind": "function", "documents": 64, "holdout": 0.25}
    source |= {"call": "maxstack.data.people:pairs", "record": {"kind": "pairs"}}
    data = {"tokenizer": {"kind": "bytes"}, "template": "plain", "packing": "fit", "seq_len": 96}
    if kind == "policy_gradient":
        cfg = tiny.with_rollouts(eval=evaluation)
    elif kind == "masked_diffusion":
        text = {"kind": "text", "files": ["{stdlib}/[a-f]*.py"], "holdout": 0.2}
        data = asked.DATA | {"sources": [text]}
        model = tiny.model(**tiny.ONE_KIND)
        for block in model["blocks"].values():
            block["mixer"] = block["mixer"] | {"causal": False}
        cfg = tiny.config(objective=objective, data=data, eval=evaluation, model=model)
    else:
        cfg = tiny.config(
            objective=objective,
            data=data | {"sources": [source]},
            eval=evaluation,
            model=tiny.model(**tiny.ONE_KIND, head={"scores": kind == "reward"}),
        )
    folder = trained(tmp_path, cfg, "other")
    out = figures(capsys, folder)
    assert figure in out
    wanted = next(row[figure] for row in tiny.metrics(folder)[::-1] if figure in row)
    line = next(line for line in out.splitlines() if line.split()[:1] == [figure])
    assert float(line.split()[1]) == pytest.approx(wanted, rel=1e-3, abs=1e-4)
