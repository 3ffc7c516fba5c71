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

from maxstack import cli, train
from maxstack.checkpoint.weights import WeightsReader
from maxstack.commands.quantize import text
from maxstack.errors import ConfigError
from maxstack.load import load

MIXER = {"kind": "attention", "heads": 4, "head_dim": 8}
BLOCKS = {"b": {"mixer": MIXER, "mlp": tiny.MOE | {"hidden": 16}}}
MODEL = tiny.model(layers=2, pattern=[], blocks=BLOCKS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of four steps, and tokens."""
    folder = tmp_path_factory.mktemp("quantize")
    where = {"output_dir": str(folder), "name": "run", "tensorboard": False}
    cfg = tiny.config(
        model=MODEL,
        mesh={"tensor": 2},
        train={"steps": 4},
        checkpoint={"every": 4},
        eval={"every": 0},
        faults={"watchdog": None},
        run=where | {"compilation_cache": None},
    )
    assert train.main([str(tiny.write(folder, cfg)), "optimizer.schedule=null"]) == 0
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, (4, 32)).astype(np.int32)
    np.savez(folder / "tokens.npz", tokens=tokens, lengths=np.array([32, 20, 24, 8], np.int32))
    return folder


@pytest.mark.slow
def test_show_lists_every_weight_with_its_rule_and_bytes(trained, maxstack):
    rule = "quantization={mode: ptq, rules: [{module_path: '.*/mlp', weight_qtype: int4}]}"
    words = rule, "lora={targets: ['.*/query']}"
    lines = maxstack(f"quantize show {trained / 'run.yml'}", *words).splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    figures = "2x4x32x16", "0", "ptq", "int4", "-", "-", "16,384", f"{2048 + 2 * 4 * 16 * 4:,}"
    assert rows["blocks/b/mlp/gate"] == ["blocks/b/mlp/gate", *figures]
    assert rows["blocks/b/mixer/query"][2:5] == ["-", "adapter", "float32"]
    assert rows["blocks/b/mlp/router"][2] == "-"
    assert {"embed", "head", "norm/scale", "all"} <= rows.keys()


@pytest.mark.slow
def test_a_trained_run_becomes_one_in_low_precision_that_others_read(trained, maxstack):
    run, out, tokens = trained / "run", trained / "int8", trained / "tokens.npz"
    told = maxstack(f"quantize {run} --recipe int8 --calibrate {tokens} --out {out}")
    report = json.loads((out / "quantization.json").read_text())
    score, tune = (shlex.split(line)[1:] for line in told.splitlines()[-2:])
    assert score[:2] == ["score", str(out)]
    assert train.main([*tune[1:], "optimizer.schedule=null", "train.steps=1"]) == 0
    assert "perplexity on 80 tokens" in told
    assert report["bytes"]["before"] > 1.5 * report["bytes"]["after"]
    errors = {(row["weight"], row["layer"]): row["error"] for row in report["layers"]}
    names = "mixer/query", "mixer/key", "mixer/value", "mixer/out", "mlp/gate", "mlp/up", "mlp/down"
    assert {path for path, _ in errors} == {f"blocks/b/{name}" for name in names}
    assert {layer for _, layer in errors} == {0, 1}
    assert all(0 < error < 0.05 for error in errors.values())
    assert 0 < abs(report["perplexity"]["after"] / report["perplexity"]["before"] - 1) < 0.01
    said = maxstack(f"score {out} --tokens {tokens} --out {trained / 's.npz'}")
    scored = float(said.rsplit("perplexity ", 1)[1])
    assert scored == pytest.approx(report["perplexity"]["after"], rel=1e-4)
    assert "blocks/b/mlp/gate/int8" in WeightsReader(out).shapes
    assert load(out / "config.yml").mesh == load(trained / "run.yml").mesh
    one = trained / "1"
    maxstack(f"quantize {run} --recipe int8 --calibrate {tokens} --out {one} --batch-size=1")
    one_by_one = json.loads((one / "quantization.json").read_text())["layers"]
    assert [row["error"] for row in one_by_one] == pytest.approx(
        [row["error"] for row in report["layers"]], rel=1e-4
    )  # padding has no part in them
    said = maxstack(f"quantize {out} --recipe int4 --calibrate {tokens}", code=1)
    assert "is in low precision already; quantize the model it was made from" in said
    rule = "{module_path: '.*/(mixer|mlp)/.*', weight_qtype: float8_e4m3fn}"
    other = f"quantization={{mode: ptq, rules: [{rule}]}}"
    said = maxstack(f"score {out} --tokens {tokens} --out {trained / 'f.npz'}", other, code=1)
    assert "holds the weights of another model: blocks/b/mixer/key/float8_e4m3fn" in said


@pytest.fixture(scope="module")
def nf4(trained):
    """The run again, its weights in four bits."""
    out, recipe = trained / "nf4", trained / "nf4.yml"
    rule = "{module_path: '.*/(mixer|mlp)/.*', weight_qtype: nf4, tile_size: 8}"
    recipe.write_text(f"mode: ptq\nrules: [{rule}]\n")
    words = f"--recipe {recipe} --calibrate {trained / 'tokens.npz'} --out {out}"
    assert cli.main(["quantize", str(trained / "run"), *words.split()]) == 0
    return out


@pytest.mark.slow
def test_weights_in_low_precision_are_exported_as_floats_that_compute_the_same(
    trained, nf4, maxstack
):
    assert "blocks/b/mlp/gate/nf4" in WeightsReader(nf4).shapes
    floats = trained / "floats"
    maxstack(f"export {nf4} --out {floats}")
    tokens = trained / "tokens.npz"
    said = maxstack(f"score {floats} --tokens {tokens} --out {trained / 's.npz'}")
    wanted = json.loads((nf4 / "quantization.json").read_text())["perplexity"]["after"]
    assert float(said.rsplit("perplexity ", 1)[1]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.release
def test_adapters_are_trained_on_a_run_in_low_precision_and_begin_from_those_of_a_folder(
    trained, nf4, maxstack
):
    targets = "lora={rank: 2, targets: ['.*/(mixer|mlp)/.*']}"
    given = [str(nf4 / "config.yml"), "optimizer.schedule=null", targets]
    assert train.main([*given, "run.name=tuned", "train.steps=6"]) == 0
    none = "no adapters for blocks/b/mlp/down, blocks/b/mlp/gate, blocks/b/mlp/up, although"
    assert none in (trained / "tuned" / "log.txt").read_text()
    assert len([row for row in tiny.metrics(trained / "tuned") if "loss" in row]) == 6
    first, twice = trained / "adapter", trained / "twice"
    maxstack(f"lora export {trained / 'tuned'} --out {first}")
    further = "run.name=again", "train.steps=1", "optimizer.learning_rate=0"
    assert train.main([*given, *further, f"lora.adapter={first}"]) == 0
    maxstack(f"lora export {trained / 'again'} --out {twice}")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (first, twice))
    assert all(np.array_equal(before[name], after[name]) for name in before | after)


def test_the_run_that_quantize_made_is_not_trained_into(nf4):
    before = sorted(nf4.rglob("*"))
    words = "optimizer.schedule=null", "lora={rank: 2}", "checkpoint.restore=latest"
    said = "run.name: .*nf4 holds a model that maxstack quantize wrote.*: run.name=nf4-lora"
    with pytest.raises(ConfigError, match=said):
        train.main([str(nf4 / "config.yml"), *words])
    assert sorted(nf4.rglob("*")) == before


def test_weights_that_nobody_could_train_are_not_trained_around(nf4):
    said = "in low precision and never trains them, .* set lora to train adapters"
    with pytest.raises(ConfigError, match=said):
        train.main([str(nf4 / "config.yml"), "run.name=alone"])


def trained_on(trained, name, *words):
    """Train a run that begins on the weights of the trained one."""
    given = f"run.name={name}", f"checkpoint.restore={trained / 'run'}", "optimizer.schedule=null"
    return train.main([str(trained / "run.yml"), *given, *words])


@pytest.mark.slow
def test_adapters_begin_on_the_weights_of_a_whole_run(trained):
    targets = "lora={rank: 2, targets: ['.*/mixer/query']}"
    assert trained_on(trained, "over", "train.steps=1", targets) == 0
    start = f"starting from the weights in {trained / 'run' / 'checkpoints' / '4'}"
    assert start in (trained / "over" / "log.txt").read_text()
    query = "blocks/b/mixer/query"
    before, after = (WeightsReader(trained / name) for name in ("run", "over"))
    np.testing.assert_array_equal(before.read(query), after.read(f"{query}/base"))


def test_a_whole_run_that_another_recipe_cannot_go_on_from_says_how_its_weights_are_had(trained):
    rules = "quantization.rules=[{module_path: '.*/mixer/.*', weight_qtype: int8}]"
    with pytest.raises(ConfigError) as told:
        trained_on(trained, "other", rules)
    changed = 'quantization.rules: [] -> [{module_path: ".*/mixer/.*", weight_qtype: int8}]'
    step = trained / "run" / "checkpoints" / "4"
    export = f"(maxstack export {step} --out FOLDER, then model.from=FOLDER)"
    assert changed in str(told.value) and export in str(told.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("int8 --calibrate none.npz", "--calibrate none.npz: no such file"),
        ("int8 --batch-size 0", "--batch-size: 0 is not a number above 0"),
        (
            "nothing.yml",
            "--recipe nothing.yml: quantizes nothing, because no rule sets weight_qtype",
        ),
        ("int9", "did you mean int8"),
        ("int8 --out run", "--out run: is there already"),
        ("mixed", "quantization.rules.1.tile_size: 128 does not divide"),
    ],
)
def test_a_mistake_is_told_in_a_line(given, says, trained, monkeypatch, maxstack):
    monkeypatch.chdir(trained)
    (trained / "nothing.yml").write_text("rules: []\n")
    words = f"quantize run --calibrate tokens.npz --recipe {given}"
    assert says in maxstack(words, code=1)


def test_texts_without_a_tokenizer_are_asked_for_as_tokens_to_calibrate_on(tmp_path, maxstack):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}')
    folder = parity.GOLDENS / "llama"
    said = maxstack(f"quantize {folder} --recipe int8 --calibrate {texts}", code=1)
    wanted = r"brings no tokenizer .*data.tokenizer=.*; or give --calibrate FILE.npz"
    assert re.search(wanted, said)


def test_a_report_tells_layers_of_stacks_alone():
    rows = [
        {"weight": "blocks/b/mlp/up", "layer": 1, "error": 0.02},
        {"weight": "head", "layer": 0, "error": 0.01},
    ]
    alike = {"before": 1, "after": 1}
    told = text({"bytes": alike, "perplexity": alike, "tokens": 1, "layers": rows})
    assert told.splitlines()[-2:] == [
        "  2.00%  blocks/b/mlp/up  layer 1 of its stack",
        "  1.00%  head",
    ]
