"""eval.samples: texts that a run writes while it is trained."""

import processes
import pytest
import tiny
from json_lines import read_rows, write_rows

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
    rows = processes.rows(tmp_path / "run", "samples")
    samples = {row["step"]: row["samples"] for row in rows}
    assert [*samples] == [2, 4] and samples[2] != samples[4]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "sample at step 4: alpha" in log
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    write_rows(prompts, ({"prompt": text} for text in PROMPTS))
    words = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "12"]
    words += ["--temperature", "0", "--ignore-eos", "serve.identical=any"]
    assert cli.main(["generate", str(tmp_path / "run"), *words]) == 0
    answers = [row["text"] for row in read_rows(out)]
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
