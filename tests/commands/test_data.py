import builtins
from pathlib import Path

import pytest
import sentencepiece

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


def test_show_prints_documents_boundaries_padding_and_targets(maxstack):
    out = maxstack("data show run.yml --rows 2 --batches 2 data.seq_len=100 data.packing=fit")
    assert out.startswith("poems: ") and "batch 1, row 1 of 4" in out and "row 2" not in out
    assert (
        "-- document 1: columns 0..73, positions 0..73, 74 of 74 targets count --" in out
        or "columns 0..75" in out
    )
    assert "violets are blue,\n\tthe file" in out and "padding; " in out and "\033" not in out


def test_show_reads_the_held_out_documents_with_eval(maxstack):
    said = maxstack("data show run.yml --eval --full"), maxstack("data show run.yml")
    assert sum(int(each.split()[1]) for each in said) == 20


def test_show_marks_the_last_token_of_what_is_scored_and_no_token_after_it(maxstack):
    Path("a.jsonl").write_text('{"prompt": "Is it?", "chosen": " Yes", "rejected": " No"}\n')
    source = "data.sources=[{kind: jsonl, files: [a.jsonl], record: {kind: pairs}}]"
    words = "data.tokenizer.eos=true", "objective={kind: reward}", "model.head.scores=true"
    out = maxstack("data show run.yml", source, *words)
    assert "Is it? Yes[[<|endoftext|>]]\n" in out and "Is it? No[[<|endoftext|>]]\n" in out


def test_show_never_sends_control_characters_of_a_document_to_the_terminal(maxstack):
    Path("texts/0.txt").write_text("\033[2Jgone" * 3)
    out = maxstack("data show run.yml --full data.sources.0.files=[texts/0.txt]")
    assert "\033" not in out and "\\x1b[2Jgone" in out


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_tokenizer_trains_a_model_that_loses_nothing(model, maxstack):
    names = " ".join(f"{name} of the {name.lower()}" for name in dir(builtins))
    Path("texts/names.txt").write_text(names)
    run = "run.yml data.sources.0.holdout=0"
    maxstack(f"data tokenizer {run} --vocab 400 --model {model} --out made/here.model")
    trained = sentencepiece.SentencePieceProcessor(model_file="made/here.model")
    text = "  Roses,\n\n\tare \u00e9 \U0001f339 red\r\n"
    assert trained.vocab_size() == 400 and trained.decode(trained.encode(text)) == text
    assert len(trained.encode("roses are red")) < 13
    tokenizer = "data.tokenizer={kind: sentencepiece, path: made/here.model}"
    assert "roses are red,\n  violets" in maxstack(f"data show {run} --full", tokenizer)


@pytest.mark.parametrize(
    ("line", "more", "code", "words"),
    [
        ("show none.yml", [], 1, "none.yml"),
        ("show run.yml data.seqlen=3", [], 1, "seq_len"),
        ("show run.yml data.sources.0.files=[none/*.txt]", [], 2, "none/*.txt"),
        (
            "tokenizer run.yml --out x.model --vocab 100000",
            ["data.sources=[{kind: text, files: [texts/*.txt]}]"],
            1,
            "--vocab 100000: this text yields 374 tokens at most",
        ),
        ("tokenizer run.yml --out x.model --vocab 100", [], 1, "use a --vocab above 2"),
        (
            "tokenizer run.yml --out x.model --vocab 300",
            ["data.sources=[{kind: synthetic}]"],
            2,
            "synthetic document",
        ),
        (
            "prepare run.yml --out out --workers 1",
            ["data.sources=[{kind: jsonl, files: [run.yml]}]"],
            2,
            "run.yml: line 2: not JSON",
        ),
    ],
)
def test_mistakes_and_bad_data_end_with_their_exit_code_and_one_paragraph(
    line, more, code, words, maxstack
):
    error = maxstack(f"data {line}", *more, code=code)
    assert words in error and "Traceback" not in error


def test_a_tokenizer_cannot_be_learnt_from_bytes_that_are_no_text(maxstack):
    Path("texts/5.txt").write_bytes(b"fine \xff")
    source = "data.sources=[{kind: text, files: [texts/5.txt]}]"
    said = maxstack("data tokenizer run.yml --vocab 300 --out x.model", source, code=2)
    assert "texts/5.txt: not UTF-8 at byte 5" in said and not Path("x.model").exists()


@pytest.mark.slow
def test_prepare_ends_well_and_says_how_much_it_wrote(maxstack):
    tokenizer = "data.tokenizer={kind: bytes, eos: true}"
    said = maxstack("data prepare run.yml --out tokens --workers 1", tokenizer)
    assert "tokens: 20 documents" in said and Path("tokens/manifest.json").exists()
