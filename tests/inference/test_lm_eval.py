"""lm-evaluation-harness, as a process that asks a server, beside `maxstack score`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from json_lines import read_rows, write_rows
from served import MARKS, make, serving

from maxstack import cli

HARNESS = shutil.which("lm_eval", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SCORED = {"doc_to_text": "{{question}}", "metric_list": [{"metric": "acc"}]}
TASKS = {
    "choice": SCORED
    | {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": 0,
    },
    "likelihood": SCORED | {"output_type": "loglikelihood", "doc_to_target": "{{likeliest}}"},
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{likeliest}}",
        "generation_kwargs": {"until": ["zz"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with serving(make(folder / "model"), folder / "log") as server:
        server.folder = folder
        yield server


def questions(server):
    """Rows of a task. After the first question the model's own next token is a character."""
    texts = [f"{a}{b}?" for a in "abcdefgh" for b in "abcdefgh"]
    answers = [
        choice.text for choice in server.complete(texts, temperature=0, max_tokens=9).choices
    ]
    pairs = sorted(zip(texts, answers, strict=True), key=lambda pair: not pair[1][0].isascii())
    assert pairs[0][1][0].isascii()
    return [
        {"question": text, "answers": ["no", "ja é", " x"], "likeliest": own[0], "generated": own}
        for text, own in pairs[:4]
    ]


def evaluated(server, *options, **more):
    """Samples by task of the harness."""
    folder = server.folder
    write_rows(folder / "rows.jsonl", questions(server))
    for name, task in TASKS.items():
        task |= {"task": name, "dataset_path": "json", "test_split": "train"}
        task |= {"dataset_kwargs": {"data_files": f"{folder}/rows.jsonl"}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    url = f"{server.http.base_url}/v1/completions"
    settings = {"model": "tiny", "base_url": url, "max_length": 256, **more}
    shutil.rmtree(folder / "samples", ignore_errors=True)
    subprocess.run(
        [HARNESS, "--model", "local-completions", *options, "--log_samples"]
        + ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
        + ["--include_path", folder, "--tasks", ",".join(TASKS)]
        + ["--output_path", folder / "samples"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hub", "PYTHONPATH": ""},
        check=True,
    )
    return {
        name: read_rows(file)
        for name in TASKS
        for file in folder.glob(f"samples/tiny/samples_{name}_*.jsonl")
    }


def scores(folder, rows, starts):
    """By `maxstack score`: sums over the tokens of each row from its start on, and True where all
    of them are the likeliest."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    np.savez(folder / "rows.npz", tokens=tokens, lengths=[len(row) for row in rows])
    words = "--tokens", f"{folder}/rows.npz", "--out", f"{folder}/scores.npz", "--logits"
    more = "model.dtype=float32", "mesh.fsdp=1", "mesh.data=-1"
    assert cli.main(["score", f"{folder}/model", *words, *more]) == 0
    found = np.load(folder / "scores.npz")
    parts = [slice(start, len(row)) for row, start in zip(rows, starts, strict=True)]
    best = np.pad(found["logits"].argmax(-1), ((0, 0), (1, 0)))[:, :-1]
    sums = [logprobs[part].sum() for logprobs, part in zip(found["logprobs"], parts, strict=True)]
    return sums, [
        np.array_equal(own[part], row[part])
        for own, row, part in zip(best, tokens, parts, strict=True)
    ]


@pytest.mark.release
@pytest.mark.skipif(HARNESS is None, reason="lm_eval is not installed, as `make test-all` does it")
@pytest.mark.parametrize(
    ("options", "more"),
    [((), {"num_concurrent": 4}), (("--batch_size", "4"), {"tokenized_requests": False})],
    ids=["tokens", "texts"],
)
def test_lm_evaluation_harness_computes_what_score_does(server, options, more):
    def tokens(text):
        return server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]

    samples = evaluated(server, *options, **more)
    rows, starts, found, greedy = [], [], [], []
    for sample in samples["choice"] + samples["likelihood"]:
        for asked, ((value, likeliest),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            starts.append(len(tokens(asked["arg_0"])))
            rows.append(tokens(asked["arg_0"]) + tokens(asked["arg_1"]))
            found.append(float(value))
            greedy.append(likeliest == "True")
    for sample in samples["rolling"]:
        starts.append(1)
        rows.append(tokens(MARKS[1] + sample["doc"]["question"]))
        found.append(float(sample["resps"][0][0]))
    sums, likeliest = scores(server.folder, rows, starts)
    np.testing.assert_allclose(found, sums, rtol=1e-5)
    assert greedy == likeliest[: len(greedy)] and {*greedy} == {True, False}
    for sample in samples["generate"]:
        assert sample["resps"] == [[sample["doc"]["generated"]]]
