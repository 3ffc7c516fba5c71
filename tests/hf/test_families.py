"""Every family's tables, both ways: config.json to a model and back, tensors to weights and back,
bit by bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxstack.errors import ConfigError
from maxstack.hf.binding import bind
from maxstack.hf.blocks import find_pattern
from maxstack.hf.contents import Contents
from maxstack.hf.export import choose_family, export
from maxstack.hf.families import ALL, FAMILIES
from maxstack.hf.family import canonical_form
from maxstack.hf.reader import pieces_of, slab_reader
from maxstack.models.model import weights_of
from maxstack.schema.decoder import DecoderConfig

GOLDENS = {
    path.parent.name: path.parent
    for path in sorted((Path(__file__).parents[1] / "goldens").glob("*/*model.safetensors"))
}


def shapes_of(model):
    return {path: leaf.shape for path, leaf in weights_of(model).items()}


def reader_of(pieces, shapes):
    """A function from a path to the whole weight."""

    def read(path):
        whole = tuple(slice(0, size) for size in shapes[path])
        return slab_reader(pieces[path], shapes[path], np.float32)(whole)

    return read


def test_every_family_has_a_golden():
    assert {Contents(folder).family.architecture for folder in GOLDENS.values()} == {
        family.architecture for family in ALL
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_import_and_export_give_every_tensor_back(name, tmp_path):
    contents = Contents(GOLDENS[name])
    shapes = shapes_of(contents.model)
    read = reader_of(pieces_of(contents, shapes), shapes)
    export(contents.model, shapes, read, tmp_path / "out", source=GOLDENS[name], shard_size=40_000)
    again = Contents(tmp_path / "out")
    assert again.folder.raw().keys() == contents.folder.raw().keys()
    assert again.family is contents.family
    assert canonical_form(again.model) == canonical_form(contents.model)
    assert again.tensors.keys() == contents.tensors.keys()
    for tensor in contents.tensors:
        one, other = contents.tensors[tensor].array(), again.tensors[tensor].array()
        assert (one.dtype, one.shape) == (other.dtype, other.shape), tensor
        assert one.tobytes() == other.tobytes(), tensor
    given, config = contents.folder.config, again.folder.config
    spelt_anew = {"rope_parameters", "num_nextn_predict_layers", "head_dim"}
    same = {key for key in given.keys() & config.keys() if given[key] is not None} - spelt_anew
    assert {key: config[key] for key in same} == {key: given[key] for key in same}


def test_an_export_that_would_be_infinite_in_float16_is_refused_by_name(tmp_path):
    contents = Contents(GOLDENS["llama"])
    shapes = shapes_of(contents.model)

    def give(largest, out):
        def read(path):
            weight = np.zeros(shapes[path], np.float32)
            weight.flat[0] = -largest if path == "embed" else 1.0
            return weight

        export(contents.model, shapes, read, out, dtype="float16")

    give(65519.0, tmp_path / "out")  # 65520 is the first that rounds to infinity
    table = Contents(tmp_path / "out").tensors["model.embed_tokens.weight"].array()
    assert np.isfinite(table).all()
    said = r"model\.embed_tokens\.weight: numbers up to 100000 are .*"
    with pytest.raises(ConfigError, match=said):
        give(1e5, tmp_path / "no")
    assert not (tmp_path / "no").exists()


BASE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            "llama",
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
            },
        ),
        (
            "gemma3_text",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                },
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        (
            "phi3",
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "su", **FACTORS},
            },
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "longrope",
                    "factor": 2.0,
                    **FACTORS,
                },
            },
        ),
    ],
    ids=["llama3", "linear", "two thetas", "longrope"],
)
def test_old_and_new_spellings_of_rope_are_one(name, old, new):
    family = FAMILIES[name]
    assert family.read(BASE | old, "old") == family.read(BASE | new, "new")


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5"])
def test_modules_of_multi_token_prediction_come_along(name, tmp_path):
    contents = Contents(GOLDENS[name])
    block = "full" if "full" in contents.model.blocks else "moe"
    model = DecoderConfig.model_validate(contents.mapping | {"mtp": {"block": block, "depth": 1}})
    shapes, rng = shapes_of(model), np.random.default_rng(0)
    weights = {path: rng.standard_normal(shapes[path]).astype(np.float32) for path in shapes}
    architecture = contents.family.architecture
    export(model, shapes, weights.get, tmp_path / "out", architecture=architecture)
    again = Contents(tmp_path / "out")
    assert again.model.mtp and again.model.mtp.depth == 1
    pieces = pieces_of(again, shapes)
    assert sum(path.startswith("mtp/0/") for path in pieces) > 10
    read = reader_of(pieces, shapes)
    for path, weight in weights.items():
        np.testing.assert_array_equal(read(path), weight, path)


def test_a_model_that_no_architecture_has_is_not_exported():
    model = DecoderConfig.model_validate(FAMILIES["llama"].read(BASE, ""))
    odd = model.model_copy(update={"embed_scale": 3.0})
    with pytest.raises(
        ConfigError, match=r"no architecture.*LlamaForCausalLM: it has no way to say embed_scale"
    ):
        choose_family(odd, None, False)
    assert choose_family(model, None, False)[0].architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match="GemmaForCausalLM"):
        choose_family(model, "GemmaForCausalLM", True)


def test_a_weight_that_no_row_holds_is_an_error():
    model = DecoderConfig.model_validate(FAMILIES["llama"].read(BASE, ""))
    with pytest.raises(ValueError, match="no tensors for extra"):
        bind(FAMILIES["llama"], model, shapes_of(model) | {"extra": (3,)})


@pytest.mark.parametrize(
    ("names", "unrolled", "wanted"),
    [
        ("aaaa", 0, ("", "a")),
        ("dmmmm", 0, ("d", "m")),
        ("ssfssfss", 0, ("", "ssf")),
        ("ddmnmnm", 0, ("dd", "mn")),
        ("ab", 2, ("ab", "")),
        ("sfsfxyxy", 4, ("sfsf", "xy")),
    ],
)
def test_layers_become_the_shortest_prefix_and_pattern(names, unrolled, wanted):
    assert find_pattern(names, unrolled) == (list(wanted[0]), list(wanted[1]))


@pytest.mark.parametrize(
    ("family", "length", "wanted"),
    [("llama", 4096, 4096), ("llama", 8, None), ("phi3", 10**6, None)],
)
def test_an_export_says_the_longest_rows_in_training_unless_longrope_hangs_on_what_it_says(
    family, length, wanted, tmp_path
):
    contents = Contents(GOLDENS[family])
    shapes = shapes_of(contents.model)
    read = reader_of(pieces_of(contents, shapes), shapes)
    source = GOLDENS[family]
    export(contents.model, shapes, read, tmp_path / "out", source=source, length=length)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"]
    assert said == (wanted or contents.folder.config["max_position_embeddings"])
