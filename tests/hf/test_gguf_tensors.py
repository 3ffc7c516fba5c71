"""GGUF files beside the folders that they were made of."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from gguf_files import ARCHITECTURES, write_gguf

from maxstack.data.gguf.file import GgufFile
from maxstack.hf.contents import Contents
from maxstack.hf.family import canonical_form
from maxstack.hf.reader import pieces_of
from maxstack.layers.rope import attention_factor, frequencies
from maxstack.models.model import weights_of

FOLDERS = {
    file.parent.name: file.parent
    for file in sorted((Path(__file__).parents[1] / "goldens").glob("*/config.json"))
    if json.loads(file.read_text()).get("model_type") in ARCHITECTURES
}
Q8_0 = GGMLQuantizationType.Q8_0
KINDS = [
    *(
        GGMLQuantizationType[name]
        for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K".split()
    ),
    *(kind for kind in GGMLQuantizationType if kind.name[:2] in ("Q6", "IQ", "TQ", "MX")),
]
# What llama.cpp computes whatever a folder says.
FIXED = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8},
    "gpt_oss": {"swiglu_limit": 7.0},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))


def without_ropes(model):
    """The model in canonical form, and its frequencies with their factors."""
    form, ropes = canonical_form(model), []
    for layer, name in zip(form["layers"], model.order, strict=True):
        mixer = model.blocks[name].mixer
        ropes += [*frequencies(mixer.rope, mixer.head_dim), attention_factor(mixer.rope)]
        layer["mixer"] = {key: value for key, value in layer["mixer"].items() if key != "rope"}
    return form, np.hstack(ropes)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_gguf_file_is_the_folder_that_it_was_made_of(name, tmp_path):
    folder = FOLDERS[name]
    file = write_gguf(tmp_path / f"{name}.gguf", folder)
    ours, theirs = Contents(file), Contents(folder)
    mapping = theirs.family.read(theirs.folder.config | FIXED.get(name, {}), "config.json")
    model = theirs.family.schema.model_validate(mapping)
    (form, ropes), (wanted, wanted_ropes) = without_ropes(ours.model), without_ropes(model)
    assert form == wanted
    np.testing.assert_allclose(ropes, wanted_ropes, rtol=1e-6)
    assert ours.tensors.keys() == theirs.tensors.keys()
    # Of a norm 1 + w is kept, so w loses digits.
    lost = 1e-7 if name.startswith("gemma") else 0
    for tensor, own in ours.tensors.items():
        array = own.array()
        assert (array.shape, array.dtype) == (own.shape, np.float32), tensor
        np.testing.assert_allclose(array, theirs.tensors[tensor].array(), rtol=0, atol=lost)
        np.testing.assert_array_equal(own.array(1), array[1])
    pieces_of(ours, {path: leaf.shape for path, leaf in weights_of(ours.model).items()})


def test_quantized_tensors_are_read_as_the_package_reads_them(tmp_path):
    folder = FOLDERS["phi4_mini"]
    contents = Contents(write_gguf(tmp_path / "small.gguf", folder, quantize="Q8_0"))
    assert contents.dtype == "float32"
    exact = Contents(folder).tensors
    for name, tensor in contents.tensors.items():
        wanted = exact[name].array()
        if wanted.ndim > 1 and wanted.shape[-1] % 32 == 0:
            wanted = quants.dequantize(quants.quantize(wanted, Q8_0), Q8_0)
        np.testing.assert_array_equal(tensor.array(), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_quantization_is_dequantized(kind, tmp_path):
    size, width = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (2, 3 * width)).astype(np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    file.check_sizes()
    values = file.floats(file.entries["one"])
    assert values.shape == (2, 3 * size)
    np.testing.assert_array_equal(values, quants.dequantize(blocks, kind))
