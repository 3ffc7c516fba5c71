"""Adapters that bring whole tables, or rows of them, as peft saves them."""

import json
import shutil

import numpy as np
import parity
import pytest
from safetensors.numpy import load_file, save_file

from maxstack.errors import ConfigError
from maxstack.hf.merge import merge
from maxstack.hf.peft import OUTER, Adapter, bound_to

EMBED, HEAD, QUERY = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"
DELTA = "token_adapter.trainable_tokens_delta"


def table(rows, seed=1, width=16):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def adapter_of(folder, tensors, **said):
    """An adapter of one module that changes nothing there, and of further tensors."""
    folder.mkdir()
    pair = {f"{QUERY}.lora_A.weight": table(2), f"{QUERY}.lora_B.weight": np.zeros((32, 2), "f4")}
    base = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": QUERY}
    (folder / "adapter_config.json").write_text(json.dumps(base | said))
    named = {f"{OUTER}{name}": tensor for name, tensor in (pair | tensors).items()}
    save_file(named, folder / "adapter_model.safetensors")
    return Adapter(folder)


def merged(model, adapter, out):
    merge(parity.GOLDENS / model, adapter, out, 1, lambda size: None)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


BOTH = {f"{EMBED}.weight": table(128), f"{HEAD}.weight": table(128, 2)}
GROWN = {f"{EMBED}.weight": table(130), f"{HEAD}.weight": table(130)}
ROWS = {f"{EMBED}.{DELTA}": table(2)}


@pytest.mark.parametrize(
    ("model", "tensors", "said", "tied"),
    [
        ("llama", BOTH, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ("llama_tied", BOTH, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ("llama_tied", {f"{EMBED}.weight": table(128)}, {"modules_to_save": [EMBED]}, False),
        ("llama", {"model.norm.weight": table(1)[0]}, {"modules_to_save": ["norm"]}, False),
        ("llama", GROWN, {}, False),
        ("llama_tied", GROWN, {}, True),
        ("llama", ROWS, {"trainable_token_indices": [3, 5]}, False),
        ("llama_tied", ROWS, {"trainable_token_indices": {"embed_tokens": [3, 5]}}, True),
    ],
)
def test_tables_and_rows_are_merged_as_pefts_model_has_them(model, tensors, said, tied, tmp_path):
    base = load_file(parity.GOLDENS / model / "model.safetensors")
    found, config = merged(model, adapter_of(tmp_path / "a", tensors, **said), tmp_path / "out")
    wanted = {f"{HEAD}.weight": base[f"{EMBED}.weight"]} | base
    wanted |= {name: tensor for name, tensor in tensors.items() if DELTA not in name}
    if tensors is ROWS:
        wanted[f"{EMBED}.weight"][[3, 5]] = tensors[f"{EMBED}.{DELTA}"]
    if tied:
        del wanted[f"{HEAD}.weight"]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name], tensor), name
    assert config["vocab_size"] == len(wanted[f"{EMBED}.weight"])
    assert bool(config["tie_word_embeddings"]) == tied


@pytest.mark.parametrize(
    ("tensors", "said", "told"),
    [
        (
            {f"{EMBED}.weight": table(130)},
            {},
            "makes 130 of model.embed_tokens and 128 of lm_head rows",
        ),
        (
            {f"{EMBED}.weight": table(128, width=8)},
            {},
            r"\[128, 8\], and the model has \[128, 16\]",
        ),
        ({"model.norm.weight": table(1)}, {}, r"model.norm as \[1, 16\], and the model has \[16\]"),
        (
            {"score.weight": table(2)},
            {"modules_to_save": ["score"]},
            "holds score, and .* no such weight",
        ),
        (ROWS, {"trainable_token_indices": [3, 128]}, "are no rows of model.embed_tokens"),
        (
            ROWS,
            {"trainable_token_indices": [3]},
            r"indices=\[3\] .* are no rows of model.embed_tokens",
        ),
        (ROWS, {"trainable_token_indices": [-1, 3]}, "are no rows of model.embed_tokens"),
        (ROWS, {"trainable_token_indices": [3, 3]}, "are no rows of model.embed_tokens"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tensors, said, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        merged("llama", adapter_of(tmp_path / "a", tensors, **said), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_with_a_table_is_not_taken_out_again_nor_read_beside_a_base(tmp_path):
    adapter = adapter_of(tmp_path / "a", ROWS, trainable_token_indices=[3, 5])
    with pytest.raises(ConfigError, match="replaces weights, and merging"):
        merge(parity.GOLDENS / "llama", adapter, tmp_path / "out", -1, lambda size: None)
    with pytest.raises(ConfigError, match="maxstack lora merge FOLDER --adapter"):
        bound_to(adapter, None, {})


def test_a_head_that_is_stored_though_it_is_the_embedding_follows_it_or_becomes_its_own(tmp_path):
    shutil.copytree(parity.GOLDENS / "llama_tied", folder := tmp_path / "model")
    base = load_file(folder / "model.safetensors")
    base[f"{HEAD}.weight"] = base[f"{EMBED}.weight"]
    save_file({name: tensor.copy() for name, tensor in base.items()}, folder / "model.safetensors")
    rows = adapter_of(tmp_path / "rows", ROWS, trainable_token_indices=[3, 5])
    found, config = merged(folder, rows, tmp_path / "a")
    assert np.array_equal(found[f"{HEAD}.weight"], found[f"{EMBED}.weight"])
    assert config["tie_word_embeddings"] and (found[f"{EMBED}.weight"][3] == table(2)[0]).all()
    pair = {f"{HEAD}.lora_A.weight": table(2), f"{HEAD}.lora_B.weight": np.ones((128, 2), "f4")}
    found, config = merged(folder, adapter_of(tmp_path / "pair", pair), tmp_path / "b")
    change = 2 * pair[f"{HEAD}.lora_B.weight"] @ pair[f"{HEAD}.lora_A.weight"]
    wanted = base[f"{HEAD}.weight"] + change
    np.testing.assert_allclose(found[f"{HEAD}.weight"], wanted, atol=1e-5)
    assert not config["tie_word_embeddings"]
    assert np.array_equal(found[f"{EMBED}.weight"], base[f"{EMBED}.weight"])
