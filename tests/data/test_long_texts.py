"""Texts that are tokenized in parts."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from json_lines import write_texts
from source_files import source_of
from tokenizer_files import ALPHABET, learn_byte_level, learn_pieces
from tokenizers import models, normalizers, pre_tokenizers, trainers

from maxstack.data.long_texts import split_text, widest_token
from maxstack.data.prepare import prepare
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.schema.data import (
    BytesTokenizer,
    DataConfig,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)

TEXTS = ["the quick brown fox, 1234 times; it's über\n\n  déjà vu 中文 字\n"] * 40 + [
    "aaaa bb " * 9
]


def _sentencepiece(path, **settings):
    model = learn_pieces(path, TEXTS, 360, byte_fallback=True, **settings)
    return SentencePieceTokenizer(kind="sentencepiece", path=model)


def _learnt(model, trainer, before):
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = before
    made.train_from_iterator(TEXTS, trainer)
    return made


def _huggingface(path, made):
    made.save(str(path))
    return HuggingFaceTokenizer(kind="huggingface", path=str(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Small tokenizers of each kind that is in use."""
    folder = tmp_path_factory.mktemp("tokenizers")
    letters = sorted({*"".join(TEXTS), "\u2581"})
    plain = trainers.BpeTrainer(vocab_size=120, initial_alphabet=letters, show_progress=False)
    metaspace = _learnt(models.BPE(unk_token=None), plain, pre_tokenizers.Metaspace())
    pieces = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    words = _learnt(models.WordPiece(unk_token="[UNK]"), pieces, pre_tokenizers.BertPreTokenizer())
    words.normalizer = normalizers.BertNormalizer()
    return {
        "bytes": BytesTokenizer(kind="bytes", eos=True),
        "unigram": _sentencepiece(folder / "unigram"),
        "llama": _sentencepiece(
            folder / "llama",
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        ),
        "byte level": _huggingface(folder / "gpt.json", learn_byte_level(TEXTS, 330)),
        "metaspace": _huggingface(folder / "metaspace.json", metaspace),
        "words": _huggingface(folder / "bert.json", words),
    }


KINDS = ["bytes", "unigram", "llama", "byte level", "metaspace", "words"]
WORDS = st.sampled_from(
    ["the", "fox", "it's", "\u00fcber", "1234", "quick", "\u4e2d\u6587", "aaaa"]
)
GAPS = st.sampled_from([" ", "\n", ", ", "  ", "\n\n  ", "\t"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(WORDS, GAPS), min_size=20, max_size=60), st.integers(100, 250))
@pytest.mark.slow
def test_parts_have_the_ids_of_the_whole_text(made, kind, words, longest):
    text = "".join(f"{word}{gap}brown fox" for word, gap in words).encode()
    tokenizer = open_tokenizer(made[kind])
    cut = list(split_text(text, longest, tokenizer._text_ids))
    assert all(0 < stop - start <= longest for start, stop in cut) and len(cut) > 1
    for of in (tokenizer.encode, tokenizer.ends):
        np.testing.assert_array_equal(of(text, longest), of(text, len(text)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(st.text(max_size=40) | st.text("a \n\u2581\u00fc<>|", max_size=90))
def test_the_ids_of_parts_are_those_of_the_marked_text_and_as_many_as_its_size_says(
    made, kind, text
):
    tokenizer = open_tokenizer(made[kind])
    text = text.join([*tokenizer.special.values(), ""])
    document = text.encode()
    ids = np.concatenate([found for found, _ in tokenizer.encode_by_parts(document)])
    np.testing.assert_array_equal(ids, tokenizer.encode_marked(text)[0])
    assert len(ids) >= tokenizer.fewest(document)


BYTE_LEVEL = {"type": "ByteLevel"}
SPEC = {
    "model": {"type": "BPE", "vocab": dict.fromkeys([*ALPHABET, "\u00e9\u00e9\u00e9"])},
    "pre_tokenizer": BYTE_LEVEL,
    "added_tokens": [{"content": "<end>"}],
}
CUT = {"type": "Split", "behavior": "Removed", "pattern": {"String": " "}}


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 5),
        ({"added_tokens": [{"content": "<the end>"}]}, 9),
        ({"added_tokens": [{"content": "<end>", "rstrip": True}]}, None),
        ({"normalizer": {"type": "NFC"}}, None),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [CUT, BYTE_LEVEL]}}, None),
        ({"model": {"type": "WordPiece", "vocab": {}}}, None),
    ],
)
def test_the_widest_token_is_known_where_a_tokenizer_drops_nothing(changes, most):
    assert widest_token(SPEC | changes) == (most, b"")


def test_bytes_that_a_vocabulary_lacks_count_for_nothing():
    vocab = {letter: i for i, letter in enumerate(ALPHABET) if letter != "a"}
    assert widest_token(SPEC | {"model": {"type": "BPE", "vocab": vocab}}) == (5, b"a")


def test_a_text_without_any_boundary_ends_its_parts_with_whole_characters(made):
    text = ("\u4e2d" * 700).encode()
    tokenizer = open_tokenizer(made["llama"])
    cut = list(split_text(text, 1000, tokenizer._text_ids))
    assert cut == [(0, 999), (999, 1998), (1998, 2100)]
    assert tokenizer.ends(text, 1000)[-1] == len(text)


def test_a_text_that_is_too_long_is_refused_by_line_where_that_is_asked_for(tmp_path):
    write_texts(path := f"{tmp_path}/lines.jsonl", ["short", "the quick brown fox, " * 200])
    cfg = DataConfig(sources=[source_of("jsonl", path)], seq_len=64, longest=1024, beyond="refuse")
    with pytest.raises(DataError, match="line 2: a text of 4,200 bytes, .*longest=1024"):
        prepare(cfg, str(tmp_path / "shards"))
