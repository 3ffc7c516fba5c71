"""A model folder is refused, with the reason, where it is hostile, broken or not supported; nothing
in it is run."""

import json
import os
import shutil

import numpy as np
import pytest
import safetensors.numpy
from parity import GOLDENS

from maxstack.data import hub
from maxstack.errors import ConfigError, DataError
from maxstack.hf.contents import Contents
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import of_config
from maxstack.inference.engine_setup import open_model_tokenizer
from maxstack.inference.trained_model import config_of


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "llama" / name, tmp_path / name)
    return tmp_path


def tensors(folder):
    return dict(safetensors.numpy.load_file(folder / "model.safetensors"))


def config(folder, **changes):
    given = json.loads((folder / "config.json").read_text())
    given = {key: value for key, value in (given | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(given))


def sharded(folder):
    """The folder with its tensors in two files and an index; -> the weight map."""
    found = tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(found)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in {*where.values()}:
        safetensors.numpy.save_file(
            {name: found[name] for name in names if where[name] == shard}, folder / shard
        )
    write_index(folder, where)
    return where


def write_index(folder, where):
    (folder / hub.INDEX.format(hub.MODEL)).write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


def test_shards_are_read_as_one(folder):
    before = {name: tensor.array().copy() for name, tensor in Contents(folder).tensors.items()}
    sharded(folder)
    after = Contents(folder).tensors
    assert before.keys() == after.keys()
    assert all((before[name] == after[name].array()).all() for name in before)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_without_weights_config_and_index_say_what_the_tensors_do(folder, family):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / family / name, folder / name)
    sharded(folder)
    whole, said = Contents(folder), Contents(folder, weights=False)
    assert said.mapping == whole.mapping and said.dtype == whole.dtype and not said.tensors


def test_float16_is_computed_in_bfloat16_and_said(folder, caplog):
    held = {name: array.astype(np.float16) for name, array in tensors(folder).items()}
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    assert config_of(str(folder), [])[0].model.dtype == "bfloat16"
    assert f"{folder}: holds float16; computed in bfloat16" in caplog.text


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/tmp/model.safetensors",
        "model.bin",
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(folder, shard):
    where = sharded(folder)
    write_index(folder, where | {"lm_head.weight": shard})
    with pytest.raises(DataError, match=r"index.json: tensor lm_head.weight is said to be in"):
        Contents(folder)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.safetensors"
    shutil.move(folder / "model.safetensors", elsewhere)
    os.symlink(elsewhere, folder / "model.safetensors")
    with pytest.raises(DataError, match="leads out of the folder"):
        Contents(folder)


def test_a_snapshot_of_the_hub_may_link_to_its_own_blobs(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "llama" / name, blobs / name)
        os.symlink(f"../../blobs/{name}", snapshot / name)
    assert Contents(snapshot).family.architecture == "LlamaForCausalLM"


def test_an_index_that_lies_about_its_shards_is_refused(folder):
    where = sharded(folder)
    write_index(folder, where | {"model.layers.99.mlp.up_proj.weight": where["lm_head.weight"]})
    with pytest.raises(DataError, match=r"layers\.99.*which does not hold it"):
        Contents(folder)
    write_index(folder, {name: shard for name, shard in where.items() if name != "lm_head.weight"})
    with pytest.raises(DataError, match=r"lm_head.weight is not listed"):
        Contents(folder)


def test_a_missing_shard_is_named(folder):
    where = sharded(folder)
    (folder / where["lm_head.weight"]).unlink()
    with pytest.raises(DataError, match=r"of-00002.safetensors: no such file"):
        Contents(folder)


def test_an_index_beside_a_single_file_that_it_does_not_name_is_refused(folder):
    shutil.copyfile(folder / "model.safetensors", folder / "kept")
    sharded(folder)
    shutil.move(folder / "kept", folder / "model.safetensors")
    with pytest.raises(DataError, match="stale"):
        Contents(folder)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "modeling_llama.py",
    ],
)
def test_pickles_and_code_are_never_read(folder, name):
    """What training leaves beside the safetensors is no reason to refuse them; without these it
    is named."""
    (folder / name).write_bytes(b"import os")
    config(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    assert Contents(folder).model.layers
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"only {name}, which is .*never runs"):
        Contents(folder)


def test_mistakes_are_told(folder, tmp_path):
    def refused(path, says):
        with pytest.raises(ConfigError, match=says):
            Contents(path)

    refused(tmp_path / "nowhere", "no such folder")
    refused(folder / "config.json", "is a file")
    (folder / "model.safetensors").unlink()
    refused(folder, "has neither")
    (folder / "config.json").unlink()
    refused(folder, r"config.json: no such file")


PUBLISHED = {
    "SmolLM2-135M": {"rope_interleaved": False, "is_llama_config": True},
    "of a tool": {
        "unsloth_version": "2025.1",
        "model_name": "a/b",
        "total_flos": 1,
        "device_map": 0,
    },
    "of tokens": {
        "unk_token_id": 0,
        "end_token_id": 2,
        "pad_token": "<pad>",
        "image_token_index": 9,
    },
    "of training": {
        "gradient_checkpointing": False,
        "output_past": True,
        "max_sequence_length": 2048,
        "activation_checkpointing_enabled": True,
        "use_flash_attention": True,
        "tensor_parallel_degree": 2,
        "rope_dropout": 0.1,
    },
    "that say nothing": {
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "logit_scale": None,
    },
}
"""Keys in config.json files of public repositories that transformers' Llama does not read."""


@pytest.mark.parametrize("changes", PUBLISHED.values(), ids=PUBLISHED)
def test_keys_that_change_no_output_are_passed_over(folder, changes, caplog):
    before = Contents(folder).mapping
    config(folder, **changes)
    assert Contents(folder).mapping == before and not caplog.records


def test_other_keys_that_change_no_output_are_told_once(folder, caplog):
    config(folder, team="a", year=2025)
    for _ in range(2):
        Contents(folder)
    (record,) = caplog.records
    assert "config.json: keys that the family does not read, passed over: team" in record.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "MambaForCausalLM.*not supported.*Qwen3ForCausalLM",
        ),
        ({"hidden_act": "relu6"}, "hidden_act='relu6': not supported; supported: silu"),
        ({"clip_qkv": 8.0}, "unknown keys: clip_qkv"),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.OtherForCausalLM"}},
            "auto_map='OtherForCausalLM' .supported: LlamaForCausalLM",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type 'dynamic' is not supported",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "twist": 1,
                }
            },
            "not known: twist",
        ),
        ({"hidden_size": ...}, "key hidden_size is missing"),
        ({"num_key_value_heads": 3}, "describes no model"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(folder, changes, reason):
    config(folder, **changes)
    with pytest.raises(ConfigError, match=reason) as caught:
        Contents(folder)
    assert "config.json" in str(caught.value)


def test_a_tied_flag_that_contradicts_the_tensors_is_refused(folder):
    config(folder, tie_word_embeddings=True)
    with pytest.raises(DataError, match="differs from the embedding table"):
        Contents(folder)
    found = tensors(folder)
    safetensors.numpy.save_file(
        found | {"lm_head.weight": found["model.embed_tokens.weight"]}, folder / "model.safetensors"
    )
    assert Contents(folder).model.head.tied
    config(folder, tie_word_embeddings=False)
    del found["lm_head.weight"]
    safetensors.numpy.save_file(found, folder / "model.safetensors")
    with pytest.raises(DataError, match="no file holds lm_head.weight"):
        Contents(folder)


WRAPPERS = {
    "llava": ("language_model.model.", "language_model.lm_head.", "text_config"),
    "gemma3": ("model.language_model.", "lm_head.", "text_config"),
    "idefics3": ("model.text_model.", "lm_head.", "text_config"),
    "internvl_chat": ("language_model.model.", "language_model.lm_head.", "llm_config"),
    "deepseek_vl_v2": ("language.model.", "language.lm_head.", "language_config"),
    "qwen2_5_omni": ("thinker.model.", "thinker.lm_head.", "thinker_config"),
    "qwen2_5_vl": ("model.", "lm_head.", "text_config"),
}
"""How models of pictures and sound name their language model, as they are published."""


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_language_model_inside_a_wrapper_is_read(folder, caplog, kind):
    plain, (body, head, key) = Contents(folder), WRAPPERS[kind]
    inner = json.loads((folder / "config.json").read_text())
    if kind == "qwen2_5_omni":
        inner = {"model_type": "qwen2_5_omni_thinker", "text_config": inner}
    outer = {"architectures": ["Other"], "model_type": kind, key: inner}
    (folder / "config.json").write_text(json.dumps(outer))
    found = {
        name.replace("model.", body, 1).replace("lm_head.", head, 1): array
        for name, array in tensors(folder).items()
    }
    found["visual.patch.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(found, folder / "model.safetensors")
    inside = Contents(folder)
    assert inside.model == plain.model
    assert inside.tensors.keys() == plain.tensors.keys()
    assert "other parts than the language model are passed over: visual (1)" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "of"), [("qwen2_5_vl_text", "qwen2"), ("qwen3_vl_text", "qwen3")]
)
def test_qwens_language_models_of_pictures_are_its_others_with_other_defaults(model_type, of):
    given = json.loads((GOLDENS / of / "config.json").read_text()) | {"architectures": []}
    mapping = FAMILIES[of].read(given, "")
    given["rope_parameters"] |= {"rope_type": "mrope", "mrope_section": [1, 1, 2]}
    given["model_type"] = model_type
    assert FAMILIES[model_type].read(given, "") == mapping
    del given["rms_norm_eps"]
    with pytest.raises(ConfigError, match="rms_norm_eps is missing"):
        FAMILIES[model_type].read(given, "")


def test_ids_outside_of_the_vocabulary_are_told_and_end_what_would_not_end(folder, caplog):
    config(folder, eos_token_id=[500, 501])
    Contents(folder)
    assert "eos_token_id=[500, 501]: the vocabulary has 128 tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"eos_token_id=\[500, 501\] .* would never end"):
        open_model_tokenizer(config_of(str(folder), [])[0], None, folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["folder", "dangling", "loop"])
def test_what_is_no_file_is_not_taken_for_absent(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("nowhere" if kind == "dangling" else name)
    with pytest.raises(DataError, match=f"{name}: is (no file|a link that leads nowhere)"):
        Contents(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rms_norm_eps", 1e300, "must be a number from 1e-30 to 0.1"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e300}, "factor="),
        ("num_attention_heads", "4", "whole number"),
        ("intermediate_size", -1, "from 0"),
        ("eos_token_id", "</s>", "must be the id of a token"),
        ("model_type", 3, "written as text"),
        ("model_type", "qwen3", "contradict each other"),
        ("model_type", "qwen99", "model_type is of no family that is supported.*set it to llama"),
        ("quantization_config", 3, "weights quantized by 3"),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_file_and_key(folder, key, value, says):
    config(folder, **{key: value})
    with pytest.raises(ConfigError, match=f"config.json: .*{says}") as raised:
        Contents(folder)
    assert key in str(raised.value) or key == "quantization_config"


@pytest.mark.parametrize(
    "names",
    [
        {"architectures": ["LlamaForQuestionAnswering"]},
        {"model_type": ...},
    ],
)
def test_one_known_name_of_a_family_is_enough(folder, names):
    config(folder, **names)
    assert Contents(folder).family.model_type == "llama"


def test_kimi_k2_has_a_type_of_its_own():
    published = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    assert of_config(published, FAMILIES, "").model_type == "deepseek_v3"


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        ({"eos_token_id": [1, 2.5]}, ConfigError, "eos_token_id=.*: must be the id"),
        ([], DataError, "is no JSON object"),
    ],
)
def test_generation_settings_that_are_of_another_vocabulary_are_refused(folder, said, error, says):
    (folder / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(error, match=f"generation_config.json: {says}"):
        Contents(folder)


def test_code_and_pickles_are_named_in_capitals_and_in_sub_folders_too(folder):
    (folder / "model.safetensors").unlink()
    (folder / "inner").mkdir()
    for name in ("MODEL.PY", "weights.PT", "inner/config.pkl"):
        (folder / name).write_text("raise SystemExit")
    with pytest.raises(ConfigError, match="never runs what a folder brings") as raised:
        Contents(folder)
    for said in ("MODEL.PY, which is code", "weights.PT, which is pick", "inner/config.pkl, which"):
        assert said in str(raised.value)
