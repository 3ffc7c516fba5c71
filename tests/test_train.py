"""Whole runs as real processes: what they leave behind, kills, signals, other device and process
counts."""

import os
import signal
import time
from pathlib import Path

import jax.numpy as jnp
import processes
import pytest
from forked import Forked
from processes import numbers, rows, train, write_config

from maxstack import cli
from maxstack import train as training
from maxstack.faults.preemption import Preemption


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An uninterrupted run, and the configuration that made it."""
    folder = tmp_path_factory.mktemp("base")
    config = write_config(
        folder,
        eval={"every": 8, "steps": 3},
        run={
            "name": "base",
            "output_dir": str(folder),
            "trackers": ["tensorboard"],
            "compilation_cache": processes.COMPILED,
        },
    )
    output = train(config)
    return config, folder, output


def test_a_run_leaves_its_records(base):
    config, folder, output = base
    run = folder / "base"
    assert {
        "config.yml",
        "versions.json",
        "metrics.jsonl",
        "log.txt",
        "tensorboard",
        "checkpoints",
    } <= {path.name for path in run.iterdir()}
    assert list((run / "tensorboard").glob("events*"))
    assert [row["step"] for row in rows(run)] == list(range(1, 25))
    assert {
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "data_wait",
    } <= rows(run)[0].keys()
    assert [row["step"] for row in rows(run, "eval_loss")] == [0, 8, 16, 24]
    assert rows(run, "eval_loss")[-1]["eval_bits_per_byte"] > 0
    assert (
        "parameters" in output and "compiled the step in" in output and "step 24/24 100%" in output
    )
    assert "compiled the step in" in (run / "log.txt").read_text()


def test_the_written_config_is_the_run(base):
    config, folder, _ = base
    train(folder / "base" / "config.yml", "run.name=again")
    assert numbers(folder / "again") == numbers(folder / "base")


def test_an_interrupt_saves_leaves_with_42_and_the_same_command_goes_on(base):
    config, folder, _ = base
    given = "run.name=interrupted", "checkpoint.every=1000"
    assert processes.interrupt(config, folder / "interrupted", 5, signal.SIGINT, *given) == 42
    last = rows(folder / "interrupted")[-1]["step"]
    assert f"resumed from step {last} " in train(config, *given)
    assert [row["step"] for row in rows(folder / "interrupted")] == list(range(1, 25)), (
        "no step was repeated"
    )
    assert numbers(folder / "interrupted") == numbers(folder / "base")


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once_with_130(base, tmp_path):
    config, folder, _ = base
    command = processes.command(
        config, "run.name=twice", "checkpoint.every=1000", "train.steps=100000"
    )
    told = tmp_path / "told"
    process = Forked(command, processes.environment(), Path(os.devnull), errors=told)
    try:
        until(lambda: rows(folder / "twice"), process)
        process.send_signal(signal.SIGINT)
        until(lambda: "leaving after this step" in told.read_text(), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
    text = told.read_text()
    assert "SIGINT again: leaving at once" in text
    assert "Traceback" not in text and "WATCHDOG" not in text


def until(condition, process):
    """Wait for it; it must come before the process ends."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_at_once_with_42(base):
    config, folder, _ = base
    assert processes.interrupt(config, folder / "early", 0, signal.SIGTERM, "run.name=early") == 42
    assert rows(folder / "early") == []


def test_a_process_that_has_trained_does_with_signals_what_it_did_before():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    before = handlers()
    stop = Preemption(1.0, print)
    assert handlers() != before
    stop.close()
    assert handlers() == before


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_once_they_are_known(base):
    config, _, _ = base
    environment = processes.environment() | {
        "XLA_FLAGS": processes.FLAGS + " --xla_force_host_platform_device_count=3"
    }
    told = processes.run(processes.command(config, "run.name=odd"), environment, code=1)
    assert "train.batch_size" in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        ("optimizer", "a checkpoint does not bind this key"),
        ("model", "model.embed: 32 -> 64"),
        ("model.lyers", "unknown key model.lyers; did you mean layers?"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_forced_is_told(base, forced, said):
    output = train(
        base[0],
        "run.name=base",
        "model.embed=64",
        "train.steps=30",
        "--force-config",
        forced,
        code=1,
    )
    assert said in output and "Traceback" not in output


@pytest.mark.slow
def test_restore_none_refuses_to_run_over_a_finished_run(base):
    config, folder, _ = base
    assert "step 24 is already in" in train(
        config, "run.name=base", "checkpoint.restore=none", code=1
    )


@pytest.mark.slow
def test_restore_takes_a_step_or_the_path_of_another_run(base):
    config, folder, _ = base
    assert "resumed from step 24 of" in train(
        config, "run.name=from-path", f"checkpoint.restore={folder / 'base'}"
    )
    train(
        config,
        "run.name=rewound",
        "train.steps=16",
        "optimizer.learning_rate={kind: constant, value: 0.01}",
    )
    assert "resumed from step 8 of" in train(
        config,
        "run.name=rewound",
        "checkpoint.restore=8",
        "train.steps=16",
        "optimizer.learning_rate={kind: constant, value: 0.01}",
    )
    assert "holds no step 5" in train(config, "run.name=rewound", "checkpoint.restore=5", code=1)


@pytest.mark.slow
def test_a_run_in_use_is_refused(base):
    config, folder, _ = base
    words = processes.command(config, "run.name=held", "train.steps=100000", "eval.every=0")
    holder = Forked(words, processes.environment(), Path(os.devnull))
    try:
        until(lambda: rows(folder / "held"), holder)
        assert "in use by another process" in train(
            config, "run.name=held", "train.steps=100000", code=1
        )
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
def test_a_finished_run_says_so_and_a_shorter_one_is_refused(base):
    config, folder, _ = base
    before = (folder / "base" / "config.yml").read_text()
    output = train(config, "run.name=base")
    assert "nothing left to do" in output and "compiled" not in output
    assert "already at step 24" in train(config, "run.name=base", "train.steps=12", code=1)
    assert (folder / "base" / "config.yml").read_text() == before


@pytest.mark.slow
def test_a_checkpoint_is_restored_even_where_none_will_be_written(base):
    config, folder, _ = base
    output = train(
        config,
        "run.name=unsaved",
        f"checkpoint={{every: 0, restore: '{folder / 'base'}'}}",
        "train.steps=26",
        "eval.every=0",
    )
    assert "resumed from step 24" in output and [
        row["step"] for row in rows(folder / "unsaved")
    ] == [25, 26]
    assert "the learning rate continues at" in output and "changed: train.steps: 24 -> 26" in output


@pytest.mark.slow
def test_an_output_folder_that_cannot_be_made_is_an_error_of_one_line(base, tmp_path):
    config, _, _ = base
    (tmp_path / "file").write_text("")
    output = train(config, f"run.output_dir={tmp_path / 'file'}", code=1)
    assert "run.output_dir" in output and "Traceback" not in output


def test_a_first_step_without_memory_is_an_error_of_one_line(base, tmp_path, monkeypatch, capsys):
    # what an allocation of that size raises, whoever asks for it
    monkeypatch.setattr("maxstack.startup.first_state", lambda run: jnp.zeros(1 << 45))
    words = [str(base[0]), f"run.output_dir={tmp_path}", "run.virtual_devices=null"]
    assert cli.run(training.main, words) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: memory: the first step ran out of it (Out of memory alloc")


@pytest.mark.slow
def test_prepared_shards_are_neither_read_as_text_nor_trained_on_where_held_out(base, tmp_path):
    config, _, _ = base
    assert cli.main(["data", "prepare", str(config), "--out", str(tmp_path / "shards")]) == 0
    source = (
        f"data.sources=[{{kind: array_record, content: CONTENT, files: "
        f"['{tmp_path}/shards/*.array_record']}}]"
    )
    assert "set `content: tokens`" in train(
        config, "run.name=shards", source.replace("CONTENT", "text"), "eval.every=0", code=2
    )
    assert "held-out documents among" in train(
        config, "run.name=shards", source.replace("CONTENT", "tokens"), "eval.every=0", code=2
    )
    train(
        config,
        "run.name=shards",
        source.replace("CONTENT", "tokens").replace("*.array", "*-train-*.array"),
        "eval.every=0",
        "train.steps=4",
    )
