"""Start before the first step: where it needs more than one process, and what is said of the
run."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from forked import Forked
from processes import command, environment, rows, write_config

from maxstack import startup
from maxstack.errors import ConfigError
from maxstack.optim import learning_rate_at
from maxstack.plan import report
from maxstack.plan.step import Step, TooLarge
from maxstack.plan.topology import parse
from maxstack.submit.local import process_variables

LLAMA = Path(__file__).parent / "goldens" / "llama"
HURRIED = """
import sys
from maxstack import cli, train
from maxstack.cluster import membership
from maxstack.report import run_folder
{}
sys.exit(cli.run(train.program, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_process_says_what_it_waits_for_and_leaves_where_another_one_never_joins(tmp_path):
    command = [
        sys.executable,
        "-c",
        HURRIED.format("membership.JOIN, membership.BETWEEN = 3.0, 1.0"),
        str(write_config(tmp_path)),
        f"distributed={{coordinator: {process_variables(2)[0]['JAX_COORDINATOR_ADDRESS']!r}, "
        f"processes: 2, process: 0}}",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert (
        done.returncode == 42
        and "distributed: process 0 of 2, says the configuration; process 0 at localhost:"
        in done.stderr
    )
    assert "process 1 of 2 is missing, after 1 s of at most 3; here: 0 on " in done.stderr
    assert "error: process 1 of 2 is missing, in 3 s; set MAX" in done.stderr
    assert "Traceback" not in done.stderr and "***" not in done.stderr


@pytest.mark.slow
def test_processes_that_do_not_see_one_run_folder_are_refused(tmp_path):
    config = write_config(tmp_path, run={"output_dir": "runs"})
    program = HURRIED.format("run_folder.SEEN = 1.0")
    started = []
    for host, own in zip(("one", "other"), process_variables(2), strict=True):
        (tmp_path / host).mkdir()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(config)],
                cwd=tmp_path / host,
                env=environment() | own | {"MAXSTACK_JOB_KEY": "k" * 64},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], outputs
    assert (
        "error: run.output_dir: process 1 on " in outputs[1]
        and " does not see the files that process 0 writes to runs/run" in outputs[1]
    )
    assert (
        "process 1" in outputs[0]
        and "does not see the files" in outputs[0]
        and "Traceback" not in outputs[0] + outputs[1]
    )


@pytest.mark.release
def test_processes_share_a_learnt_tokenizer_and_the_steps_that_its_epochs_take(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(f"word{i} and other{i % 7}" for i in range(100)))
    data = {
        "seq_len": 16,
        "sources": [{"kind": "text", "files": [str(text)]}],
        "tokenizer": {"kind": "sentencepiece", "path": "{run}/own.model", "learn": 300},
    }
    train = {"epochs": 1, "batch_size": 4}
    config = write_config(tmp_path, data=data, train=train)
    started = [
        Forked(command(config), environment() | own, tmp_path / own["JAX_PROCESS_ID"])
        for own in process_variables(2)
    ]
    codes = [process.wait(timeout=240) for process in started]
    said = (tmp_path / "0").read_text()
    assert codes == [0, 0], said
    steps = rows(tmp_path / "run")[-1]["step"]
    assert "learnt from the training documents" in said and f"train.epochs=1: {steps} steps" in said


ROUTED = {
    "kind": "moe",
    "experts": 4,
    "top_k": 2,
    "hidden": 32,
    "router": {"selection_bias": True, "bias_update": 1e-3},
}
NF4 = {
    "mode": "ptq",
    "rules": [{"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "nf4", "tile_size": 8}],
}
PER_LAYER = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 64
ADAPTERS = 4 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 64))
ALL, TABLES, NORMS = (
    3 * (PER_LAYER + 2 * 32) + (2 * tiny.VOCAB + 1) * 32,
    2 * tiny.VOCAB * 32,
    7 * 32,
)


def introduced(run, begins=False):
    """The lines that describe a run."""
    said = []
    startup.introduce(run, [], SimpleNamespace(say=said.append), begins)
    return said


@pytest.mark.slow
def test_a_reference_without_the_adapter_that_the_run_begins_with_is_told():
    objective = {"kind": "preference", "reference": "adapter_off"}
    run = tiny.make_run(
        tiny.config(model=tiny.model(**tiny.ONE_KIND), lora={"rank": 2}, objective=objective)
    )
    for adapter, told in ((None, False), ("mine", True)):
        lora = run.cfg.lora.model_copy(update={"adapter": adapter})
        said = introduced(dataclasses.replace(run, cfg=run.cfg.model_copy(update={"lora": lora})))
        assert any("lora.adapter=mine, with which the run begins" in line for line in said) == told


@pytest.mark.parametrize(
    ("sections", "parameters", "says"),
    [
        ({}, ALL, " parameters, "),
        ({"quantization": NF4}, ALL, f" parameters, {TABLES + NORMS:,} of them trained, "),
        (
            {"quantization": NF4, "lora": {"rank": 4}},
            ALL + 3 * ADAPTERS,
            f" parameters, {3 * ADAPTERS:,} of them trained, ",
        ),
        (
            {"optimizer": {"frozen": ["embed"]}},
            ALL,
            f" parameters, {ALL - tiny.VOCAB * 32:,} of them trained, ",
        ),
        (
            {
                "model": tiny.model(
                    layers=1,
                    pattern=[],
                    blocks={
                        "b": {"mixer": tiny.model()["blocks"]["global"]["mixer"], "mlp": ROUTED}
                    },
                )
            },
            32 * 8 * 12 + 4 * 3 * 32 * 32 + 32 * 4 + 4 + 2 * 32 + (2 * tiny.VOCAB + 1) * 32,
            " parameters, ",
        ),
    ],
    ids=["whole", "ptq", "qlora", "frozen", "carried"],
)
@pytest.mark.slow
def test_parameters_are_those_of_the_model_and_its_adapters_however_they_are_kept(
    sections, parameters, says
):
    run = tiny.make_run(tiny.config(**sections))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in run.weights.shapes.values()) / 2**20
    types = "float32, nf4" if "quantization" in sections else "float32"
    assert introduced(run)[0].startswith(
        f"{run.cfg.run.name}: {parameters:,}{says}{size:,.1f} MiB in {types}; optimizer state "
    )
    refused = Step(run, None, 0.0, 0.0, TooLarge(0, 0, ()))
    assert report.read("", run.cfg, parse("v5e:1x1"), refused).parameters == parameters


@pytest.mark.slow
def test_a_rank_beyond_every_target_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"lora.rank=33: the largest target, blocks/\S+, has \[32, .*; an adapter of rank 32",
    ):
        startup.check_can_start(tiny.make_run(tiny.config(lora={"rank": 33})))


@pytest.mark.parametrize(("weights", "begins"), [(None, True), (None, False), (str(LLAMA), True)])
@pytest.mark.slow
def test_adapters_on_a_random_base_are_told(weights, begins):
    run = tiny.make_run(tiny.config(lora={"rank": 4}, model=tiny.model(weights=weights)))
    said = introduced(run, begins)
    assert any("lora: the base is random" in line for line in said) == (weights is None and begins)


@pytest.mark.parametrize(
    ("rows", "begins", "told"),
    [
        ('{"step": 3}\n{"step": 4}\n', True, True),
        ('{"step": 4}\n{"step": 5, "lo', True, True),
        ('{"step": 4}\n', False, False),
        ("", True, False),
        ("torn", True, False),
    ],
)
def test_a_run_with_metrics_that_no_checkpoint_holds_is_told_to_begin_again(
    tmp_path, rows, begins, told
):
    run = tiny.make_run(tiny.config(run={"output_dir": str(tmp_path)}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(rows)
    line = "found metrics to step 4 but no checkpoint; restarting from step 0"
    assert any(each.startswith(line) for each in introduced(run, begins)) == told


def of_length(seq_len):
    """What is asked of a run without adapters."""
    data = SimpleNamespace(seq_len=seq_len)
    rewrite = SimpleNamespace(adapted={})
    return SimpleNamespace(
        cfg=SimpleNamespace(data=data, lora=None), weights=SimpleNamespace(rewrite=rewrite)
    )


def test_rows_longer_than_the_imported_model_was_made_for_are_told():
    most = json.loads((LLAMA / "config.json").read_text())["max_position_embeddings"]
    assert [*startup.differences_from_folder(of_length(most), str(LLAMA))] == []
    (line,) = startup.differences_from_folder(of_length(most + 1), str(LLAMA))
    assert f"data.seq_len={most + 1} is more than max_position_embeddings={most} of " in line


def test_dropout_that_the_imported_model_asks_for_is_told_in_one_line(tmp_path):
    shutil.copytree(LLAMA, folder := tmp_path / "llama")
    said = json.loads((folder / "config.json").read_text())
    shares = {"attn_pdrop": 0.1, "attention_dropout": 0.2, "hidden_dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(said | shares))
    (line,) = startup.differences_from_folder(of_length(1), str(folder))
    assert re.findall(r"(\w+)=(0\.\d)", line) == [
        ("attention_dropout", "0.2"),
        ("attn_pdrop", "0.1"),
    ]


@pytest.mark.parametrize(
    ("change", "update"),
    [
        ({"train": {"steps": 40}}, 17),
        ({"optimizer": {"schedule": {"decay_steps": "10%"}}}, 17),
        ({"optimizer": {"schedule": {"warmup_steps": 9}}}, 4),
        ({"optimizer": {"learning_rate": 0.02}}, 4),
    ],
)
def test_a_change_that_moves_the_learning_rate_of_the_next_update_is_told_with_both_values(
    change, update
):
    wsd = {"learning_rate": 0.01, "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": 6}}
    written = tiny.config(train={"batch_size": 8, "steps": 20}, optimizer=wsd)
    given = wsd | change.get("optimizer", {})
    given["schedule"] = wsd["schedule"] | given["schedule"]
    now = tiny.config(
        train={"batch_size": 8, "steps": 20} | change.get("train", {}), optimizer=given
    )
    before, after = (
        float(learning_rate_at(cfg.optimizer, cfg.train.steps)(update)) for cfg in (written, now)
    )
    said = startup.moved_rate(written.model_dump(mode="json"), now, update)
    assert said.startswith(
        f"the learning rate continues at {after:.4g}; by the checkpoint's schedule it "
        f"would be {before:.4g} (optimizer.chain.1); "
    )
    assert startup.moved_rate(written.model_dump(mode="json"), written, update) == ""
