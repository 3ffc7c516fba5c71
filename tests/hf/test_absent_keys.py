"""Keys that a config.json leaves out, or says twice: as transformers reads them, or refused."""

import copy
import json

import numpy as np
import pydantic
import pytest
import safetensors.numpy
from parity import GOLDENS

from maxstack.errors import ConfigError
from maxstack.hf.binding import bind
from maxstack.hf.contents import Contents, check_tensors
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import canonical_form, of_config
from maxstack.models.model import weights_of

ABSENT = json.loads((GOLDENS / "absent.json").read_text())


def golden(name):
    return json.loads((GOLDENS / name / "config.json").read_text())


def model_of(config):
    """None where it is refused."""
    family = of_config(config, FAMILIES, "config.json")
    try:
        return canonical_form(family.schema.model_validate(family.read(config, "config.json")))
    except (ConfigError, pydantic.ValidationError):
        return None


@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_key_means_what_it_means_to_transformers_or_is_refused(name):
    """By a file that scripts/golden/absent.py writes of transformers."""
    config, read = golden(name), 0
    for path, changed in ABSENT[name].items():
        less = copy.deepcopy(config)
        holder, keys = less, path.split("/")
        for key in keys[:-1]:
            holder = holder[key]
        del holder[keys[-1]]
        if (model := model_of(less)) is not None:
            assert model == model_of(config | changed), path
            read += 1
    assert read > len(config) / 3


def rope(config):
    blocks = FAMILIES[config["model_type"]].read(config, "config.json")["blocks"]
    return blocks["block"]["mixer"]["rope"]


SCALED = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"rope_scaling": SCALED}, "rope_scaling=.*rope_parameters say otherwise"),
        ("llama", {"rope_theta": 2e4}, "rope_theta=20000.0: rope_parameters say 500000"),
        ("gemma3", {"rope_parameters": SCALED}, "a mapping for each layer type, such as"),
        ("phi3", {"original_max_position_embeddings": None}, "original_max.* is missing"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is null"),
        ("qwen3_moe", {"num_experts": 7}, "num_experts=7: num_local_experts says 6"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu': not supported"),
    ],
)
def test_what_is_said_twice_and_unequally_or_not_at_all_is_refused(name, changes, said):
    config = golden(name) | changes
    with pytest.raises(ConfigError, match=said):
        FAMILIES[config["model_type"]].read(config, "config.json")


def test_what_is_said_twice_and_alike_is_read():
    config = golden("olmo2")
    new = config | {"rope_parameters": SCALED | {"rope_theta": 7e4}}
    both = new | {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert rope(both) == rope(new)
    assert rope(new)["scaling"]["factor"] == 4.0


def test_gelu_of_gemma_is_the_tanh_form_and_swish_is_silu():
    """GemmaConfig of transformers 5.24 says so of the first release's files; ACT2FN of swish."""
    assert model_of(golden("gemma") | {"hidden_act": "gelu"}) == model_of(golden("gemma"))
    assert model_of(golden("llama") | {"hidden_act": "swish"}) == model_of(golden("llama"))


def published(tmp_path, name, config, more, before=""):
    """A golden folder as its model was published: another config.json, and `more` tensors."""
    file = next((GOLDENS / name).glob("*.safetensors"))
    held = {f"{before}{key}": array for key, array in safetensors.numpy.load_file(file).items()}
    held |= {key: np.zeros(shape, np.float32) for key, shape in more.items()}
    safetensors.numpy.save_file(held, tmp_path / file.name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Contents(tmp_path), Contents(GOLDENS / name)


def test_siglip_as_it_is_published_is_read_for_its_tower(tmp_path, caplog):
    tower = golden("siglip") | {"model_type": "siglip_vision_model"}
    text = {"model_type": "siglip_text_model", "hidden_size": 8}
    config = {"architectures": ["SiglipModel"], "model_type": "siglip", "text_config": text}
    left = {"logit_scale": 1, "text_model.final_layer_norm.bias": 8}
    config["vision_config"] = tower
    found, wanted = published(tmp_path, "siglip", config, left, before="vision_model.")
    assert found.mapping == wanted.mapping and found.tensors.keys() == wanted.tensors.keys()
    assert "than the tower of pictures are passed over: logit_scale (1), text_model" in caplog.text
    base = {"model_type": "siglip_vision_model"}  # all that siglip-base-patch16-224 says of it
    assert FAMILIES["siglip_vision_model"].read(base, "")["embed"] == 768


def test_dit_as_it_is_published_is_a_class_of_several_models(tmp_path):
    config = golden("dit") | {
        "_class_name": "Transformer2DModel",
        "cross_attention_dim": None,
        "num_vector_embeds": None,
        "only_cross_attention": False,
        "use_linear_projection": False,
    }
    found, wanted = published(tmp_path, "dit", config, {"pos_embed.pos_embed": (1, 16, 16)})
    assert found.mapping == wanted.mapping
    shapes = {path: leaf.shape for path, leaf in weights_of(found.model).items()}
    check_tensors(found, bind(found.family, found.model, shapes))
    for changes, said in (({"norm_type": "ada_norm"}, "norm_type"), ({"norm_type": None}, "null")):
        with pytest.raises(ConfigError, match=said):
            published(tmp_path, "dit", config | changes, {})
