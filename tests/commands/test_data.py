import builtins
from pathlib import Path

import pytest
import sentencepiece

from maxstack.cli import main

CONFIG = """
model: {vocab: 512, embed: 8, layers: 1, blocks: {only: {mixer: {kind: attention, heads: 1, head_dim: 8}, mlp: {kind: gated, hidden: 8}}}}
data:
  sources: [{kind: text, name: poems, files: [texts/*.txt], holdout: 0.3}]
  seq_len: 64
train: {batch_size: 4}
"""  # noqa: E501


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for i in range(20):
        Path("texts", f"{i}.txt").write_text(
            f"poem {i}: roses are red,\n  violets are blue,\n\tthe file's number is {i} too.\n"
        )
    Path("run.yml").write_text(CONFIG)
    return tmp_path


def test_show_prints_documents_boundaries_padding_and_targets(capsys):
    assert (
        main("data show run.yml --rows 2 --batches 2 data.seq_len=100 data.packing=fit".split())
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("poems: ") and "batch 1, row 1 of 4" in out and "row 2" not in out
    assert (
        "-- document 1: columns 0..73, positions 0..73, 74 of 74 targets count --" in out
        or "columns 0..75" in out
    )
    assert "violets are blue,\n\tthe file" in out and "padding; " in out and "\033" not in out


def test_show_reads_the_held_out_documents_with_eval(capsys):
    main("data show run.yml --eval --full".split())
    held = int(capsys.readouterr().out.split()[1])
    main(["data", "show", "run.yml"])
    assert held + int(capsys.readouterr().out.split()[1]) == 20


def test_show_marks_the_last_token_of_what_is_scored_and_no_token_after_it(capsys):
    Path("a.jsonl").write_text('{"prompt": "Is it?", "chosen": " Yes", "rejected": " No"}\n')
    source = "data.sources=[{kind: jsonl, files: [a.jsonl], record: {kind: pairs}}]"
    words = ["data.tokenizer.eos=true", "objective={kind: reward}", "model.head.scores=true"]
    assert main(["data", "show", "run.yml", source, *words]) == 0
    out = capsys.readouterr().out
    assert "Is it? Yes[[<|endoftext|>]]\n" in out and "Is it? No[[<|endoftext|>]]\n" in out


def test_show_never_sends_control_characters_of_a_document_to_the_terminal(capsys):
    Path("texts/0.txt").write_text("\033[2Jgone" * 3)
    main(["data", "show", "run.yml", "--full", "data.sources=[{kind: text, files: [texts/0.txt]}]"])
    assert "\033" not in (out := capsys.readouterr().out) and "\\x1b[2Jgone" in out


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_tokenizer_trains_a_model_that_loses_nothing(model, capsys):
    Path("texts/names.txt").write_text(
        " ".join(f"{name} of the {name.lower()}" for name in dir(builtins))
    )
    arguments = ["data.sources=[{kind: text, files: [texts/*.txt]}]"]
    assert (
        main(
            [
                "data",
                "tokenizer",
                "run.yml",
                *arguments,
                "--vocab",
                "400",
                "--model",
                model,
                "--out",
                "made/here.model",
            ]
        )
        == 0
    )
    trained = sentencepiece.SentencePieceProcessor(model_file="made/here.model")
    text = "  Roses,\n\n\tare \u00e9 \U0001f339 red\r\n"
    assert trained.vocab_size() == 400 and trained.decode(trained.encode(text)) == text
    assert len(trained.encode("roses are red")) < 13
    assert (
        main(
            [
                "data",
                "show",
                "run.yml",
                *arguments,
                "--full",
                "data.tokenizer={kind: sentencepiece, path: made/here.model}",
            ]
        )
        == 0
    )
    assert "roses are red,\n  violets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "none.yml"], 1, "none.yml"),
        (["show", "run.yml", "data.seqlen=3"], 1, "seq_len"),
        (["show", "run.yml", "data.sources=[{kind: text, files: [none/*.txt]}]"], 2, "none/*.txt"),
        (
            ["tokenizer", "run.yml", "--vocab", "100000", "--out", "x.model"],
            1,
            "--vocab 100000: this text yields 374 tokens at most",
        ),
        (
            ["tokenizer", "run.yml", "--vocab", "100", "--out", "x.model"],
            1,
            "use a --vocab above 2",
        ),
        (
            [
                "tokenizer",
                "run.yml",
                "--vocab",
                "300",
                "--out",
                "x.model",
                "data.sources=[{kind: synthetic}]",
            ],
            2,
            "synthetic document",
        ),
        (
            [
                "prepare",
                "run.yml",
                "--out",
                "out",
                "--workers",
                "1",
                "data.sources=[{kind: jsonl, files: [run.yml]}]",
            ],
            2,
            "run.yml: line 2: not JSON",
        ),
    ],
)
def test_mistakes_and_bad_data_end_with_their_exit_code_and_one_paragraph(
    arguments, code, words, capsys
):
    assert main(["data", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_tokenizer_cannot_be_learnt_from_bytes_that_are_no_text(capsys):
    Path("texts/5.txt").write_bytes(b"fine \xff")
    assert (
        main(
            [
                "data",
                "tokenizer",
                "run.yml",
                "--vocab",
                "300",
                "--out",
                "x.model",
                "data.sources=[{kind: text, files: [texts/5.txt]}]",
            ]
        )
        == 2
    )
    assert (
        "texts/5.txt: not UTF-8 at byte 5" in capsys.readouterr().err
        and not Path("x.model").exists()
    )


@pytest.mark.slow
def test_prepare_ends_well_and_says_how_much_it_wrote(capsys):
    assert (
        main(
            [
                "data",
                "prepare",
                "run.yml",
                "--out",
                "tokens",
                "--workers",
                "1",
                "data.tokenizer={kind: bytes, eos: true}",
            ]
        )
        == 0
    )
    assert (
        "tokens: 20 documents" in capsys.readouterr().out and Path("tokens/manifest.json").exists()
    )
