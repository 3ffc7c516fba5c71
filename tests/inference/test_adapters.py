"""Several adapters in one engine, each request with its own."""

import json

import engines
import numpy as np
import parity
import pytest
from engines import build
from json_lines import read_rows, write_rows
from safetensors.numpy import load_file, save_file

from maxstack import cli
from maxstack.errors import ConfigError, DataError
from maxstack.hf.adapter import CONFIG, TENSORS, Adapter
from maxstack.hf.merge import merge
from maxstack.inference.request import Sampling

ADAPTERS = parity.GOLDENS / "adapters"
LORA = str(ADAPTERS / "lora-llama")
GREEDY = Sampling(max_tokens=8, temperature=0.0, logprobs=3)
PROMPTS = [np.random.default_rng(i).integers(0, 128, 9 + i).tolist() for i in range(3)]


def engine_of(folder, adapters, *mesh):
    return build(folder, mesh, 40, adapters, requests=4)[0]


def answers(engine, asked):
    """Answers to (prompt, adapter) that are computed together."""
    prompts, adapters = zip(*asked, strict=True)
    return engines.answers(engine, prompts, GREEDY, adapters)


def assert_alike(made, wanted):
    for own, other in zip(made, wanted, strict=True):
        assert [token.token for token in own] == [token.token for token in other]
        logprobs = [[token.logprob for token in tokens] for tokens in (own, other)]
        np.testing.assert_allclose(*logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second adapter of llama, of another rank and scale and for fewer modules."""
    folder = tmp_path_factory.mktemp("other")
    said = json.loads((ADAPTERS / "lora-llama" / CONFIG).read_text())
    attention = [name for name in said["target_modules"] if name[0] in "qkvo"]
    fields = {"r": 3, "lora_alpha": 12, "target_modules": attention}
    (folder / CONFIG).write_text(json.dumps(said | fields))
    tensors = {}
    for name, tensor in load_file(ADAPTERS / "lora-llama" / TENSORS).items():
        if "mlp" not in name:
            own = tensor[:3] if "lora_A" in name else -tensor[:, 1:]
            tensors[name] = np.ascontiguousarray(own)
    save_file(tensors, folder / TENSORS)
    return str(folder)


@pytest.fixture(scope="module")
def served(other):
    """An engine of llama with two adapters."""
    return engine_of(parity.GOLDENS / "llama", {"x": LORA, "y": other})


def dora(name, folder):
    """A golden adapter with lengths of columns drawn at random."""
    rng, folder = np.random.default_rng(0), folder / "dora"
    folder.mkdir()
    said = json.loads((ADAPTERS / name / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(said | {"use_dora": True}))
    tensors = load_file(ADAPTERS / name / TENSORS)
    for key, b in [*tensors.items()]:
        if key.endswith("lora_B.weight"):
            lengths = rng.uniform(0.5, 1.5, b.shape[0]).astype(np.float32)
            tensors[key.replace("lora_B.weight", "lora_magnitude_vector")] = lengths
    save_file(tensors, folder / TENSORS)
    return folder


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("lora-llama", False),
        pytest.param("dora-qwen3", True, marks=pytest.mark.slow),
        pytest.param("latent-deepseek_v3", True, marks=pytest.mark.slow),
        pytest.param("fused-phi3", False, marks=pytest.mark.release),
        pytest.param("turned-gpt2", False, marks=pytest.mark.release),
    ],
)
@pytest.mark.slow
def test_an_adapter_beside_the_model_answers_as_the_model_that_it_is_merged_into(
    name, lengths, tmp_path
):
    model = parity.GOLDENS / name.partition("-")[2]
    adapter = dora(name, tmp_path) if lengths else ADAPTERS / name
    merge(model, Adapter(adapter), tmp_path / "merged", 1, lambda size: None)
    beside = engine_of(model, {"x": str(adapter)})
    made = answers(beside, [(prompt, "x") for prompt in PROMPTS])
    merged = engine_of(tmp_path / "merged", {})
    assert_alike(made, answers(merged, [(prompt, None) for prompt in PROMPTS]))
    assert made != answers(beside, [(prompt, None) for prompt in PROMPTS])


@pytest.mark.slow
def test_requests_with_different_adapters_have_the_same_bits_together_and_alone(served):
    asked = [*zip(PROMPTS, (None, "x", "y"), strict=True)]
    alone = [answers(served, [request])[0] for request in asked]
    assert answers(served, asked) == alone
    assert answers(served, asked[::-1]) == alone[::-1]


@pytest.mark.slow
def test_a_request_without_an_adapter_has_the_bits_of_an_engine_without_adapters(served):
    asked = [(prompt, None) for prompt in PROMPTS]
    assert answers(served, asked) == answers(engine_of(parity.GOLDENS / "llama", {}), asked)


def test_pages_of_a_prefix_are_shared_only_by_requests_of_one_adapter(served):
    prompt = np.random.default_rng(9).integers(0, 128, 21).tolist()
    hits, first = [served.scheduler.hits], []
    for adapter in (None, "x", "y", None, "x", "y"):
        first.append(answers(served, [(prompt, adapter)])[0])
        hits.append(served.scheduler.hits)
    assert np.diff(hits).tolist() == [0, 0, 0, 20, 20, 20]
    assert first[:3] == first[3:]
    assert len({tuple(token.logprob for token in tokens) for tokens in first}) == 3


@pytest.mark.slow
def test_a_mesh_of_devices_answers_with_adapters_as_one_device_does(served, other):
    asked = [*zip(PROMPTS, (None, "x", "y"), strict=True)]
    mesh = "mesh.tensor=2", "mesh.data=2", "mesh.rules.residual=null"
    spread = engine_of(parity.GOLDENS / "llama", {"x": LORA, "y": other}, *mesh)
    assert_alike(answers(spread, asked), answers(served, asked))


def test_an_unknown_adapter_is_refused_with_the_names_of_those_that_there_are(served):
    with pytest.raises(DataError, match="adapter 'z': no such adapter; there are x, y"):
        served.add(PROMPTS[0], GREEDY, adapter="z")


def test_an_adapter_of_experts_is_refused_by_the_name_of_their_weight(tmp_path):
    name = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    config = json.loads((ADAPTERS / "lora-llama" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"target_modules": ["gate_proj"]}))
    model = parity.GOLDENS / "qwen3_moe"
    shape = load_file(model / "model.safetensors")[
        f"{name.removeprefix('base_model.model.')}.weight"
    ].shape
    tensors = {"lora_A": np.ones((4, shape[1])), "lora_B": np.ones((shape[0], 4))}
    save_file(
        {f"{name}.{key}.weight": leaf.astype(np.float32) for key, leaf in tensors.items()},
        tmp_path / TENSORS,
    )
    with pytest.raises(ConfigError, match="mlp/gate: experts, .* take no adapters"):
        engine_of(model, {"x": str(tmp_path)})


@pytest.mark.release
def test_generate_answers_with_an_adapter_and_has_the_same_bits_in_any_company(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    write_rows(prompts, ({"tokens": tokens} for tokens in PROMPTS))
    model = str(parity.GOLDENS / "llama")
    command = ["generate", model, "--prompts", str(prompts), "--out", str(out), "--adapter", LORA]
    options = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
    sizes = ["model.dtype=float32", "serve.rows=8", "serve.max_length=40", "serve.identical=strict"]
    assert cli.main([*command, *options, *sizes]) == 0, capsys.readouterr().err
    engine = engine_of(parity.GOLDENS / "llama", {"x": LORA})
    wanted = answers(engine, [(prompt, "x") for prompt in PROMPTS])
    made = [row["tokens"] for row in read_rows(out)]
    assert made == [[token.token for token in tokens] for tokens in wanted]
