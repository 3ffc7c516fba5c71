"""`maxstack score` on a golden folder: what transformers computed, whatever the batch size and
padding; mistakes are named."""

import json
import shutil

import numpy as np
import parity
import pytest
from json_lines import write_texts
from tokenizer_files import of_words

from maxstack import cli
from maxstack.inference.score import read_texts

FOLDER = parity.GOLDENS / "qwen3"
GOLDEN = np.load(FOLDER / "golden.npz")
REAL = np.arange(GOLDEN["tokens"].shape[1]) < GOLDEN["lengths"][:, None]
FLOAT32 = "model.dtype=float32"


def scored(tmp_path, tokens, lengths, *options):
    given, out = f"{tmp_path}/tokens.npz", f"{tmp_path}/out.npz"
    np.savez(given, tokens=tokens, lengths=lengths)
    command = ["score", str(FOLDER), FLOAT32, "--tokens", given, "--out", out, *options]
    assert cli.main(command) == 0
    with np.load(out) as found:
        return dict(found)


def test_logits_and_log_probabilities_are_those_of_transformers(tmp_path, capsys):
    found = scored(tmp_path, GOLDEN["tokens"], GOLDEN["lengths"], "--logits")
    wanted = GOLDEN["logits"].astype(np.float64)
    log_p = wanted - np.log(np.exp(wanted).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p[:, :-1], GOLDEN["tokens"][:, 1:, None], 2)[..., 0]
    chosen = np.pad(np.where(REAL[:, 1:], chosen, 0), ((0, 0), (1, 0)))
    np.testing.assert_allclose(found["logits"][REAL], wanted[REAL], atol=2e-4)
    np.testing.assert_allclose(found["logprobs"], chosen, atol=2e-4)
    assert found["logits"][~REAL].any() == np.False_ and found["logprobs"].dtype == np.float32
    told = float(capsys.readouterr().out.rsplit("perplexity ", 1)[1])
    assert told == pytest.approx(np.exp(-chosen.sum() / REAL[:, 1:].sum()), rel=1e-4)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_batch_and_the_padding(tmp_path):
    tokens = np.pad(np.concatenate([GOLDEN["tokens"]] * 2), ((0, 0), (0, 9)), constant_values=7)
    lengths = np.concatenate([GOLDEN["lengths"], GOLDEN["lengths"] - 5])
    together = scored(tmp_path, tokens, lengths)["logprobs"]
    alone = [
        scored(tmp_path, tokens[[i], :n], lengths[[i]], "--batch-size", "1")["logprobs"]
        for i, n in enumerate(lengths)
    ]
    for i, row in enumerate(alone):
        np.testing.assert_allclose(together[i, : lengths[i]], row[0], atol=1e-5)
        assert not together[i, lengths[i] :].any()


def test_texts_are_read_with_the_folders_tokenizer(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    words = of_words(["<unk>", "<s>", *(f"w{i}" for i in range(126))])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "w9", "add_bos_token": True})
    )
    texts, out = f"{tmp_path}/texts.jsonl", f"{tmp_path}/out.npz"
    write_texts(texts, ["w3 w5 w8", "w1"])
    assert cli.main(["score", str(folder), "--data", texts, "--out", out]) == 0
    found = np.load(out)
    assert found["tokens"].tolist() == [[1, 5, 7, 10], [1, 3, 0, 0]]
    assert found["lengths"].tolist() == [4, 2]
    scored = [[False, True, True, True], [False, True, False, False]]
    assert (found["logprobs"] < 0).tolist() == scored


def test_a_tokenizer_that_is_given_is_used_for_a_folder_without_one(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "ab"}\n')
    overrides = ["data.tokenizer={kind: bytes}", "model.vocab=320"]
    rows = read_texts(f"{tmp_path}/texts.jsonl", str(FOLDER), overrides, "--tokens FILE.npz")
    assert rows.tokens.tolist() == [[256, 97, 98]]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("FOLDER", 1, "give one of --data FILE.jsonl, --tokens FILE.npz"),
        ("FOLDER --records r.jsonl --top 4", 1, "one answer"),
        ("nowhere --tokens t.npz", 1, "nowhere"),
        ("FOLDER --tokens t.npz --out no/o.npz", 1, "the folder no does not exist"),
        ("FOLDER --tokens t.npz --out .", 1, "is a folder"),
        ("FOLDER --data texts.jsonl", 1, "brings no tokenizer that maxstack reads"),
        (
            "FOLDER data.tokenizer.kind=bytes --data texts.jsonl",
            2,
            "only 128, so it is not the model's; give --tokens FILE.npz, or the right "
            "data.tokenizer",
        ),
        ("FOLDER --data t.npz", 1, "--data t.npz: is not JSONL"),
        ("FOLDER --tokens t.npz --adapter none", 1, "none: no such folder"),
        (
            "FOLDER --tokens t.npz --adapter ADAPTERS/dora-qwen3 --adapter ADAPTERS/fused-phi3",
            1,
            "fused-phi3: is of another model",
        ),
        (
            "FOLDER --tokens beyond.npz",
            2,
            "row 1, position 2: token 128 is outside the model's vocabulary of 128",
        ),
        ("FOLDER --tokens names.npz", 2, "it must hold tokens and lengths"),
        ("FOLDER --tokens text.npz", 2, "not a readable .npz file"),
        ("FOLDER --tokens short.npz", 2, "nothing to score"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    arguments, code, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    tokens = np.zeros((2, 4), np.int32)
    np.savez("t.npz", tokens=tokens, lengths=[4, 4])
    np.savez("short.npz", tokens=tokens, lengths=[1, 0])
    np.savez("names.npz", ids=tokens)
    tokens[1, 2] = 128
    np.savez("beyond.npz", tokens=tokens, lengths=[4, 4])
    (tmp_path / "text.npz").write_text("no")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}')
    given = arguments.replace("FOLDER", f"{FOLDER}").replace("ADAPTERS", f"{FOLDER}/../adapters")
    out = [] if "--out" in given else ["--out", "o.npz"]
    assert cli.main(["score", *given.split(), *out]) == code
    assert says in capsys.readouterr().err and not list(tmp_path.rglob("o.npz*"))


def test_a_folder_with_nan_is_not_scored_and_results_with_nan_are_no_success(tmp_path, capsys):
    name = parity.poisoned(FOLDER, tmp_path / "model", np.nan)
    np.savez(tmp_path / "t.npz", tokens=np.ones((1, 4), np.int32), lengths=[4])
    command = ["score", str(tmp_path / "model"), "--tokens", str(tmp_path / "t.npz")]
    command += ["--out", str(tmp_path / "o.npz")]
    assert cli.main(command) == 2 and f"tensor {name}: 1 of" in capsys.readouterr().err
    assert cli.main([*command, "--allow-nonfinite"]) == 0
    parity.poisoned(FOLDER, tmp_path / "large", 3e38)
    command[1] = str(tmp_path / "large")
    assert cli.main(command) == 2
    assert "3 of 3 scored tokens have a log-probability that is NaN" in capsys.readouterr().err


def test_rows_beyond_a_learned_table_of_positions_are_refused(tmp_path, capsys):
    gpt2 = parity.GOLDENS / "gpt2"
    most = json.loads((gpt2 / "config.json").read_text())["n_positions"]
    np.savez(tmp_path / "in.npz", tokens=np.ones((2, most + 1), np.int32), lengths=[1, most + 1])
    words = ["--tokens", str(tmp_path / "in.npz"), "--out", str(tmp_path / "out.npz")]
    assert cli.main(["score", str(gpt2), *words]) == 2
    said = capsys.readouterr().err
    assert f"row 1: {most + 1} tokens, and the model has positions for {most} alone" in said
