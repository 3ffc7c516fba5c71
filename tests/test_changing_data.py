"""Runs whose data, batches or optimizer change while they go on, as whole runs."""

import shutil
import signal

import numpy as np
import pytest
import tiny_config
import yaml
from processes import interrupt, numbers, rows, write_config
from processes import train as train_apart

from maxstack import cli, train
from maxstack.data.tokenizers import open_tokenizer
from maxstack.load import load

WEB = {"kind": "synthetic", "vocab": 400, "documents": 90, "length": 70, "ragged": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains by a configuration with changes -> the run's folder and what was said."""
    folder = tmp_path_factory.mktemp("changing")
    base = tiny_config.of_one_kind()

    def made(name, data, *words, steps=12, **sections):
        cfg = {
            **base,
            "run": {"name": name, "output_dir": str(folder), "trackers": []},
            "data": {"seq_len": 32, **data},
            "train": {"steps": steps, "batch_size": 16, **sections.pop("train", {})},
            "optimizer": {"learning_rate": {"kind": "constant", "value": 0.01}},
            **sections,
        }
        path = folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(cfg))
        code = cli.run(train.main, [str(path), *words])
        return folder / name, code

    return made


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def source(name, **fields):
    return WEB | {"name": name} | fields


@pytest.mark.release
def test_a_forced_change_of_sources_trains_as_a_schedule_in_the_file_does(run, capsys):
    web, code, talk = source("web"), source("code", length=50), source("talk", length=40)
    folder, _ = run("forced", {"sources": [web, code]}, steps=6)
    changed = {"sources": [talk, web | {"weight": 3.0}]}
    _, refused = run("forced", changed)
    told = capsys.readouterr().err
    assert refused == 1 and "data.sources" in told
    _, done = run("forced", changed, "--force-config", "data")
    assert done == 0
    scheduled = [
        web | {"weight": [[6, 1.0], [7, 3.0]]},
        code | {"weight": [[6, 1.0], [7, 0.0]]},
        talk | {"weight": [[6, 0.0], [7, 1.0]]},
    ]
    whole, _ = run("scheduled", {"sources": scheduled})
    assert losses(folder) == losses(whole)
    last = rows(whole)[-1]
    assert last["fed/code"] == 0 and last["fed/web"] + last["fed/talk"] == 512


@pytest.mark.slow
def test_stages_count_tokens_and_go_on_in_any_of_them(run, capsys):
    data = {"sources": [source("web"), source("code")], "packing": "best", "window": 4}
    stages = [
        {"step": 1, "batch_size": 8, "seq_len": 16},
        {"step": 5, "seq_len": 16},
        {"step": 9},
    ]
    whole, _ = run("whole", data, train={"stages": stages})
    filled = [
        (1 - row["padding"]) * positions
        for row, positions in zip(rows(whole), [128] * 4 + [256] * 4 + [512] * 4, strict=True)
    ]
    wanted = np.cumsum(np.rint(filled)).tolist()
    assert [row["tokens"] for row in rows(whole)] == wanted
    assert "batches are 16 x 16 tokens from step 5" in capsys.readouterr().out
    assert all(0 <= row["padding"] < 0.5 for row in rows(whole))
    for steps in (3, 6, 12):
        parts, _ = run("parts", data, train={"stages": stages}, steps=steps)
    assert numbers(parts) == numbers(whole)
    assert [row["tokens"] for row in rows(parts)][-1] == wanted[-1]


@pytest.mark.slow
def test_plan_counts_the_shapes_and_plans_the_largest(run, tmp_path, capsys):
    stages = [{"step": 1, "batch_size": 8, "seq_len": 16}, {"step": 5, "seq_len": 8}]
    path = tmp_path / "plan.yml"
    data = {"seq_len": 32, "sources": [source("web")]}
    train = {"batch_size": 16, "stages": stages}
    sections = tiny_config.of_one_kind() | {"data": data, "train": train}
    path.write_text(yaml.safe_dump(sections))
    assert cli.main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "compiles steps of 2 shapes, 8 x 16, 16 x 8; this is the plan of 8 x 16" in out
    assert "8 x 16 = 128" in out
    assert cli.main(["plan", str(path), "--search"]) == 1
    assert "train.stages has several" in capsys.readouterr().err


@pytest.mark.release
def test_another_optimizer_begins_anew_on_the_same_weights_and_data(run, capsys):
    data = {"sources": [source("web")]}
    folder, _ = run("optimizer", data, steps=6)
    sgd = ["optimizer.chain=[{kind: sgd, momentum: 0.9}]"]
    parts = "checkpoint.restore_parts=[params, data, step]"
    assert run("optimizer", data, *sgd)[1] == 1
    capsys.readouterr()
    assert run("optimizer", data, *sgd, parts, steps=9)[1] == 0
    assert "the optimizer begins anew at step 6" in capsys.readouterr().out
    assert run("optimizer", data, *sgd, parts)[1] == 0
    assert "begins anew" not in capsys.readouterr().out
    once, _ = run("once", data, steps=6)
    run("once", data, *sgd, parts)
    assert losses(once) == losses(folder)


@pytest.mark.slow
def test_epochs_give_every_document_so_many_times(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path))
    sources = [source("web", length=33, ragged=False), source("code", documents=50)]
    folder, _ = run("epochs", {"sources": sources}, train={"epochs": 2})
    out = capsys.readouterr().out
    steps = rows(folder)[-1]["step"]
    assert f"train.epochs=2: {steps} steps" in out
    assert sum(row["fed/web"] for row in rows(folder)) == 2 * 90 * 32
    assert rows(folder)[-1]["fed/web"] + rows(folder)[-1]["fed/code"] > 0


@pytest.mark.release
def test_a_run_with_every_feature_goes_on_bit_for_bit_after_a_kill_and_on_two_devices(tmp_path):
    sources = [
        {"kind": "text", "name": "library", "files": ["{stdlib}/[a-f]*.py"], "holdout": 0.2},
        source("made", vocab=300, holdout=0.1, weight=[[1, 0.0], [10, 2.0]]),
        source("once", vocab=300, documents=20, epochs=1, weight=[[4, 1.0], [16, 0.1]]),
    ]
    stages = [{"step": 1, "batch_size": 2, "seq_len": 32}, {"step": 9, "batch_size": 4}]
    config = write_config(
        tmp_path,
        data={
            "seq_len": 64,
            "sources": sources,
            "packing": "best",
            "window": 5,
            "workers": 2,
            "mixture": {"by": "tokens"},
            "across_documents": True,
        },
        train={"steps": 24, "batch_size": 8, "stages": [*stages, {"step": 17}]},
        eval={"every": 12, "steps": 2},
    )
    train_apart(config, "run.name=whole")
    after, kill = 6, signal.SIGKILL
    assert interrupt(config, tmp_path / "killed", after, kill, "run.name=killed") == -kill
    train_apart(config, "run.name=killed")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    losses = numbers(tmp_path / "killed", "eval_loss/made")
    assert losses == numbers(tmp_path / "whole", "eval_loss/made") and len(losses) == 3
    train_apart(config, "run.name=two", "run.virtual_devices=2")
    fed, fed_two = (
        [(row["fed/library"], row["padding"]) for row in rows(tmp_path / name)]
        for name in ("whole", "two")
    )
    assert fed == fed_two


@pytest.mark.slow
def test_data_that_ends_leaves_a_checkpoint_of_the_last_step(run, capsys):
    data = {"sources": [source("web", epochs=1)]}
    folder, _ = run("kept", data, steps=500, checkpoint={"every": 100})
    last = rows(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"{last}").is_dir()
    assert run("kept", data, "data.sources.0.epochs=2", "--force-config", "data", steps=500)[1] == 2
    assert f"resumed from step {last}" in capsys.readouterr().out
    assert rows(folder)[-1]["step"] > last


@pytest.mark.parametrize("change", ["data.seed=5", "data.sources.0.holdout=0.3"])
@pytest.mark.slow
def test_documents_in_another_order_begin_anew_and_the_log_says_so(run, change, capsys):
    data = {"sources": [source("web"), source("code")], "packing": "concat"}
    run(f"reordered-{change[5:9]}", data, steps=4)
    words = change, "--force-config", "data"
    assert run(f"reordered-{change[5:9]}", data, *words, steps=6)[1] == 0
    assert "another order, by data.seed, data.shuffle or its holdout" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_learns_its_tokenizer_where_it_begins_and_keeps_it(run, tmp_path, capsys):
    words = " ".join(f"word{i} and other{i % 7}" for i in range(400))
    (tmp_path / "a.txt").write_text(words)
    data = {
        "sources": [{"kind": "text", "files": [f"{tmp_path}/a.txt"]}],
        "tokenizer": {"kind": "sentencepiece", "path": "{run}/own.model", "learn": 300},
    }
    folder, done = run("learnt", data, steps=2)
    model, learnt = folder / "own.model", capsys.readouterr().out
    assert done == 0 and f"{model}: 300 tokens, learnt from the training documents" in learnt
    written = model.read_bytes()
    assert run("learnt", data, steps=4)[1] == 0 and model.read_bytes() == written
    assert "learnt from" not in capsys.readouterr().out
    assert cli.main(["data", "show", f"{folder.parent}/learnt.yml", "--rows", "1"]) == 0
    assert "word1 and other1" in capsys.readouterr().out
    moved = tmp_path / "moved" / "elsewhere"
    shutil.copytree(folder, moved)
    assert load(str(moved / "config.yml")).data.tokenizer.path == f"{moved}/own.model"
    other = "data.tokenizer.path=other.model"
    assert load(str(moved / "config.yml"), [other]).data.tokenizer.path == "other.model"
    model.unlink()
    open_tokenizer.cache_clear()
    assert run("learnt", data, steps=6)[1] == 2 and not model.exists()
    assert "own.model" in capsys.readouterr().err
    assert cli.main(["data", "show", f"{folder.parent}/learnt.yml", "--rows", "1"]) == 2
    assert not model.exists()
    few = "data.tokenizer.learn=4000"
    assert run("few", data, few, steps=1)[1] == 0
    kept = int(capsys.readouterr().out.split(" tokens, learnt")[0].split()[-1])
    assert 300 < kept < 4000


@pytest.mark.slow
def test_packing_becomes_best_by_force(run):
    data = {"sources": [source("web"), source("code")]}
    run("repacked", data, steps=4)
    words = "data.packing=best", "--force-config", "data"
    assert run("repacked", data, *words, steps=6)[1] == 0


@pytest.mark.slow
def test_evaluation_says_the_loss_of_each_source(run):
    data = {"sources": [source("web", holdout=0.2), source("code", holdout=0.3)]}
    folder, _ = run("by-source", data, steps=4, eval={"every": 4, "steps": 2})
    row = rows(folder, "eval_loss")[-1]
    parts = [row["eval_loss/web"], row["eval_loss/code"]]
    assert min(parts) < row["eval_loss"] < max(parts)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.stages=[{step: 2}]"], "must begin at step: 1"),
        (["train.stages=[{step: 1, batch_size: 3}]"], "does not divide train.batch_size=16"),
        (["train.stages=[{step: 1, batch_size: 8}, {step: 4}]"], "give a multiple of 2 steps"),
        (["train.stages=[{step: 1, seq_len: 64}]"], "more than data.seq_len=32"),
        (["data.sources.0.weight=0"], "no source has a weight above 0 at step 1"),
        (["data.sources.0.weight=[[9, 1], [5, 1]]"], "in the order of steps"),
        (["checkpoint.restore_parts=[params]"], "set restore to its path"),
        (["checkpoint.restore_parts=[data, step]"], "must be \\[params\\], "),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(run, words, told, capsys):
    assert run("refused", {"sources": [source("web")]}, *words)[1] == 1
    assert told.replace("\\", "") in capsys.readouterr().err
