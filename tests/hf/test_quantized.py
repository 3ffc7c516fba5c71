"""Weights in low precision are read as the floats that they stand for: MXFP4, fp8, int4."""

import json
import math
import shutil
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from parity import GOLDENS, loaded

from maxstack.errors import ConfigError, DataError
from maxstack.hf.binding import bind
from maxstack.hf.contents import Contents
from maxstack.hf.families import FAMILIES
from maxstack.hf.folder import Folder
from maxstack.hf.merge import merge
from maxstack.hf.packed_weights import E2M1
from maxstack.load import load
from maxstack.models.model import abstract
from maxstack.schema.decoder import DecoderConfig

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
BLOCK, GROUP = (16, 8), 8
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [*BLOCK],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}


def fp8(weight, block=BLOCK):
    """The tensors of a weight in e4m3 with a scale a block, and what they mean, block by block."""
    grid = [range(0, size, step) for size, step in zip(weight.shape, block, strict=True)]
    codes, meant = np.empty(weight.shape, E4M3), np.empty(weight.shape, np.float32)
    scales = np.empty([len(starts) for starts in grid], np.float32)
    for i, row in enumerate(grid[0]):
        for j, column in enumerate(grid[1]):
            cut = slice(row, row + block[0]), slice(column, column + block[1])
            scales[i, j] = np.abs(weight[cut]).max() / 448
            codes[cut] = (weight[cut] / scales[i, j]).astype(E4M3)
            meant[cut] = codes[cut].astype(np.float32) * scales[i, j]
    return {"": codes, "_scale_inv": scales}, meant


def int4(weight, group=GROUP):
    """The tensors of a weight in int4 with a scale a group, and what they mean, by number."""
    out, size = weight.shape
    words = np.zeros((out, math.ceil(size / 8)), np.uint32)
    scales = np.empty((out, math.ceil(size / group)), BF16)
    meant = np.empty(weight.shape, BF16)
    for row in range(out):
        for i in range(size):
            scale = np.abs(weight[row, i // group * group : (i // group + 1) * group]).max() / 7
            scales[row, i // group] = scale
            number = int(np.clip(np.round(weight[row, i] / scale), -8, 7))
            words[row, i // 8] |= np.uint32((number + 8) << 4 * (i % 8))
            meant[row, i] = BF16(number * float(scales[row, i // group]))
    return {
        "_packed": words.view(np.int32),
        "_scale": scales,
        "_shape": np.array([out, size], np.int32),
    }, meant


FORMATS = {
    "fp8": ("deepseek_v3", fp8, FP8, "_proj.weight"),
    "int4": ("kimi_k2", int4, COMPRESSED, ".experts."),
}


def quantized(folder, name, change=lambda held: None):
    """A golden with its large weights quantized, the others in bfloat16, and then a change to its
    tensors; -> what they mean."""
    golden, quantize, said, which = FORMATS[name]
    held, meant = {}, {}
    for tensor, weight in safetensors.numpy.load_file(
        GOLDENS / golden / "model.safetensors"
    ).items():
        if which in tensor and "mlp.shared" not in tensor:
            parts, meant[tensor] = quantize(weight)
            held |= {tensor + part: array for part, array in parts.items()}
        else:
            held[tensor] = meant[tensor] = weight.astype(BF16)
    change(held)
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    described = json.loads((GOLDENS / golden / "config.json").read_text())
    described |= {"quantization_config": said, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described))
    return meant


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_import_and_export_give_the_numbers_in_bfloat16_and_no_quantization(
    tmp_path, name, maxstack
):
    meant, run, out = quantized(tmp_path / "source", name), tmp_path / "run", tmp_path / "out"
    maxstack(f"import {tmp_path / 'source'} --out {run}")
    maxstack(f"export {run} --out {out}")
    described = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in described and described["dtype"] == "bfloat16"
    found = safetensors.numpy.load_file(out / "model.safetensors")
    assert found.keys() == meant.keys()
    for tensor, values in meant.items():
        assert found[tensor].dtype == BF16
        np.testing.assert_array_equal(found[tensor], values.astype(BF16), tensor)


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_begins_on_the_weights_of_the_same_folder_in_floats(tmp_path, name):
    floats = tmp_path / "floats"
    floats.mkdir()
    safetensors.numpy.save_file(quantized(tmp_path / "hf", name), floats / "model.safetensors")
    shutil.copyfile(GOLDENS / FORMATS[name][0] / "config.json", floats / "config.json")
    data = {"sources": [{"kind": "synthetic", "vocab": 128}], "seq_len": 16}
    described = {"from": str(tmp_path / "hf"), "param_dtype": "float32"}
    model = load({"model": described, "data": data}).model
    assert model.dtype == "bfloat16"
    wanted = nnx.to_pure_dict(abstract(model)[1])
    found, meant = (loaded(folder, wanted) for folder in (tmp_path / "hf", floats))
    jax.tree.map(np.testing.assert_array_equal, found, meant)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("fp8", (300, 260), (128, 128)),
        ("fp8", (5, 3), (128, 128)),
        ("int4", (7, 96), 32),
        ("int4", (3, 40), 16),
    ],
)
def test_edges_that_are_no_whole_blocks(tmp_path, name, shape, size):
    _, quantize, said, _ = FORMATS[name]
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    parts, meant = quantize(weight, size)
    held = {f"x.weight{part}": array for part, array in parts.items()}
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    groups = {"all": {"weights": INT4 | {"group_size": size}}}
    own = {"weight_block_size": size} if name == "fp8" else {"config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said | own}))
    tensor = Folder(tmp_path).tensors()["model.x.weight"]
    assert tensor.shape == shape
    np.testing.assert_array_equal(tensor.array(), meant)
    np.testing.assert_array_equal(tensor.array(2), meant[2])


GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"


SCALES = f"{GATE}_scale_inv"


@pytest.mark.parametrize(
    ("name", "tensor", "value", "says"),
    [
        ("fp8", SCALES, None, f"tensor {GATE}: is float8_e4m3fn without its scales {SCALES}"),
        ("fp8", GATE, None, f"tensor {SCALES}: is of no use without {GATE}"),
        (
            "fp8",
            SCALES,
            np.ones((1, 1), np.float32),
            rf"{SCALES}: is float32 \[1, 1\]; weight_block_size \[16, 8\] in config.json, "
            r"on a weight \[8, 16\], needs float32 or bfloat16 or float16 \[1, 2\]",
        ),
        (
            "fp8",
            GATE,
            np.ones((8, 16), BF16),
            rf"{GATE}: is bfloat16 \[8, 16\], and .* scales float8_e4m3fn",
        ),
        (
            "fp8",
            SCALES,
            np.full((1, 2), np.inf, np.float32),
            f"{SCALES}: holds a number that is not finite",
        ),
        (
            "fp8",
            SCALES,
            np.float32([[1, -0.5]]),
            f"{SCALES}: holds -0.5, and no scale of float8_e4m3fn is negative",
        ),
        ("int4", f"{GATE}_scale", None, f"{GATE}_packed: is of no use without {GATE}_scale"),
        (
            "int4",
            f"{GATE}_shape",
            np.array([16, 8], np.int32),
            rf"{GATE}_shape: says \[16, 8\], and the numbers are of \[8, 16\]",
        ),
        (
            "int4",
            f"{GATE}_scale",
            np.ones((8, 4), BF16),
            rf"{GATE}_scale: is bfloat16 \[8, 4\]; group_size 8",
        ),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_named(tmp_path, name, tensor, value, says):
    def change(held):
        held.pop(tensor)
        held |= {} if value is None else {tensor: value}

    quantized(tmp_path, name, change)
    with pytest.raises(DataError, match=says):
        Contents(tmp_path).tensors[GATE].array()


@pytest.mark.parametrize(
    ("name", "module"),
    [("fp8", "model.layers.0.mlp.up_proj"), ("int4", "model.layers.1.mlp.experts.0.up_proj")],
)
def test_an_adapter_is_not_merged_into_codes(tmp_path, name, module):
    quantized(tmp_path / "hf", name)
    adapter = SimpleNamespace(modules=[module], has_tables=False, dora=False, folder="adapter")
    with pytest.raises(ConfigError, match=f"keeps {module}.weight quantized by .*maxstack import"):
        merge(tmp_path / "hf", adapter, tmp_path / "out", 1, lambda count: None)


def mxfp4(shape, rng):
    """Blocks and scales of a tensor [experts, in, out], and what they mean."""
    experts, size, out = shape
    codes = rng.integers(0, 16, (experts, out, size // 32, 32), dtype=np.uint8)
    scales = rng.integers(120, 130, (experts, out, size // 32), dtype=np.uint8)
    meant = E2M1[codes] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
    return (
        codes[..., ::2] | (codes[..., 1::2] << 4),
        scales,
        meant.reshape(experts, out, size).swapaxes(1, 2),
    )


def test_mxfp4_experts_are_unpacked(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "layer_types": None,
    }
    config = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text()) | sizes
    model = DecoderConfig.model_validate(FAMILIES["gpt_oss"].read(config, ""))
    wanted = nnx.to_pure_dict(abstract(model)[1])
    flat = nnx.traversals.flatten_mapping(wanted, sep="/")
    bound = bind(FAMILIES["gpt_oss"], model, {path: leaf.shape for path, leaf in flat.items()})
    found, meant = {}, {}
    for tensor in bound:
        if tensor.name.endswith("_proj") and "experts" in tensor.name:
            blocks, scales, meant[tensor.name] = mxfp4(tensor.shape, rng)
            found |= {f"{tensor.name}_blocks": blocks, f"{tensor.name}_scales": scales}
        else:
            found[tensor.name] = rng.standard_normal(tensor.shape).astype(np.float32)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    safetensors.numpy.save_file(found, tmp_path / "model.safetensors")
    contents = Contents(tmp_path)
    params = loaded(contents, wanted)
    for layer, name in enumerate(contents.model.order):
        experts = jax.tree.map(np.asarray, params["blocks"][name]["mlp"])
        fused = meant[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(experts["gate"][0], fused[..., ::2])
        np.testing.assert_array_equal(experts["up"][0], fused[..., 1::2])
        np.testing.assert_array_equal(
            experts["down"][0], meant[f"model.layers.{layer}.mlp.experts.down_proj"]
        )
