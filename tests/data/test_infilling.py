"""Fill in the middle, on texts and on stored tokens."""

import numpy as np
import pytest
from json_lines import write_texts
from source_files import opened
from tokenizer_files import byte_level

from maxstack.data.documents import Tokens
from maxstack.data.infilling import infill
from maxstack.data.prepare import prepare
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError
from maxstack.schema.data import BytesTokenizer, DataConfig, HuggingFaceTokenizer, JsonlSource
from maxstack.schema.mixture import FillInTheMiddleConfig

TEXTS = [f"def f{i}(x):\n    return x + {i} # größer ☃\n" * (1 + i % 3) for i in range(200)]


@pytest.fixture
def tokenizer(tmp_path):
    marks = [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix")]
    byte_level([*marks, "<s>", "</s>"]).save(path := str(tmp_path / "tokenizer.json"))
    return open_tokenizer(
        HuggingFaceTokenizer(kind="huggingface", path=path, bos="<s>", eos="</s>")
    )


@pytest.fixture
def documents(tmp_path):
    write_texts(path := str(tmp_path / "texts.jsonl"), TEXTS)
    return opened("jsonl", path)


def parts(ids, tokenizer):
    """Text after each mark, by its name."""
    marks = {tokenizer.id_of(f"<|fim_{name}|>"): name for name in ("prefix", "middle", "suffix")}
    found, order = {}, []
    for token in map(int, ids[1:-1]):
        if token in marks:
            order.append(marks[token])
            found[marks[token]] = []
        else:
            found[order[-1]].append(token)
    texts = {name: tokenizer.decode(np.array(own)).decode() for name, own in found.items()}
    return order, texts


def test_the_parts_of_a_cut_document_are_the_document(tokenizer, documents):
    cfg, joint = FillInTheMiddleConfig(rate=1.0, spm=0.5), 0
    for i, text in enumerate(TEXTS):
        ids = infill(documents, i, tokenizer, cfg, f"seed {i}")
        order, texts = parts(ids, tokenizer)
        assert order == ["prefix", "suffix", "middle"]
        assert texts["prefix"] + texts["middle"] + texts["suffix"] == text
        assert ids[0] == tokenizer.id_of("<s>") and ids[-1] == tokenizer.id_of("</s>")
        joint += not texts["prefix"]
    assert 70 < joint < 140


def test_stored_tokens_are_cut_between_tokens(tokenizer, documents):
    cfg = FillInTheMiddleConfig(rate=1.0, spm=0.0)

    class Stored:
        def __getitem__(self, index):
            return Tokens(tokenizer.encode(TEXTS[index].encode()), None)

    for i, text in enumerate(TEXTS[:20]):
        _, texts = parts(infill(Stored(), i, tokenizer, cfg, f"seed {i}"), tokenizer)
        assert len(texts) == 3 and sum(map(len, texts.values())) >= len(text)


def test_a_share_of_documents_is_cut_and_the_seed_alone_says_where(tokenizer, documents):
    cfg = FillInTheMiddleConfig(rate=0.3)
    whole = [tokenizer.encode(text.encode()).tolist() for text in TEXTS]
    made, again, other = (
        [infill(documents, i, tokenizer, cfg, f"{seed} {i}").tolist() for i in range(200)]
        for seed in "aab"
    )
    cut = sum(a != b for a, b in zip(made, whole, strict=True))
    assert made == again != other and 40 < cut < 80


def test_a_tokenizer_without_the_marks_is_refused_by_the_key(documents, tmp_path):
    cfg = FillInTheMiddleConfig(rate=1.0)
    with pytest.raises(ConfigError, match="fill_in_the_middle.prefix: .*bytes has no token"):
        infill(documents, 0, open_tokenizer(BytesTokenizer(kind="bytes")), cfg, "")
    files = [str(tmp_path / "texts.jsonl")]
    source = JsonlSource(kind="jsonl", files=files, fill_in_the_middle=cfg)
    data = DataConfig(sources=(source,), tokenizer=BytesTokenizer(kind="bytes"), seq_len=8)
    with pytest.raises(ConfigError, match="fill_in_the_middle.prefix: .*bytes has no token"):
        prepare(data, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
