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

from maxstack import cli
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

ADAPTERS = parity.GOLDENS / "adapters"
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
    given = {
        "model": {"from": str(parity.GOLDENS / family)},
        "data": {"sources": [{"kind": "synthetic", "vocab": 2}], "seq_len": 16},
        "lora": lora,
    }
    cfg = load(given, ["model.dtype=float32"])
    run = assemble(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    rng, names = np.random.default_rng(0), ("lora_a", "lora_b", "magnitude")
    leaves = {
        path: rng.normal(size=leaf.shape).astype(np.float32)
        for path, leaf in run.weights.shapes.items()
        if path.endswith(names)
    }
    plain = nnx.traversals.flatten_mapping(
        parity.model_and_params(parity.GOLDENS / family)[2], sep="/"
    )
    weights = {
        path: np.asarray(leaf) for path, leaf in run.weights.add_adapters(plain).items()
    } | leaves
    return (
        run,
        weights,
        bind(
            Contents(parity.GOLDENS / family).family,
            cfg.model,
            {path: leaf.shape for path, leaf in run.weights.original.items()},
        ),
    )


def written(folder, family: str, lora: dict):
    run, weights, bound = trained(family, lora)
    folder.mkdir()
    adapted = {path: place.contract for path, place in run.weights.rewrite.adapted.items()}
    peft.write(
        folder,
        run.cfg.lora,
        adapted,
        bound,
        weights.__getitem__,
        lambda path: run.weights.rewrite.base_weight(path, weights),
        family,
    )
    return run, weights, bound, adapted


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
    ours = {
        path: leaf
        for path, leaf in weights.items()
        if path.endswith(("lora_a", "lora_b", "magnitude"))
    }
    shapes = {path: leaf.shape for path, leaf in ours.items()}
    for path, leaf in peft.read(
        Adapter(tmp_path / "adapter"), run.cfg.lora, adapted, bound, shapes
    ).items():
        np.testing.assert_array_equal(leaf, ours[path], err_msg=path)
    merge(
        parity.GOLDENS / family,
        Adapter(tmp_path / "adapter"),
        tmp_path / "merged",
        1,
        lambda size: None,
    )
    merged = nnx.traversals.flatten_mapping(
        parity.model_and_params(tmp_path / "merged")[2], sep="/"
    )
    for path in run.weights.original:
        leaf = np.asarray(run.weights.rewrite.original(path, weights))
        np.testing.assert_allclose(leaf, merged[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_an_adapter_that_peft_would_take_for_that_of_an_expert_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match="takes an adapter of model.layers.0.mlp.shared_expert.gate_proj for one of the "
        "experts; merge it",
    ):
        written(tmp_path / "adapter", "qwen3_next", {"rank": 2})


def test_a_learned_table_of_positions_is_exported_with_its_own_length_not_that_of_rows(tmp_path):
    run, weights, _ = trained("gpt2", {"rank": 2})
    merged = {path: run.weights.rewrite.original(path, weights) for path in run.weights.original}
    export(
        run.cfg.model,
        {path: leaf.shape for path, leaf in merged.items()},
        lambda path: np.asarray(merged[path]),
        tmp_path / "out",
        length=16,
    )
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["max_position_embeddings"] == run.cfg.model.positions > 16


def test_what_was_merged_is_taken_out_again_but_not_dora(tmp_path, capsys):
    given = ["--adapter", str(ADAPTERS / "lora-llama")]
    assert (
        cli.main(
            [
                "lora",
                "merge",
                str(parity.GOLDENS / "llama"),
                *given,
                "--out",
                str(tmp_path / "merged"),
            ]
        )
        == 0
    )
    assert (
        cli.main(
            ["lora", "unmerge", str(tmp_path / "merged"), *given, "--out", str(tmp_path / "again")]
        )
        == 0
    )
    folders = parity.GOLDENS / "llama", tmp_path / "merged", tmp_path / "again"
    before, merged, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert {name for name in before if not np.array_equal(before[name], merged[name])} == {
        name for name in before if "_proj" in name
    }
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    dora = ["--adapter", str(ADAPTERS / "dora-qwen3"), "--out", str(tmp_path / "no")]
    assert cli.main(["lora", "unmerge", str(parity.GOLDENS / "qwen3"), *dora]) == 1
    assert "is DoRA, whose merging forgets" in capsys.readouterr().err


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
    shutil.copytree(ADAPTERS / "lora-llama", tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said | change))
    with pytest.raises(ConfigError, match=says):
        Adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: None, "has no model.layers.0.self_attn.q_proj.lora_B.weight; save"),
        (lambda b: b[:, :2], r"lora_A \[4, \d+\] and lora_B \[\d+, 2\]"),
    ],
)
def test_an_adapter_whose_matrices_are_no_pair_is_refused(change, says, tmp_path):
    shutil.copytree(ADAPTERS / "lora-llama", tmp_path / "adapter")
    file, name = (
        tmp_path / "adapter" / "adapter_model.safetensors",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
    )
    given = (tensors := load_file(file)) | {name: change(tensors[name])}
    save_file(
        {key: np.ascontiguousarray(leaf) for key, leaf in given.items() if leaf is not None}, file
    )
    with pytest.raises(ConfigError, match=says):
        Adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora_alpha": 7}, "was trained otherwise; set lora.alpha=7"),
        ({"peft_type": "IA3"}, "peft_type IA3 is not LORA"),
        ({"bias": "all"}, "bias='all' in adapter_config.json is not supported"),
        ("file", "cannot be read as an adapter of PEFT"),
        ("rank", "was trained otherwise; set lora.rank=4$"),
        (
            "more",
            r"was trained otherwise; set lora.rslora=true, "
            r"lora.targets=\[blocks/block/mixer/.*, blocks/block/mlp/down, .*\]",
        ),
        (
            "less",
            "has no adapter of model.layers.0.self_attn.q_proj, though target_modules in "
            r"adapter_config.json names it \(1 are missing\)",
        ),
    ],
)
def test_an_adapter_that_is_another_is_refused_by_name(change, says, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(ADAPTERS / "lora-llama", folder)
    lora = {
        "rank": 2 if change == "rank" else 4,
        "alpha": 6.0,
        **({"targets": [".*/mixer"]} if change == "more" else {}),
    }
    if isinstance(change, dict):
        said = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(said | change))
    if change == "more":
        said = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(said | {"use_rslora": True}))
    if change == "file":
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    if change == "less":
        save_file(
            {
                name: leaf
                for name, leaf in load_file(folder / "adapter_model.safetensors").items()
                if "layers.0.self_attn.q_proj" not in name
            },
            folder / "adapter_model.safetensors",
        )
    run, weights, *_ = trained("llama", lora)
    with pytest.raises(ConfigError, match=says):
        run.weights.with_adapter(weights, str(folder))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is of another model: .* has no model.layers.0"):
        merge(
            parity.GOLDENS / "gpt2",
            Adapter(ADAPTERS / "lora-llama"),
            tmp_path / "merged",
            1,
            lambda size: None,
        )
    with pytest.raises(ConfigError, match="is of another model"):
        adapt_run(
            assemble_model(str(parity.GOLDENS / "gpt2"), FLOAT)[0], str(ADAPTERS / "lora-llama")
        )


def test_an_adapter_without_all_modules_that_it_names_is_not_merged(tmp_path):
    shutil.copytree(ADAPTERS / "lora-llama", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if "layers.1.mlp.up" not in name}, file)
    base = parity.GOLDENS / "llama"
    with pytest.raises(ConfigError, match=r"has no adapter of model.layers.1.mlp.up_proj, though"):
        merge(base, Adapter(tmp_path / "adapter"), tmp_path / "merged", 1, lambda size: None)


def test_an_adapter_or_a_model_that_is_not_finite_is_not_merged(tmp_path, capsys):
    adapter = parity.poisoned(ADAPTERS / "lora-llama", tmp_path / "adapter", np.inf, TENSORS)
    model = parity.poisoned(parity.GOLDENS / "llama", tmp_path / "model", np.nan)
    intact = (str(parity.GOLDENS / "llama"), str(ADAPTERS / "lora-llama"))
    for folder, beside, name in (
        (intact[0], tmp_path / "adapter", adapter),
        (tmp_path / "model", intact[1], model),
    ):
        command = ["lora", "merge", str(folder), "--adapter", str(beside), "--out"]
        assert cli.main([*command, str(tmp_path / "out")]) == 2
        assert f"tensor {name}: " in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main([*command, str(tmp_path / "out"), "--allow-nonfinite"]) == 0
    shutil.copytree(intact[1], large := tmp_path / "large")
    pairs = {name: tensor * 1e30 for name, tensor in load_file(large / TENSORS).items()}
    save_file(pairs, large / TENSORS)
    command = ["lora", "merge", intact[0], "--adapter", str(large), "--out", str(tmp_path / "no")]
    assert cli.main(command) == 2
    assert f"{large}: merged into {intact[0]}" in capsys.readouterr().err


def test_tensors_that_are_no_pairs_of_matrices_are_named(tmp_path):
    name = "lora_embedding_A"
    shutil.copytree(ADAPTERS / "lora-llama", tmp_path / "adapter")
    save_file({f"model.embed_tokens.{name}": np.ones((2, 8))}, tmp_path / "adapter" / TENSORS)
    with pytest.raises(ConfigError, match=f"but model.embed_tokens.{name}; save the adapter"):
        Adapter(tmp_path / "adapter")


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
    adapter = Adapter(tmp_path / "adapter")
    merge(parity.GOLDENS / "gpt2", adapter, tmp_path / "merged", 1, lambda size: None)
    merge(tmp_path / "merged", adapter, tmp_path / "again", -1, lambda size: None)
    folders = parity.GOLDENS / "gpt2", tmp_path / "merged", tmp_path / "again"
    before, merged, again = (load_file(folder / "model.safetensors") for folder in folders)
    a, b = pair.values()
    changed = merged[f"{name}.weight"] - before[f"{name}.weight"]
    np.testing.assert_allclose(changed, 3 * a.T @ b.T, atol=1e-5)
    np.testing.assert_allclose(again[f"{name}.weight"], before[f"{name}.weight"], atol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "change", "says"),
    [
        ("dora-qwen3", {"use_dora": False}, "holds .*lora_magnitude_vector, which is no part"),
        ("lora-llama", {"bias": "none", "extra": "lora_B.bias"}, "holds .*lora_B.bias"),
        ("lora-llama", {"rank_pattern": {"q_proj": 2}}, "q_proj has 4 rows, .* says rank 2"),
    ],
)
def test_an_adapter_whose_settings_contradict_its_tensors_is_refused(
    adapter, change, says, tmp_path
):
    shutil.copytree(ADAPTERS / adapter, tmp_path / "adapter")
    if extra := change.pop("extra", None):
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{extra}"
        held = load_file(tmp_path / "adapter" / TENSORS) | {name: np.ones(32, np.float32)}
        save_file(held, tmp_path / "adapter" / TENSORS)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said | change))
    with pytest.raises(ConfigError, match=says):
        Adapter(tmp_path / "adapter")
