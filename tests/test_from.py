"""`model: {from: FOLDER}`: the architecture, weights and tokenizer of a Hugging Face folder in a
run's configuration."""

import collections
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import parity
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx
from tokenizer_files import of_words

from maxstack import cli, config, convert, starting_weights, startup, train
from maxstack.checkpoint.weights import WeightsReader
from maxstack.commands import convert as commands
from maxstack.compiled_steps import CompiledSteps
from maxstack.errors import ConfigError, DataError
from maxstack.hf.export import export
from maxstack.load import load, load_tree
from maxstack.models.model import abstract
from maxstack.run import assemble
from maxstack.sharding import make_mesh

LLAMA = parity.GOLDENS / "llama"
SYNTHETIC = "data: {sources: [{kind: synthetic, vocab: 128}], seq_len: 16}\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(LLAMA, tmp_path / "runs" / "llama")
    (tmp_path / "runs" / "mine.yml").write_text(
        SYNTHETIC + "model: {from: llama, dtype: float32}\n"
    )
    return tmp_path


def assembled(cfg, trains=True):
    """The run of a configuration on one device."""
    return assemble(cfg, make_mesh(cfg.mesh, jax.devices()[:1]), trains=trains)


def test_a_folder_beside_the_file_gives_the_architecture_and_the_weights(here):
    cfg, tree = load_tree("runs/mine.yml")
    model = cfg.model
    assert (model.embed, model.layers, model.dtype, model.weights) == (
        16,
        3,
        "float32",
        "runs/llama",
    )
    assert tree.at("model", "embed").where == "runs/llama"
    assert tree.at("model", "dtype").where == "runs/mine.yml:2"


def test_a_folder_replaces_the_model_of_an_extended_file_and_keeps_what_is_given_beside_it(here):
    (here / "runs" / "more.yml").write_text("extends: mine.yml\nmodel: {remat: {policy: full}}\n")
    cfg = load("runs/more.yml", ["model.from=runs/llama", "model.remat.policy=dots"])
    assert cfg.model.vocab == 128 and cfg.model.remat.policy == "dots"
    with pytest.raises(ConfigError, match="preset and from both say what the model is"):
        load({"model": {"from": "runs/llama", "preset": "qwen3-0.6b"}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({"architectures": ["LlamaForCausalML"]})
            ),
            "did you mean LlamaForCausalLM",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "only pytorch_model.bin, which is pickled weights",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(here, change, says, capsys):
    change(here / "runs" / "llama")
    assert cli.main(["config", "show", "runs/mine.yml"]) in (1, 2)
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_an_absolute_path_is_kept_so_that_the_run_opens_from_any_folder(here):
    folder = str(here / "runs" / "llama")
    assert load("runs/mine.yml", [f"model.from={folder}"]).model.weights == folder
    assert load("runs/mine.yml", ["model.from=runs/llama"]).model.weights == "runs/llama"


def test_a_run_starts_from_the_weights_on_any_mesh(here):
    cfg = load("runs/mine.yml", ["mesh.fsdp=2", "mesh.tensor=2", "train.batch_size=8"])
    alone = parity.loaded(
        LLAMA, assemble(cfg, make_mesh(cfg.mesh, jax.devices()[:4])).abstract.params
    )
    run = assemble(cfg, make_mesh(cfg.mesh, jax.devices()))
    state = startup.first_state(run)
    assert int(state.step) == 0
    for ours, wanted, asked in zip(
        *map(jax.tree.leaves, (state.params, alone, run.abstract.params)), strict=True
    ):
        np.testing.assert_array_equal(ours, wanted)
        assert ours.sharding == asked.sharding


def test_the_folders_tokenizer_comes_along_unless_another_is_given(here):
    of_words(["<s>", "</s>", "a", "<unk>"]).save("runs/llama/tokenizer.json")
    said = {"bos_token": "<s>", "add_bos_token": True, "eos_token": {"content": "</s>"}}
    (here / "runs/llama/tokenizer_config.json").write_text(json.dumps(said))
    found = load("runs/mine.yml").data.tokenizer
    assert (found.kind, found.path, found.bos, found.eos) == (
        "huggingface",
        "runs/llama/tokenizer.json",
        "<s>",
        "</s>",
    )
    assert load("runs/mine.yml", ["data.tokenizer.kind=bytes"]).data.tokenizer.kind == "bytes"
    more = "extends: quickstart\nmodel: {from: llama}\neval: {every: 0, baselines: false}\n"
    (here / "runs" / "more.yml").write_text(more + "data: {tokenizer: {kind: bytes}}\n")
    with pytest.raises(ConfigError, match="257 ids"):
        load("runs/more.yml")
    (here / "runs" / "more.yml").write_text(more)
    assert load("runs/more.yml").data.tokenizer.kind == "huggingface"


def test_an_adapter_that_is_not_loras_is_refused_before_any_weight_is_read(here):
    adapter = parity.GOLDENS / "adapters" / "lora-llama"
    lora = f"lora={{dora: true, targets: ['.*/query'], adapter: {adapter}}}"
    says = (
        r"set lora.rank=4, lora.alpha=6, lora.dora=false, "
        r"lora.targets=\[blocks/block/mixer/key, .*mlp/up\]"
    )
    with pytest.raises(ConfigError, match=says):
        startup.check_weights(assembled(load("runs/mine.yml", [lora])))


TEXTS = "data: {sources: [{kind: text, files: [runs/mine.yml]}], seq_len: 16}\n"


@pytest.mark.parametrize("form", ["nothing", "vocab.json", "tokenizer.json"])
def test_text_without_the_folders_tokenizer_is_refused_unless_another_is_given(here, form):
    folder = here / "runs" / "llama"
    if form == "vocab.json":
        (folder / form).write_text("{}")
        (folder / "merges.txt").touch()
    elif form == "tokenizer.json":
        (folder / form).mkdir()
    (here / "runs" / "text.yml").write_text(TEXTS + "model: {from: llama, dtype: float32}\n")
    with pytest.raises(
        ConfigError, match=r"runs/llama brings no tokenizer that maxstack reads.*data.tokenizer="
    ):
        load("runs/text.yml")
    assert load("runs/mine.yml").data.tokenizer.kind == "bytes"
    with pytest.raises(ConfigError, match="257 ids"):  # taken at its word
        load("runs/text.yml", ["data.tokenizer.kind=bytes"])


def test_eval_data_is_read_with_the_tokenizer_of_the_training_data(here):
    of_words(["a", "<unk>"]).save("runs/llama/tokenizer.json")
    own = "eval.data={sources: [{kind: text, files: [runs/mine.yml]}], seq_len: 16}"
    cfg = load("runs/mine.yml", ["eval.every=5", own])
    assert cfg.eval.data.tokenizer == cfg.data.tokenizer
    assert cfg.data.tokenizer.path == "runs/llama/tokenizer.json"


WATCHED: dict[str, collections.Counter] = {}
"""Folder -> how often each of its files was opened."""


@sys.addaudithook
def _count(event, arguments):
    # a file that `open` opens by another function is told twice, the second time without a mode
    mode = event == "open" and WATCHED and arguments[1]
    if mode and isinstance(arguments[0], str | os.PathLike):
        folder, name = os.path.split(os.path.abspath(arguments[0]))
        if folder in WATCHED:
            WATCHED[folder][name] += 1


class StopHereError(Exception):
    """In place of a compiled step."""


def test_a_start_opens_config_index_and_each_safetensors_file_once(here, monkeypatch):
    folder = here / "runs" / "llama"
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shards = [dict(list(tensors.items())[i::2]) for i in (0, 1)]
    for name, shard in zip(names, shards, strict=True):
        safetensors.numpy.save_file(shard, folder / name)
    index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    vocab = tokenizers.ByteLevelBPETokenizer()
    vocab.train_from_iterator(["a b"], vocab_size=100, show_progress=False)
    vocab.save_model(str(folder))

    def stop(steps, shape):
        raise StopHereError

    monkeypatch.setattr(CompiledSteps, "_compiled", stop)
    monkeypatch.setitem(WATCHED, str(folder), collections.Counter())
    with pytest.raises(StopHereError):
        train.main(["runs/mine.yml", f"run.output_dir={here}"])
    files = ("config.json", "model.safetensors.index.json", *names)
    assert {name: WATCHED[str(folder)][name] for name in files} == dict.fromkeys(files, 1)


def test_a_folder_that_changes_between_two_starts_is_read_again(here):
    assert load("runs/mine.yml").model.norm.eps == 1e-3
    described = json.loads((here / "runs" / "llama" / "config.json").read_text())
    (here / "runs" / "llama" / "config.json").write_text(
        json.dumps(described | {"rms_norm_eps": 2e-5})
    )
    assert load("runs/mine.yml").model.norm.eps == 2e-5
    (here / "runs" / "llama" / "config.json").write_text(json.dumps(described | {"clip_qkv": 8}))
    with pytest.raises(ConfigError, match="unknown keys: clip_qkv"):
        load("runs/mine.yml")


def flat(state):
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(state), sep="/")


def test_an_export_brings_the_tokenizer_that_the_model_was_trained_with(here):
    for name, token in (("llama/tokenizer.json", "a"), ("other.json", "b")):
        of_words([token, "<unk>"]).save(f"runs/{name}")
    model = load("runs/mine.yml").model
    shapes = {path: leaf.shape for path, leaf in flat(abstract(model)[1]).items()}
    for tokenizer, wanted in (
        ("source", "llama/tokenizer.json"),
        (here / "runs" / "other.json", "other.json"),
        ("bytes", None),
    ):
        shutil.rmtree(here / "out", ignore_errors=True)
        export(
            model,
            shapes,
            lambda path: np.zeros(shapes[path], np.float32),
            here / "out",
            source=here / "runs" / "llama",
            tokenizer=tokenizer,
        )
        made = here / "out" / "tokenizer.json"
        if wanted:
            assert made.read_text() == (here / "runs" / wanted).read_text()
    assert tokenizers.Tokenizer.from_file(str(made)).encode("aé").ids == [*"aé".encode()]


def test_a_fresh_run_refuses_weights_that_are_not_finite_by_name(here):
    name = parity.poisoned(LLAMA, here / "runs" / "nan", np.nan)
    cfg = load("runs/mine.yml", ["model.from=runs/nan"])
    with pytest.raises(DataError, match=f"tensor {name}: 1 of .*checkpoint.allow_nonfinite=true"):
        startup.first_state(assembled(cfg))
    allowed = load("runs/mine.yml", ["model.from=runs/nan", "checkpoint.allow_nonfinite=true"])
    params = startup.first_state(assembled(allowed)).params
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("change", ["blocks", "layers", "weights"])
def test_weights_of_another_model_than_the_configured_are_told_as_bad_data(here, change):
    model = config.plain_data(load("runs/mine.yml").model)
    other = {
        "blocks": {"blocks": {"other": model["blocks"]["block"]}, "pattern": []},
        "layers": {"layers": 2},
        "weights": {"weights": str(parity.GOLDENS / "qwen3_moe")},
    }
    model |= other[change]
    data = {"sources": [{"kind": "synthetic", "vocab": 128}]}
    run = assembled(load({"model": model, "data": data}))
    with pytest.raises(DataError, match=f"{model['weights']}: .*(another model|are not those of)"):
        startup.check_weights(run)


def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(here):
    (here / "runs" / "first").mkdir(parents=True)
    (here / "runs" / "first" / "config.yml").write_text("{}")
    with pytest.raises(ConfigError, match="no such run; runs has first; did you mean first"):
        load("quickstart", ["model.from=runs/frist"])


def test_an_export_finds_a_tokenizer_among_the_presets():
    tokenizer = {"path": "{configs}/recipes/digits.json"}
    assert convert._tokenizer({"tokenizer": tokenizer, "sources": []}).is_file()


@pytest.mark.parametrize("like", ["mean", 7])
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_larger_vocabulary_adds_rows_which_an_export_keeps(family, like, here):
    folder = parity.GOLDENS / family
    cfg = load(
        {"model": {"from": str(folder)}, "data": {"sources": [{"kind": "synthetic", "vocab": 2}]}},
        ["model.vocab=130", f"model.new_tokens={like}", "data.seq_len=16"],
    )
    weights = dict(starting_weights.original(assembled(cfg, trains=False)))
    export(cfg.model, {path: w.shape for path, w in weights.items()}, weights.get, here / "out")
    before, after = (
        safetensors.numpy.load_file(path / "model.safetensors") for path in (folder, here / "out")
    )
    tables = {name for name in before if before[name].shape != after[name].shape}
    assert len(tables) == (1 if family == "llama_tied" else 2)
    for name in tables:
        wanted = before[name].mean(0, dtype=np.float64) if like == "mean" else before[name][like]
        np.testing.assert_array_equal(after[name][:128], before[name])
        np.testing.assert_allclose(after[name][128:], np.stack([wanted] * 2), atol=1e-7)
    assert json.loads((here / "out" / "config.json").read_text())["vocab_size"] == 130


def test_a_token_to_copy_that_the_folder_has_not_is_refused(here):
    cfg = load("runs/mine.yml", ["model.vocab=130", "model.new_tokens=128"])
    with pytest.raises(ConfigError, match="model.new_tokens=128: is no token of .* has 128; give"):
        dict(starting_weights.original(assembled(cfg, trains=False)))


def test_the_advice_about_a_tokenizer_with_further_tokens_is_taken_by_import_and_run(here, capsys):
    words = [f"<{number}>" for number in range(130)]
    of_words(words, "<0>").save("runs/llama/tokenizer.json")
    assert cli.run(commands.import_model, ["runs/llama", "--out", "runs/a"]) == 2
    (advice,) = re.findall("set (model.vocab) to at least (130)", capsys.readouterr().err)
    override = "=".join(advice)
    assert cli.run(commands.import_model, ["runs/llama", override, "--out", "runs/a"]) == 0
    table = np.asarray(WeightsReader(Path("runs/a")).read("embed"))
    np.testing.assert_allclose(table[128:], np.stack([table[:128].mean(0)] * 2), atol=1e-7)
    longer = load("runs/mine.yml", ["model.from=runs/a", "model.vocab=132"])
    again = dict(starting_weights.original(assembled(longer, trains=False)))["embed"]
    np.testing.assert_allclose(again[130:], np.stack([table.mean(0)] * 2), atol=1e-7)
