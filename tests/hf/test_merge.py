"""Adapters of peft with an embedding or a head beside their matrices: merged they compute what
they do there, and what cannot be merged is refused by name."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import parity
import processes
import pytest
import tiers
from flax import nnx
from safetensors.numpy import load_file, save_file

from maxstack.errors import ConfigError
from maxstack.hf.adapter import CONFIG, TENSORS, Adapter
from maxstack.hf.contents import Contents
from maxstack.hf.merge import merge
from maxstack.inference.trained_model import adapt_run, assemble_model

TABLES = parity.GOLDENS / "tables"
NAMES = sorted(path.name for path in TABLES.iterdir())
EMBED, HEAD = "model.embed_tokens", "lm_head"


def base_of(name):
    return parity.GOLDENS / name.partition("-")[2]


def merged(adapter, out, base):
    merge(base, Adapter(adapter), out, 1, lambda size: None)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


def changed(out, name, settings=None, **tensors):
    """A golden adapter with other settings and tensors; None leaves one out."""
    shutil.copytree(TABLES / name, out)
    said = json.loads((out / CONFIG).read_text()) | (settings or {})
    (out / CONFIG).write_text(json.dumps(said))
    held = load_file(out / TENSORS) | {
        f"base_model.model.{key}": value for key, value in tensors.items()
    }
    save_file({key: value for key, value in held.items() if value is not None}, out / TENSORS)
    return out


@pytest.mark.parametrize("name", tiers.of(NAMES, slow=NAMES[1:]))
def test_a_merged_adapter_with_tables_computes_what_it_does_in_peft(name, tmp_path):
    _, said = merged(TABLES / name, tmp_path / "out", base_of(name))
    kind = name.partition("-")[0]
    assert said["vocab_size"] == (131 if kind in ("grown", "longer") else 128)
    assert said["tie_word_embeddings"] == (kind in ("shared", "longer"))
    golden = np.load(TABLES / name / "golden.npz")
    tokens = jnp.asarray(golden["tokens"])
    _, graph, params = parity.model_and_params(tmp_path / "out")
    model = nnx.merge(graph, nnx.State(params))
    positions = jnp.arange(tokens.shape[1])[None]
    batch = {"tokens": tokens, "positions": positions, "segments": jnp.ones_like(tokens)}
    logits = np.asarray(model.logits(model.hidden(batch)))
    assert np.abs(logits - golden["logits"]).max() / golden["logits"].std() < parity.LOGITS


def test_a_head_that_becomes_its_own_is_listed_in_the_index(tmp_path):
    shutil.copytree(parity.GOLDENS / "llama_tied", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    files = {name: f"model-{1 + ('layers' in name)}-of-2.safetensors" for name in tensors}
    for file in {*files.values()}:
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, tmp_path / "model" / file)
    index = "model.safetensors.index.json"
    (tmp_path / "model" / index).write_text(json.dumps({"weight_map": files}))
    merge(tmp_path / "model", Adapter(TABLES / "embed-llama_tied"), tmp_path / "out", 1, print)
    said = json.loads((tmp_path / "out" / index).read_text())
    assert said["weight_map"] == files | {f"{HEAD}.weight": files[f"{EMBED}.weight"]}
    assert said["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in [*tensors.values(), tensors[f"{EMBED}.weight"]]
    )
    assert f"{HEAD}.weight" in Contents(tmp_path / "out").tensors


def test_a_head_that_is_stored_though_it_is_the_embedding_follows_it_or_becomes_its_own(tmp_path):
    shutil.copytree(parity.GOLDENS / "llama_tied", folder := tmp_path / "model")
    base = load_file(folder / "model.safetensors")
    base[f"{HEAD}.weight"] = base[f"{EMBED}.weight"]
    save_file({name: tensor.copy() for name, tensor in base.items()}, folder / "model.safetensors")
    found, config = merged(TABLES / "shared-llama_tied", tmp_path / "a", folder)
    rows = load_file(TABLES / "shared-llama_tied" / TENSORS)
    (rows,) = (tensor for name, tensor in rows.items() if name.endswith("_delta"))
    assert np.array_equal(found[f"{HEAD}.weight"], found[f"{EMBED}.weight"])
    assert config["tie_word_embeddings"] and np.array_equal(found[f"{EMBED}.weight"][3], rows[1])
    found, config = merged(TABLES / "head-llama_tied", tmp_path / "b", folder)
    pair = load_file(TABLES / "head-llama_tied" / TENSORS)
    b, a = (pair[f"base_model.model.{HEAD}.lora_{part}.weight"] for part in "BA")
    np.testing.assert_allclose(
        found[f"{HEAD}.weight"], base[f"{HEAD}.weight"] + 3 * b @ a, atol=1e-5
    )
    assert not config["tie_word_embeddings"]
    assert np.array_equal(found[f"{EMBED}.weight"], base[f"{EMBED}.weight"])


def test_an_adapter_with_tables_is_used_by_the_command_that_its_refusal_gives(tmp_path, maxstack):
    base, adapter, out = parity.GOLDENS / "llama", TABLES / "whole-llama", tmp_path / "out"
    run, _ = assemble_model(str(base), ["mesh.fsdp=1", "mesh.data=8"])
    with pytest.raises(ConfigError, match="holds tables beside low-rank") as refused:
        adapt_run(run, str(adapter))
    command = re.search(r"maxstack (lora merge FOLDER .*)", str(refused.value))[1]
    line = command.replace("FOLDER", str(base)).replace("MERGED", str(out))
    assert "merged into 5 tensors" in maxstack(line)
    words = f"lora unmerge {out} --adapter {adapter} --out {tmp_path / 'again'}"
    assert "keep the folder that it was merged into" in maxstack(words, code=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "vocab", "lora"),
    [
        pytest.param("llama", 131, "{rank: 2}", marks=pytest.mark.release),
        ("llama_tied", 131, "{rank: 2}"),
        ("llama_tied", 128, "{rank: 2, modules_to_save: [embed]}"),
        ("llama", 130, "{rank: 2, modules_to_save: [head]}"),
    ],
)
def test_an_exported_adapter_brings_the_tables_that_the_folder_lacks(
    family, vocab, lora, tmp_path, maxstack
):
    data = {"sources": [{"kind": "synthetic", "vocab": 100}], "seq_len": 16}
    (tmp_path / "run.yml").write_text(json.dumps({"data": data}))
    base, run, adapter = parity.GOLDENS / family, tmp_path / "run", tmp_path / "adapter"
    processes.train(
        tmp_path / "run.yml",
        *(f"run.output_dir={tmp_path}", "run.name=run", "run.tensorboard=false"),
        *(f"model.from={base}", "model.dtype=float32", f"model.vocab={vocab}", f"lora={lora}"),
        *("train.steps=2", "train.batch_size=4", "optimizer.learning_rate=0.01"),
        "checkpoint.every=2",
    )
    maxstack(f"lora export {run} --out {adapter}")
    maxstack(f"export {run} --out {tmp_path / 'wanted'}")
    wanted, before = (load_file(path / "model.safetensors") for path in (tmp_path / "wanted", base))
    found, said = merged(adapter, tmp_path / "merged", base)
    assert found.keys() == wanted.keys() and said["vocab_size"] == vocab
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, atol=1e-6, err_msg=name)
    if "embed" not in lora:
        mean = np.stack([before[f"{EMBED}.weight"].mean(0)] * (vocab - 128))
        np.testing.assert_allclose(found[f"{EMBED}.weight"][128:], mean, atol=1e-6)
    held = json.loads((adapter / CONFIG).read_text())["modules_to_save"]
    assert held == (["embed_tokens", "lm_head"] if "modules_to_save" in lora else None)
    assert f"base_model.model.{HEAD}.weight" in load_file(adapter / TENSORS)


ONES = np.ones((131, 16), np.float32)


@pytest.mark.parametrize(
    ("name", "settings", "tensors", "says"),
    [
        (
            "whole-llama",
            {"modules_to_save": ["norm"]},
            {"model.norm.weight": ONES[0, :8]},
            "it holds model.norm, and .*, as a language model, has no such weight of that size",
        ),
        ("whole-llama", {}, {f"{HEAD}.bias": ONES[0]}, "holds lm_head.bias, which is no part"),
        (
            "whole-llama",
            {},
            {f"{EMBED}.weight": ONES[:128, :8]},
            r"holds model.embed_tokens as \[128, 8\], and the model has \[128, 16\]; save",
        ),
        (
            "whole-llama",
            {},
            {f"{EMBED}.weight": ONES},
            "makes 131 of model.embed_tokens and 128 of lm_head rows; save it again with",
        ),
        (
            "whole-llama",
            {},
            {f"{HEAD}.weight": None},
            "says that lm_head is saved, and adapter_model.safetensors has nothing of it; save",
        ),
        *(
            (
                "rows-llama",
                {"trainable_token_indices": indices},
                {},
                r"trainable_token_indices=.* are no rows of model.embed_tokens; save",
            )
            for indices in (
                {"embed_tokens": [3, 128], "lm_head": [5, 7, 9]},
                {"embed_tokens": [3], "lm_head": [5, 7, 9]},
                {"embed_tokens": [3, 2**70], "lm_head": [5, 7, 9]},
                {"embed_tokens": [3, -1], "lm_head": [5, 7, 9]},
                {"lm_head": [5, 7, 9]},
                7,
                None,
            )
        ),
        (
            "rows-llama",
            {"trainable_token_indices": {"embed_tokens": [3, 3], "lm_head": [5, 7, 9]}},
            {},
            "in adapter_config.json name a row twice",
        ),
        (
            "whole-llama",
            {},
            {
                "model.layers.1.mlp.up_proj.lora_A.weight": ONES[:2],
                "model.layers.1.mlp.up_proj.lora_B.weight": ONES[:32, :2],
            },
            "an adapter of model.layers.1.mlp.up_proj, which target_modules=.* does not name",
        ),
        (
            "shared-llama_tied",
            {},
            {f"{EMBED}.token_adapter.trainable_tokens_delta": None},
            "says that model.embed_tokens is saved, and",
        ),
    ],
)
def test_tables_that_do_not_fit_the_model_or_the_settings_are_refused(
    name, settings, tensors, says, tmp_path
):
    adapter = changed(tmp_path / "adapter", name, settings, **tensors)
    with pytest.raises(ConfigError, match=says):
        merged(adapter, tmp_path / "out", base_of(name))
    assert not (tmp_path / "out").exists()
