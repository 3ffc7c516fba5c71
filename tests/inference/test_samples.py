"""eval.samples: texts that a run writes while it is trained."""

import json

import processes
import pytest
import tiny

from maxstack import cli, train
from maxstack.config import dump
from maxstack.errors import ConfigError
from maxstack.load import load

PROMPTS = ["alpha", "the gradient of"]
EVAL = {"every": 2, "steps": 1, "samples": {"prompts": PROMPTS, "tokens": 12, "temperature": 0.0}}
SOURCE = {
    "kind": "synthetic",
    "documents": 64,
    "length": 50,
    "ragged": True,
    "vocab": tiny.VOCAB,
    "holdout": 0.1,
}


@pytest.mark.release
def test_samples_of_a_mesh_are_what_generate_answers_by_the_last_checkpoint(tmp_path):
    cfg = tiny.config(
        data={"sources": [SOURCE], "seq_len": 48},
        eval=EVAL,
        train={"batch_size": 8, "steps": 4},
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        run={"name": "run", "output_dir": str(tmp_path)},
        checkpoint={"every": 4},
    )
    (tmp_path / "run.yml").write_text(dump(cfg))
    kept = f"run.compilation_cache={processes.COMPILED}"
    assert train.main([str(tmp_path / "run.yml"), kept]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    samples = {row["step"]: row["samples"] for row in rows if "samples" in row}
    assert [*samples] == [2, 4] and samples[2] != samples[4]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "sample at step 4: alpha" in log
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    words = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "12"]
    words += ["--temperature", "0", "--ignore-eos", "serve.identical=any"]
    assert cli.main(["generate", str(tmp_path / "run"), *words]) == 0
    answers = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert samples[4] == [text + answer for text, answer in zip(PROMPTS, answers, strict=True)]


@pytest.mark.parametrize(
    "changes, message",
    [
        (["eval.every=0"], "eval.every is 0"),
        (["mesh.data=1", "mesh.context=2"], "context=2 cannot generate"),
        (["objective={kind: masked_diffusion, mask_token: 3}"], "generates from a prompt"),
    ],
)
def test_samples_are_refused_where_the_model_cannot_generate(changes, message, tmp_path):
    cfg = tiny.config(data={"sources": [SOURCE], "seq_len": 48}, eval=EVAL)
    (tmp_path / "run.yml").write_text(dump(cfg))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "run.yml", changes)
