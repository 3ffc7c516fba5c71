"""Weights as PyTorch's quantizing programs pack them, against what these programs make of them:
bitsandbytes and compressed-tensors by scripts/golden/low_bits.py, AWQ and GPTQ by the loops
of AutoAWQ's WQLinear_GEMM.from_linear and AutoGPTQ's QuantLinear.pack, written out again."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from parity import GOLDENS

from maxstack.errors import ConfigError, DataError
from maxstack.hf.binding import bind
from maxstack.hf.contents import Contents, check_tensors
from maxstack.hf.quantization_config import unpacking
from maxstack.models.model import weights_of

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
GROUP = 8
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def tensor(array):
    return SimpleNamespace(
        array=lambda: array, shape=array.shape, dtype=array.dtype, where="here", forget=None
    )


def read(settings, arrays):
    """The weights of a folder of these tensors."""
    found = unpacking(settings, "config.json")({k: tensor(v) for k, v in arrays.items()})
    return {name: each.array() for name, each in found.items()}


def golden(name):
    with np.load(GOLDENS / "low_bits.npz") as file:
        parts = {key: file[key] for key in file if key.startswith(f"{name}/")}
    meant = parts.pop(f"{name}/meant")
    return {f"a.{key.partition('/')[2]}": array for key, array in parts.items()}, meant


def assert_read(settings, arrays, meant):
    found = read(settings, arrays)
    assert [*found] == ["a.weight"]
    np.testing.assert_array_equal(found["a.weight"], meant.astype(BF16))


@pytest.mark.parametrize("name", ["nf4", "nested", "fp4"])
def test_four_bits_of_bitsandbytes(name):
    arrays, meant = golden(name)
    assert_read(BNB, arrays, meant)
    assert read(BNB, arrays)["a.weight"].dtype == BF16


def test_int8_of_bitsandbytes():
    arrays, meant = golden("int8")
    assert_read(BNB, arrays | {"a.weight_format": np.zeros((), np.uint8)}, meant)


@pytest.mark.parametrize("name", ["int-quantized", "float-quantized", "float-tensor"])
def test_eight_bits_of_compressed_tensors(name):
    arrays, meant = golden(name)
    arrays["a.weight_scale"] = arrays["a.weight_scale"].view(BF16)
    if name.startswith("float"):
        arrays["a.weight"] = arrays["a.weight"].view(E4M3)
    strategy = "tensor" if name == "float-tensor" else "channel"
    weights = {"num_bits": 8, "symmetric": True, "strategy": strategy}
    form = name if name != "float-tensor" else "naive-quantized"
    settings = {"quant_method": "compressed-tensors", "format": form}
    settings["config_groups"] = {"group_0": {"weights": weights}}
    found = read(settings, arrays | {"a.input_scale": np.ones(1, np.float32)})
    assert [*found] == ["a.weight"]
    np.testing.assert_array_equal(found["a.weight"].astype(np.float32), meant)


def numbers(rng, out, inputs, bits=4):
    """Numbers, zeros and scales of a matrix [in, out], and the floats that they mean."""
    groups = inputs // GROUP
    codes = rng.integers(0, 1 << bits, (inputs, out))
    zeros = rng.integers(1, 1 << bits, (groups, out))
    scales = rng.uniform(0.01, 0.1, (groups, out)).astype(np.float16)
    return codes, zeros, scales


def awq(rng, out, inputs):
    codes, zeros, scales = numbers(rng, out, inputs)

    def packed(values):
        words = np.zeros((values.shape[0], out // 8), np.uint32)
        for column in range(out // 8):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, column] |= values[:, column * 8 + place].astype(np.uint32) << (i * 4)
        return words.view(np.int32)

    of_input = np.arange(inputs) // GROUP
    meant = (codes - zeros[of_input]).astype(np.float16) * scales[of_input]
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, meant.T


def gptq(rng, out, inputs, bits=4, more=1):
    codes, zeros, scales = numbers(rng, out, inputs, bits)
    each, of_input = 32 // bits, rng.permutation(np.arange(inputs) // GROUP).astype(np.int32)
    rows = np.zeros((inputs // each, out), np.uint32)
    for row in range(inputs):
        rows[row // each] |= codes[row].astype(np.uint32) << (row % each * bits)
    columns = np.zeros((len(zeros), out // each), np.uint32)
    for column in range(out):
        stored = (zeros[:, column] - more).astype(np.uint32)
        columns[:, column // each] |= stored << (column % each * bits)
    meant = scales[of_input] * (codes - zeros[of_input]).astype(np.float16)
    arrays = {"qweight": rows.view(np.int32), "qzeros": columns.view(np.int32), "scales": scales}
    return arrays | {"g_idx": of_input}, meant.T


@pytest.mark.parametrize(
    ("pack", "settings"),
    [
        (awq, AWQ),
        (gptq, GPTQ),
        (lambda *sizes: gptq(*sizes, bits=8), GPTQ | {"bits": 8}),
        (lambda *sizes: gptq(*sizes, more=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    ],
    ids=["awq", "gptq", "gptq of 8 bits", "gptq v2"],
)
def test_a_folder_is_read_as_the_floats_that_it_stands_for(tmp_path, pack, settings):
    rng, held, meant = np.random.default_rng(0), {}, {}
    for name, array in safetensors.numpy.load_file(GOLDENS / "llama/model.safetensors").items():
        if not name.endswith("_proj.weight"):
            held[name] = array
            continue
        module = name.removesuffix("weight")
        parts, meant[name] = pack(rng, *array.shape)
        held |= {f"{module}{part}": np.ascontiguousarray(x) for part, x in parts.items()}
        if settings["quant_method"] == "gptq":
            held[f"{module}bias"] = np.zeros(array.shape[0], np.float16)
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    config = json.loads((GOLDENS / "llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    contents = Contents(tmp_path)
    shapes = {path: leaf.shape for path, leaf in weights_of(contents.model).items()}
    check_tensors(contents, bind(contents.family, contents.model, shapes))
    assert len(meant) == 21
    for name, wanted in meant.items():
        np.testing.assert_array_equal(contents.tensors[name].array(), wanted)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def group(**more):
    """Settings of compressed-tensors with more in their group."""
    weights = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    return INT8 | {"config_groups": {"g": {"targets": ["Linear"], "weights": weights, **more}}}


def weights(**more):
    """Settings with more for the weights of their group."""
    settings = group()
    settings["config_groups"]["g"]["weights"] |= more
    return settings


def test_keys_that_say_nothing_of_weights_are_passed_over():
    more = {"transform_config": {}, "kv_cache_scheme": None, "ignore": ["lm_head"]}
    unpacking(weights(observer="minmax", actorder="weight", zp_dtype=None) | more, "config.json")
    unpacking(GPTQ | {"desc_act": True, "dynamic": None, "meta": {"quantizer": []}}, "config.json")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (AWQ | {"version": "gemv"}, "version='gemv': only 'gemm' is read"),
        (GPTQ | {"bits": 3}, "bits=3: only 2, 4 and 8 are read"),
        (GPTQ | {"dynamic": {"-:.*down": {}}}, "dynamic: not known here"),
        ({"quant_method": "bitsandbytes", "outliers": 1}, "outliers: not known here"),
        ({"quant_method": "mxfp4", "block": 16}, "block: not known here"),
        (INT8 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: not known"),
        (group(zeros=1), r"config_groups.g.zeros: not known here"),
        (weights(block_structure=[2, 2]), "config_groups.g.weights.block_structure: not known"),
        (weights(actorder="group"), "actorder='group': its order is not read"),
        (weights(group_size=128), "group_size=128: only"),
        (FP8 | {"weight_block_size": [0, 128]}, "must be two whole numbers above 0"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2': only 'e4m3' is read"),
        (INT4 | {"config_groups": {}}, "config_groups={}: must say"),
        (INT4 | {"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "num_bits=8"),
        ({"quant_method": "torchao"}, "weights quantized by torchao are not supported; those by"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format='nv"),
    ],
)
def test_what_is_not_read_is_named_with_what_to_do(settings, said):
    with pytest.raises(ConfigError, match=f"{said}.*use the unquantized version of the model"):
        unpacking(settings, "config.json")


def test_shapes_that_do_not_go_together_are_named():
    arrays, _ = awq(np.random.default_rng(0), 16, 16)
    arrays["scales"] = arrays["scales"][:1]
    with pytest.raises(DataError, match=r"in groups of 8 needs zeros and scales of \(2, 2\) and"):
        read(AWQ, {f"a.{name}": array for name, array in arrays.items()})
