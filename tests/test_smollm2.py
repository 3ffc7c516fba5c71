"""A published model, SmolLM2-135M-Instruct, all the way: converted, asked, scored, trained, served
and packaged, beside what transformers and peft compute of it (scripts/golden/smollm2.py)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import processes
import pytest
import smollm2
from gguf import GGUFReader, dequantize
from json_lines import read_rows, write_rows
from safetensors.numpy import load_file

pytestmark = pytest.mark.release
GOLDEN = np.load(smollm2.ROOT / "tests/goldens/smollm2/answers.npz")
# Not the flags of tests, by which programs compile soon and run slowly, on eight devices.
ENVIRONMENT = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
FLOAT32 = "model.dtype=float32"
LENGTH = "serve.max_length=512"


def maxstack(*words):
    """What a command that succeeds prints."""
    command = [sys.executable, "-m", "maxstack.cli", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def file():
    return smollm2.fetch()


@pytest.fixture(scope="module")
def folder(file, tmp_path_factory):
    """The model as it is exported after its import."""
    out = tmp_path_factory.mktemp("smollm2")
    maxstack("import", file, "--out", out / "run")
    maxstack("export", out / "run", "--out", out / "folder")
    return out / "folder"


def perplexity(model, out, *words):
    """That of the page."""
    write_rows(out / "page.jsonl", [{"text": smollm2.PAGE}])
    maxstack("score", model, "--data", out / "page.jsonl", "--out", out / "page.npz", *words)
    logprobs = np.load(out / "page.npz")["logprobs"][0, 1:]
    return np.exp(-logprobs.astype(np.float64).mean())


def test_an_export_holds_the_files_weights_tokenizer_and_template(file, folder):
    """Bit for bit, but for the order of a head's rows, which llama.cpp interleaves."""
    tensors = load_file(folder / "model.safetensors")
    reader = GGUFReader(file)
    assert len(tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        ours = tensors[smollm2.hf_name(tensor.name)]
        theirs = dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            theirs = theirs.reshape(-1, 32, 2, smollm2.EMBED).swapaxes(1, 2).reshape(ours.shape)
        np.testing.assert_array_equal(ours, theirs, strict=True)
    words = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    assert tokens == reader.fields["tokenizer.ggml.tokens"].contents()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == reader.fields["tokenizer.chat_template"].contents()


def test_greedy_answers_are_transformers(file, tmp_path):
    """The best logit leads by 1.2e-3 at least, so rounding chooses no token."""
    assert GOLDEN["leads"].min() > 1e-3
    write_rows(tmp_path / "rows.jsonl", [{"id": i} | row for i, row in enumerate(smollm2.ROWS)])
    maxstack(
        *("generate", file, "--prompts", tmp_path / "rows.jsonl", "--temperature", 0),
        *("--out", tmp_path / "out.jsonl", "--ignore-eos", "--max-tokens", smollm2.TOKENS),
        *(FLOAT32, LENGTH),
    )
    rows = sorted(read_rows(tmp_path / "out.jsonl"), key=lambda row: row["id"])
    np.testing.assert_array_equal([row["tokens"] for row in rows], GOLDEN["tokens"])


def test_perplexity_is_transformers(folder, tmp_path):
    found = perplexity(folder, tmp_path, FLOAT32)
    assert found == pytest.approx(GOLDEN["perplexity"], abs=1e-4)


@pytest.mark.parametrize(("recipe", "most"), [("int8", 1.06), ("nf4", 1.4)])
def test_low_precision_costs_little_perplexity(folder, tmp_path, recipe, most):
    words = f"quantization={recipe}", "quantization.mode=ptq"
    found = perplexity(folder, tmp_path, FLOAT32, *words)
    assert found < most * GOLDEN["perplexity"]


def train(folder, out, **sections):
    """Rows of the steps of a run from the model."""
    cfg = {
        "run": {"name": "run", "output_dir": str(out), "trackers": []},
        "model": {"from": str(folder), "dtype": "float32"},
    }
    (out / "run.yml").write_text(json.dumps(cfg | sections))
    maxstack("train", out / "run.yml")
    return processes.rows(out / "run")


def test_losses_of_an_adapter_are_those_of_peft_in_trainer(folder, tmp_path):
    write_rows(tmp_path / "chats.jsonl", smollm2.CONVERSATIONS)
    source = {"kind": "jsonl", "files": [f"{tmp_path}/chats.jsonl"], "record": {"kind": "chat"}}
    chain = [
        {"kind": "clip_by_global_norm", "max_norm": 1.0},
        {"kind": "adamw", "b2": 0.99, "weight_decay": 0.0},
    ]
    rows = train(
        folder,
        tmp_path,
        lora={
            "adapter": str(smollm2.write_adapter(tmp_path / "adapter")),
            "targets": ["blocks/block/mixer/query", "blocks/block/mixer/value"],
        },
        data={"sources": [source], "packing": "none", "shuffle": False, "seq_len": 128},
        objective={"kind": "sft"},
        optimizer={"learning_rate": smollm2.RATE, "schedule": None, "chain": chain},
        train={"steps": smollm2.STEPS, "batch_size": smollm2.BATCH},
    )
    np.testing.assert_allclose([row["loss"] for row in rows], GOLDEN["losses"], atol=1e-4, rtol=0)


def test_grpo_on_sums_runs_and_resumes(folder, tmp_path):
    """With the rewards, KL and answers of a run that was not interrupted."""
    sums = [(7 * i % 23, 5 * i % 19) for i in range(1, 17)]
    asked = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": f"{a + b}"}
        for a, b in sums
    ]
    write_rows(tmp_path / "sums.jsonl", asked)
    source = {"kind": "jsonl", "files": [f"{tmp_path}/sums.jsonl"], "record": {"kind": "prompts"}}
    sections = {
        "lora": {"rank": 8},
        "data": {"sources": [source], "seq_len": 96},
        "objective": {"preset": "grpo", "kl": {"weight": 0.01}, "reference": "adapter_off"},
        "rollout": {"prompts": 2, "samples": 4, "max_tokens": 24},
        "rewards": [{"kind": "number"}],
        "optimizer": {"preset": "adamw", "learning_rate": 1e-4},
        "train": {"steps": 10, "batch_size": 8},
        "checkpoint": {"every": 5, "keep": 2},
    }
    whole = train(folder, tmp_path, **sections)
    shutil.rmtree(tmp_path / "run/checkpoints/10")
    again = train(folder, tmp_path, **sections)[len(whole) :]
    assert [row["step"] for row in whole + again] == [*range(1, 11), *range(6, 11)]
    figures = "loss", "reward", "kl", "length", "grad_norm"
    for row, wanted in zip(again, whole[5:], strict=True):
        assert [row[name] for name in figures] == [wanted[name] for name in figures]
    assert np.isfinite([[row[name] for name in figures] for row in whole]).all()
    assert len({row["reward"] for row in whole}) > 1 and whole[-1]["kl"] > 0


@contextlib.contextmanager
def server(log, *words):
    """A function from a prompt to the tokens of a greedy answer."""
    process, address = processes.serve(["serve", "--port", "0", *map(str, words)], ENVIRONMENT, log)

    def ask(prompt, count=32):
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=300)
        return answer.raise_for_status().json()["choices"][0]["token_ids"]

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def test_sixteen_clients_at_once_get_the_tokens_of_one_alone(file, tmp_path):
    prompts = [
        f"{text} {i}" for i in range(4) for text in (*smollm2.BEGINNINGS, smollm2.PAGE[:999])
    ]
    with server(tmp_path / "log", file, FLOAT32, LENGTH, "serve.max_requests=8") as ask:
        alone = [*map(ask, prompts)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            assert [*clients.map(ask, prompts)] == alone
    assert {*map(len, alone)} == {32}


SCORE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from loader import Package
given = np.load(sys.argv[2])
made = Package(sys.argv[1]).signatures["score"](tokens=given["tokens"], lengths=given["lengths"])
np.save(sys.argv[3], made["logprobs"])
"""


def test_a_package_scores_and_answers_as_the_model(folder, tmp_path):
    sizes = LENGTH, "serve.max_requests=2", "serve.rows=32", FLOAT32
    package = tmp_path / "package"
    maxstack("package", folder, "--out", package, "--platforms", "cpu", "--lengths", 256, *sizes)
    assert "files are intact" in maxstack("package", "verify", package)
    write_rows(tmp_path / "texts.jsonl", [{"text": smollm2.PAGE[i : i + 999]} for i in (0, 2000)])
    scores, own = tmp_path / "scores.npz", tmp_path / "own.npy"
    maxstack("score", folder, "--data", tmp_path / "texts.jsonl", "--out", scores, FLOAT32)
    subprocess.run([sys.executable, "-c", SCORE, package, scores, own], env=ENVIRONMENT, check=True)
    np.testing.assert_allclose(np.load(own), np.load(scores)["logprobs"], atol=3e-4, rtol=0)
    with server(tmp_path / "log", package) as ask:
        for prompt, tokens in zip(smollm2.BEGINNINGS, GOLDEN["tokens"][-3:], strict=True):
            assert ask(prompt) == tokens[:32].tolist()
