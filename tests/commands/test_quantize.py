"""`maxstack quantize`: what a recipe takes; a trained run in low precision, its report, and what
else reads it."""

import json
import re
import shlex

import numpy as np
import parity
import pytest
import tiny
from safetensors.numpy import load_file

from maxstack import cli, config, train
from maxstack.checkpoint.weights import WeightsReader
from maxstack.commands.quantize import text
from maxstack.errors import ConfigError
from maxstack.load import load

MODEL = tiny.model(
    layers=2,
    pattern=[],
    blocks={
        "b": {
            "mixer": {"kind": "attention", "heads": 4, "head_dim": 8},
            "mlp": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16},
        }
    },
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of four steps, and tokens."""
    folder = tmp_path_factory.mktemp("quantize")
    cfg = tiny.config(
        model=MODEL,
        mesh={"tensor": 2},
        train={"steps": 4},
        checkpoint={"every": 4},
        eval={"every": 0},
        faults={"watchdog": None},
        run={
            "output_dir": str(folder),
            "name": "run",
            "tensorboard": False,
            "compilation_cache": None,
        },
    )
    (folder / "run.yml").write_text(config.dump(cfg))
    assert train.main([str(folder / "run.yml"), "optimizer.schedule=null"]) == 0
    rng = np.random.default_rng(0)
    np.savez(
        folder / "tokens.npz",
        tokens=rng.integers(0, tiny.VOCAB, (4, 32)).astype(np.int32),
        lengths=np.array([32, 20, 24, 8], np.int32),
    )
    return folder


@pytest.mark.slow
def test_show_lists_every_weight_with_its_rule_and_bytes(trained, capsys):
    rule = "quantization={mode: ptq, rules: [{module_path: '.*/mlp', weight_qtype: int4}]}"
    assert (
        cli.main(
            ["quantize", "show", str(trained / "run.yml"), rule, "lora={targets: ['.*/query']}"]
        )
        == 0
    )
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["blocks/b/mlp/gate"] == [
        "blocks/b/mlp/gate",
        "2x4x32x16",
        "0",
        "ptq",
        "int4",
        "-",
        "-",
        "16,384",
        f"{2048 + 2 * 4 * 16 * 4:,}",
    ]
    assert (
        rows["blocks/b/mixer/query"][2:5] == ["-", "adapter", "float32"]
        and rows["blocks/b/mlp/router"][2] == "-"
    )
    assert {"embed", "head", "norm/scale", "all"} <= rows.keys()


@pytest.mark.slow
def test_a_trained_run_becomes_one_in_low_precision_that_others_read(trained, capsys):
    out, tokens = trained / "int8", str(trained / "tokens.npz")
    assert (
        cli.main(
            f"quantize {trained / 'run'} --recipe int8 --calibrate {tokens} --out {out}".split()
        )
        == 0
    )
    told, report = capsys.readouterr().out, json.loads((out / "quantization.json").read_text())
    score, tune = (shlex.split(line)[1:] for line in told.splitlines()[-2:])
    assert (
        score[:2] == ["score", str(out)]
        and train.main([*tune[1:], "optimizer.schedule=null", "train.steps=1"]) == 0
    )
    assert (
        "perplexity on 80 tokens" in told
        and report["bytes"]["before"] > 1.5 * report["bytes"]["after"]
    )
    errors = {(row["weight"], row["layer"]): row["error"] for row in report["layers"]}
    names = "mixer/query", "mixer/key", "mixer/value", "mixer/out", "mlp/gate", "mlp/up", "mlp/down"
    assert {path for path, _ in errors} == {f"blocks/b/{name}" for name in names}
    assert {layer for _, layer in errors} == {0, 1} and all(
        0 < error < 0.05 for error in errors.values()
    )
    assert 0 < abs(report["perplexity"]["after"] / report["perplexity"]["before"] - 1) < 0.01
    assert cli.main(f"score {out} --tokens {tokens} --out {trained / 's.npz'}".split()) == 0
    assert float(capsys.readouterr().out.rsplit("perplexity ", 1)[1]) == pytest.approx(
        report["perplexity"]["after"], rel=1e-4
    )
    assert "blocks/b/mlp/gate/int8" in WeightsReader(out).shapes
    assert load(out / "config.yml").mesh == load(trained / "run.yml").mesh
    assert (
        cli.main(
            (
                f"quantize {trained / 'run'} --recipe int8 --calibrate {tokens} --out "
                f"{trained / '1'} --batch-size=1"
            ).split()
        )
        == 0
    )
    one_by_one = json.loads((trained / "1" / "quantization.json").read_text())["layers"]
    assert [row["error"] for row in one_by_one] == pytest.approx(
        [row["error"] for row in report["layers"]], rel=1e-4
    )  # padding has no part in them
    assert cli.main(f"quantize {out} --recipe int4 --calibrate {tokens}".split()) == 1
    assert (
        "is in low precision already; quantize the model it was made from"
        in capsys.readouterr().err
    )
    other = (
        "quantization={mode: ptq, rules: [{module_path: '.*/(mixer|mlp)/.*', weight_qtype: "
        "float8_e4m3fn}]}"
    )
    assert (
        cli.main(["score", str(out), other, "--tokens", tokens, "--out", str(trained / "f.npz")])
        == 1
    )
    assert (
        "holds the weights of another model: blocks/b/mixer/key/float8_e4m3fn"
        in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def nf4(trained):
    """The run again, its weights in four bits."""
    out = trained / "nf4"
    (trained / "nf4.yml").write_text(
        "mode: ptq\nrules:\n  - {module_path: '.*/(mixer|mlp)/.*', weight_qtype: nf4, "
        "tile_size: 8}\n"
    )
    assert (
        cli.main(
            (
                f"quantize {trained / 'run'} --recipe {trained / 'nf4.yml'} --calibrate "
                f"{trained / 'tokens.npz'} --out {out}"
            ).split()
        )
        == 0
    )
    return out


@pytest.mark.slow
def test_weights_in_low_precision_are_exported_as_floats_that_compute_the_same(
    trained, nf4, capsys
):
    assert "blocks/b/mlp/gate/nf4" in WeightsReader(nf4).shapes
    assert cli.main(f"export {nf4} --out {trained / 'floats'}".split()) == 0
    assert (
        cli.main(
            (
                f"score {trained / 'floats'} --tokens {trained / 'tokens.npz'} --out "
                f"{trained / 's.npz'}"
            ).split()
        )
        == 0
    )
    wanted = json.loads((nf4 / "quantization.json").read_text())["perplexity"]["after"]
    assert float(capsys.readouterr().out.rsplit("perplexity ", 1)[1]) == pytest.approx(
        wanted, rel=1e-4
    )


@pytest.mark.release
def test_adapters_are_trained_on_a_run_in_low_precision_and_begin_from_those_of_a_folder(
    trained, nf4
):
    given = [
        str(nf4 / "config.yml"),
        "optimizer.schedule=null",
        "lora={rank: 2, targets: ['.*/(mixer|mlp)/.*']}",
    ]
    assert train.main([*given, "run.name=tuned", "train.steps=6"]) == 0
    assert (
        "no adapters for blocks/b/mlp/down, blocks/b/mlp/gate, blocks/b/mlp/up, although"
        in (trained / "tuned" / "log.txt").read_text()
    )
    assert len([row for row in tiny.metrics(trained / "tuned") if "loss" in row]) == 6
    for source, target, further in (
        ("tuned", "adapter", ["run.name=again", "train.steps=1", "optimizer.learning_rate=0"]),
        ("again", "twice", []),
    ):
        assert cli.main(f"lora export {trained / source} --out {trained / target}".split()) == 0
        if further:
            assert train.main([*given, *further, f"lora.adapter={trained / target}"]) == 0
    before, after = (
        load_file(trained / name / "adapter_model.safetensors") for name in ("adapter", "twice")
    )
    assert all(np.array_equal(before[name], after[name]) for name in before | after)


def test_the_run_that_quantize_made_is_not_trained_into(nf4):
    before = sorted(nf4.rglob("*"))
    with pytest.raises(
        ConfigError,
        match="run.name: .*nf4 holds a model that maxstack quantize wrote.*: run.name=nf4-lora",
    ):
        train.main(
            [
                str(nf4 / "config.yml"),
                "optimizer.schedule=null",
                "lora={rank: 2}",
                "checkpoint.restore=latest",
            ]
        )
    assert sorted(nf4.rglob("*")) == before


def test_weights_that_nobody_could_train_are_not_trained_around(nf4):
    with pytest.raises(
        ConfigError,
        match="in low precision and never trains them, .* set lora to train adapters",
    ):
        train.main([str(nf4 / "config.yml"), "run.name=alone"])


@pytest.mark.slow
def test_adapters_begin_on_the_weights_of_a_whole_run(trained):
    given = [
        str(trained / "run.yml"),
        "run.name=over",
        f"checkpoint.restore={trained / 'run'}",
        "optimizer.schedule=null",
        "train.steps=1",
    ]
    assert train.main([*given, "lora={rank: 2, targets: ['.*/mixer/query']}"]) == 0
    assert (
        f"starting from the weights in {trained / 'run' / 'checkpoints' / '4'}"
        in (trained / "over" / "log.txt").read_text()
    )
    before, after = (WeightsReader(trained / name) for name in ("run", "over"))
    np.testing.assert_array_equal(
        before.read("blocks/b/mixer/query"), after.read("blocks/b/mixer/query/base")
    )


def test_a_whole_run_that_another_recipe_cannot_go_on_from_says_how_its_weights_are_had(trained):
    rules = "quantization.rules=[{module_path: '.*/mixer/.*', weight_qtype: int8}]"
    with pytest.raises(ConfigError) as told:
        train.main(
            [
                str(trained / "run.yml"),
                "run.name=other",
                "optimizer.schedule=null",
                f"checkpoint.restore={trained / 'run'}",
                rules,
            ]
        )
    assert 'quantization.rules: [] -> [{module_path: ".*/mixer/.*", weight_qtype: int8}]' in str(
        told.value
    )
    assert (
        f"(maxstack export {trained / 'run' / 'checkpoints' / '4'} --out FOLDER, then "
        "model.from=FOLDER)" in str(told.value)
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--recipe", "int8", "--calibrate", "none.npz"], "--calibrate none.npz: no such file"),
        (
            ["--recipe", "int8", "--calibrate", "tokens.npz", "--batch-size", "0"],
            "--batch-size: 0 is not a number above 0",
        ),
        (
            ["--recipe", "nothing.yml", "--calibrate", "tokens.npz"],
            "--recipe nothing.yml: quantizes nothing, because no rule sets weight_qtype",
        ),
        (["--recipe", "int9", "--calibrate", "tokens.npz"], "did you mean int8"),
        (
            ["--recipe", "int8", "--calibrate", "tokens.npz", "--out", "run"],
            "--out run: is there already",
        ),
        (
            ["--recipe", "mixed", "--calibrate", "tokens.npz"],
            "quantization.rules.1.tile_size: 128 does not divide",
        ),
    ],
)
def test_a_mistake_is_told_in_a_line(given, says, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (trained / "nothing.yml").write_text("rules: []\n")
    assert cli.main(["quantize", "run", *given]) == 1
    assert says in capsys.readouterr().err


def test_texts_without_a_tokenizer_are_asked_for_as_tokens_to_calibrate_on(tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}')
    assert (
        cli.main(
            (
                f"quantize {parity.GOLDENS / 'llama'} --recipe int8 --calibrate "
                f"{tmp_path / 'texts.jsonl'}"
            ).split()
        )
        == 1
    )
    assert re.search(
        r"brings no tokenizer .*data.tokenizer=.*; or give --calibrate FILE.npz",
        capsys.readouterr().err,
    )


def test_a_report_tells_layers_of_stacks_alone():
    rows = [
        {"weight": "blocks/b/mlp/up", "layer": 1, "error": 0.02},
        {"weight": "head", "layer": 0, "error": 0.01},
    ]
    told = text(
        {
            "bytes": {"before": 2, "after": 1},
            "perplexity": {"before": 1, "after": 1},
            "tokens": 1,
            "layers": rows,
        }
    )
    assert told.splitlines()[-2:] == [
        "  2.00%  blocks/b/mlp/up  layer 1 of its stack",
        "  1.00%  head",
    ]
