"""Adapters in PEFT's format: those that peft made compute here what they do there, and ours are
read, merged and told as what they are."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from maxstack.errors import ConfigError
from maxstack.hf import peft
from maxstack.hf.adapter import TENSORS, Adapter
from maxstack.hf.binding import bind
from maxstack.hf.contents import Contents
from maxstack.hf.export import export
from maxstack.hf.merge import merge
from maxstack.inference.trained_model import adapt_run, add_adapter, assemble_model, open_model
from maxstack.load import load
from maxstack.run import assemble
from maxstack.sharding import make_mesh
from maxstack.state import flat

ADAPTERS = parity.GOLDENS / "adapters"
OWN = "lora_a", "lora_b", "magnitude"
FLOAT = ["model.dtype=float32", "mesh.fsdp=1", "mesh.data=8"]


def logits(run, params, golden):
    """[B, T, V] of the model of a run."""
    real = np.arange(golden["tokens"].shape[1]) < golden["lengths"][:, None]
    batch = {
        "tokens": jnp.asarray(golden["tokens"]),
        "positions": jnp.where(real, np.arange(real.shape[1]), 0),
        "segments": jnp.asarray(real, jnp.int32),
    }

    def of(params):
        model = nnx.merge(run.graph, nnx.State(params))
        return model.logits(model.hidden(batch))

    return np.where(real[:, :, None], np.asarray(jax.jit(of)(params)), 0.0)


def far(found, wanted):
    return float(np.abs(found - wanted).max() / wanted.std())


@pytest.mark.parametrize("name", sorted(path.name for path in ADAPTERS.iterdir()))
@pytest.mark.slow
def test_an_adapter_of_peft_computes_what_it_does_there(name):
    golden = np.load(ADAPTERS / name / "golden.npz")
    run, params = open_model(str(parity.GOLDENS / name.partition("-")[2]), FLOAT)
    assert far(logits(run, params, golden), golden["logits"]) > 0.1
    adapted = adapt_run(run, str(ADAPTERS / name))
    beside = add_adapter(adapted, params, str(ADAPTERS / name))
    assert far(logits(adapted, beside, golden), golden["logits"]) < parity.LOGITS
    assert beside["embed"] is params["embed"]  # no second base


def trained(family: str, lora: dict):
    """A run of a golden folder with random adapters: its configuration, weights by path, and its
    family's tensors."""
    folder = parity.GOLDENS / family
    source = {"kind": "synthetic", "vocab": 2}
    data = {"sources": [source], "seq_len": 16}
    cfg = load(
        {"model": {"from": str(folder)}, "data": data, "lora": lora}, ["model.dtype=float32"]
    )
    run = assemble(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    plain, rng = flat(parity.model_and_params(folder)[2]), np.random.default_rng(0)
    weights = {path: np.asarray(leaf) for path, leaf in run.weights.add_adapters(plain).items()}
    for path, leaf in run.weights.shapes.items():
        if path.endswith(OWN):
            weights[path] = rng.normal(size=leaf.shape).astype(np.float32)
    shapes = {path: leaf.shape for path, leaf in run.weights.original.items()}
    return run, weights, bind(Contents(folder).family, cfg.model, shapes)


def written(folder, family: str, lora: dict):
    run, weights, bound = trained(family, lora)
    rewrite = run.weights.rewrite
    folder.mkdir()
    adapted = {path: place.contract for path, place in rewrite.adapted.items()}

    def base(path):
        return rewrite.base_weight(path, weights)

    peft.write(folder, run.cfg.lora, adapted, bound, weights.__getitem__, base, family)
    return run, weights, bound, adapted


def merged_with(base, adapter, out, sign=1):
    merge(base, Adapter(adapter), out, sign, lambda size: None)
    return out


def copied(name, folder, **settings):
    """A golden adapter, with other settings; its folder and tensors."""
    shutil.copytree(ADAPTERS / name, folder)
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(said | settings))
    return folder, load_file(folder / TENSORS)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {"rank": 3}),
        ("phi3", {"rank": 2, "dora": True, "rslora": True}),
        ("gpt2", {"rank": 2}),
        pytest.param(
            "qwen3_next", {"rank": 2, "dora": True, "targets": [".*/mixer"]}, marks=pytest.mark.slow
        ),
        pytest.param("gemma3", {"targets": [".*/query", ".*/mlp"]}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_adapter_of_ours_is_read_back_and_merges_alike_in_both_layouts(family, lora, tmp_path):
    run, weights, bound, adapted = written(tmp_path / "adapter", family, lora)
    ours = {path: leaf for path, leaf in weights.items() if path.endswith(OWN)}
    shapes = {path: leaf.shape for path, leaf in ours.items()}
    found = peft.read(Adapter(tmp_path / "adapter"), run.cfg.lora, adapted, bound, shapes)
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, ours[path], err_msg=path)
    folder = merged_with(parity.GOLDENS / family, tmp_path / "adapter", tmp_path / "merged")
    merged = flat(parity.model_and_params(folder)[2])
    for path in run.weights.original:
        leaf = np.asarray(run.weights.rewrite.original(path, weights))
        np.testing.assert_allclose(leaf, merged[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_an_adapter_that_peft_would_take_for_that_of_an_expert_is_refused(tmp_path):
    module = "model.layers.0.mlp.shared_expert.gate_proj"
    said = f"takes an adapter of {module} for one of the experts; merge it"
    with pytest.raises(ConfigError, match=said):
        written(tmp_path / "adapter", "qwen3_next", {"rank": 2})


def test_a_learned_table_of_positions_is_exported_with_its_own_length_not_that_of_rows(tmp_path):
    run, weights, _ = trained("gpt2", {"rank": 2})
    merged = {
        path: np.asarray(run.weights.rewrite.original(path, weights))
        for path in run.weights.original
    }
    shapes = {path: leaf.shape for path, leaf in merged.items()}
    export(run.cfg.model, shapes, merged.get, tmp_path / "out", length=16)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["max_position_embeddings"] == run.cfg.model.positions > 16


def test_what_was_merged_is_taken_out_again_but_not_dora(tmp_path, maxstack):
    base, adapter = parity.GOLDENS / "llama", ADAPTERS / "lora-llama"
    out, again = tmp_path / "merged", tmp_path / "again"
    maxstack(f"lora merge {base} --adapter {adapter} --out {out}")
    maxstack(f"lora unmerge {out} --adapter {adapter} --out {again}")
    before, merged, after = (
        load_file(folder / "model.safetensors") for folder in (base, out, again)
    )
    assert {name for name in before if not np.array_equal(before[name], merged[name])} == {
        name for name in before if "_proj" in name
    }
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    words = f"--adapter {ADAPTERS / 'dora-qwen3'} --out {tmp_path / 'no'}"
    said = maxstack(f"lora unmerge {parity.GOLDENS / 'qwen3'} {words}", code=1)
    assert "is DoRA, whose merging forgets" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(
            (
                {"init_lora_weights": init},
                f"init_lora_weights='{init}' .* peft changes the base's weights",
            )
            for init in ("pissa", "pissa_niter_4", "corda", "olora", "loftq")
        ),
        *(
            ({key: value}, f"{key}=.* in adapter_config.json is not supported")
            for key, value in (
                ("alora_invocation_tokens", [5, 6]),
                ("use_qalora", True),
                ("use_bdlora", {"nblocks": 2}),
                ("kasa_config", {"beta": 1e-4}),
            )
        ),
        ({"r": None}, "r=None in adapter_config.json is not a whole number"),
        ({"lora_alpha": 0}, "lora_alpha=0 .* is not a number of more than 0"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "alpha_pattern.q_proj=1e.300"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj='x'"),
        (
            {"use_dora": True},
            "adapter_model.safetensors has no model.layers.0.mlp.down_proj.lora_magnitude_vector",
        ),
    ],
)
def test_an_adapter_that_says_what_we_do_not_know_is_refused_by_name(change, says, tmp_path):
    folder, _ = copied("lora-llama", tmp_path / "adapter", **change)
    with pytest.raises(ConfigError, match=says):
        Adapter(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: None, "has no model.layers.0.self_attn.q_proj.lora_B.weight; save"),
        (lambda b: b[:, :2], r"lora_A \[4, \d+\] and lora_B \[\d+, 2\]"),
    ],
)
def test_an_adapter_whose_matrices_are_no_pair_is_refused(change, says, tmp_path):
    folder, tensors = copied("lora-llama", tmp_path / "adapter")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: np.ascontiguousarray(changed)}
    save_file(tensors, folder / TENSORS)
    with pytest.raises(ConfigError, match=says):
        Adapter(folder)


@pytest.mark.parametrize(
    ("settings", "lora", "says"),
    [
        ({"lora_alpha": 7}, {}, "was trained otherwise; set lora.alpha=7"),
        ({"peft_type": "IA3"}, {}, "peft_type IA3 is not LORA"),
        ({"bias": "all"}, {}, "bias='all' in adapter_config.json is not supported"),
        ({}, {"rank": 2}, "was trained otherwise; set lora.rank=4$"),
        (
            {"use_rslora": True},
            {"targets": [".*/mixer"]},
            r"was trained otherwise; set lora.rslora=true, "
            r"lora.targets=\[blocks/block/mixer/.*, blocks/block/mlp/down, .*\]",
        ),
    ],
)
def test_an_adapter_that_is_another_is_refused_by_name(settings, lora, says, tmp_path):
    folder, _ = copied("lora-llama", tmp_path / "adapter", **settings)
    run, weights, *_ = trained("llama", {"rank": 4, "alpha": 6.0} | lora)
    with pytest.raises(ConfigError, match=says):
        run.weights.with_adapter(weights, str(folder))


def test_an_adapter_that_is_no_file_of_tensors_or_lacks_some_is_refused(tmp_path):
    folder, tensors = copied("lora-llama", tmp_path / "adapter")
    run, weights, *_ = trained("llama", {"rank": 4, "alpha": 6.0})
    missing = "model.layers.0.self_attn.q_proj"
    save_file({name: tensors[name] for name in tensors if missing not in name}, folder / TENSORS)
    said = rf"has no adapter of {missing}, though target_modules in adapter_config.json names it "
    with pytest.raises(ConfigError, match=said + r"\(1 are missing\)"):
        run.weights.with_adapter(weights, str(folder))
    with pytest.raises(ConfigError, match=f"has no adapter of {missing}, though"):
        merged_with(parity.GOLDENS / "llama", folder, tmp_path / "merged")
    (folder / TENSORS).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as an adapter of PEFT"):
        run.weights.with_adapter(weights, str(folder))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    base, adapter = parity.GOLDENS / "gpt2", ADAPTERS / "lora-llama"
    with pytest.raises(ConfigError, match="is of another model: .* has no model.layers.0"):
        merged_with(base, adapter, tmp_path / "merged")
    with pytest.raises(ConfigError, match="is of another model"):
        adapt_run(assemble_model(str(base), FLOAT)[0], str(adapter))


def test_an_adapter_or_a_model_that_is_not_finite_is_not_merged(tmp_path, maxstack):
    base, own, out = parity.GOLDENS / "llama", ADAPTERS / "lora-llama", tmp_path / "out"
    odd, model = tmp_path / "adapter", tmp_path / "model"
    for folder, beside, name in (
        (base, odd, parity.poisoned(own, odd, np.inf, TENSORS)),
        (model, own, parity.poisoned(base, model, np.nan)),
    ):
        command = f"lora merge {folder} --adapter {beside} --out {out}"
        assert f"tensor {name}: " in maxstack(command, code=2) and not out.exists()
    maxstack(f"{command} --allow-nonfinite")
    large, tensors = copied("lora-llama", tmp_path / "large")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, large / TENSORS)
    said = maxstack(f"lora merge {base} --adapter {large} --out {tmp_path / 'no'}", code=2)
    assert f"{large}: merged into {base}" in said


def test_tensors_that_are_no_pairs_of_matrices_are_named(tmp_path):
    name = "model.embed_tokens.lora_embedding_A"
    folder, _ = copied("lora-llama", tmp_path / "adapter")
    save_file({name: np.ones((2, 8))}, folder / TENSORS)
    with pytest.raises(ConfigError, match=f"but {name}; save the adapter"):
        Adapter(folder)


@pytest.mark.parametrize("said", [True, False])
def test_a_square_matrix_is_merged_as_the_model_has_it_whatever_fan_in_fan_out_says(said, tmp_path):
    """peft writes false for GPT-2 beside a head, and computes x W with W [inputs, outputs]."""
    rng, name = np.random.default_rng(0), "transformer.h.1.attn.c_proj"
    pair = {
        f"base_model.model.{name}.lora_A.weight": rng.normal(size=(2, 16)).astype(np.float32),
        f"base_model.model.{name}.lora_B.weight": rng.normal(size=(16, 2)).astype(np.float32),
    }
    (tmp_path / "adapter").mkdir()
    save_file(pair, tmp_path / "adapter" / TENSORS)
    words = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "fan_in_fan_out": said}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(words))
    adapter = tmp_path / "adapter"
    out = merged_with(parity.GOLDENS / "gpt2", adapter, tmp_path / "merged")
    folders = parity.GOLDENS / "gpt2", out, merged_with(out, adapter, tmp_path / "again", -1)
    before, merged, again = (load_file(folder / "model.safetensors") for folder in folders)
    a, b = pair.values()
    changed = merged[f"{name}.weight"] - before[f"{name}.weight"]
    np.testing.assert_allclose(changed, 3 * a.T @ b.T, atol=1e-5)
    np.testing.assert_allclose(again[f"{name}.weight"], before[f"{name}.weight"], atol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "settings", "extra", "says"),
    [
        (
            "dora-qwen3",
            {"use_dora": False},
            None,
            "holds .*lora_magnitude_vector, which is no part",
        ),
        ("lora-llama", {"bias": "none"}, "lora_B.bias", "holds .*lora_B.bias"),
        ("lora-llama", {"rank_pattern": {"q_proj": 2}}, None, "q_proj has 4 rows, .* says rank 2"),
    ],
)
def test_an_adapter_whose_settings_contradict_its_tensors_is_refused(
    adapter, settings, extra, says, tmp_path
):
    folder, tensors = copied(adapter, tmp_path / "adapter", **settings)
    if extra:
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{extra}"
        save_file(tensors | {name: np.ones(32, np.float32)}, folder / TENSORS)
    with pytest.raises(ConfigError, match=says):
        Adapter(folder)
