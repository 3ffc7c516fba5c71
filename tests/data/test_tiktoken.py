"""Tokenizers in tiktoken's files, against the ids of the tiktoken package in tests/goldens."""

import json
import shutil
from pathlib import Path

import pytest

from maxstack.data.tiktoken_files import FILES
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.hf.tokenizer import tokenizer_of, unread
from maxstack.schema.data import HuggingFaceTokenizer

GOLDENS = Path(__file__).parents[1] / "goldens" / "tiktoken"
GOLDEN = json.loads((GOLDENS / "golden.json").read_text())
CLASSES = {"tiktoken.model": "TikTokenTokenizer", "qwen.tiktoken": "QWenTokenizer"}


def folder(tmp_path, name, **settings):
    shutil.copyfile(GOLDENS / "ranks.tiktoken", tmp_path / name)
    config = {"tokenizer_class": CLASSES.get(name)} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def opened(tmp_path):
    return open_tokenizer(HuggingFaceTokenizer.model_validate(tokenizer_of(tmp_path)))


@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_tiktoken(tmp_path, name):
    """scripts/golden/tiktoken_ids.py compares 4,000 texts of each pattern."""
    tokenizer = opened(folder(tmp_path, name))
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][name], strict=True):
        found = tokenizer.encode(text.encode())
        assert found.tolist() == ids
        assert tokenizer.decode(found) == text.encode()


def test_special_tokens_of_kimi_are_numbered_after_the_ranks(tmp_path):
    named = {"1500": ("[BOS]", True), "1501": ("[EOS]", True), "1502": ("<|im_end|>", False)}
    decoder = {i: {"content": text, "special": special} for i, (text, special) in named.items()}
    tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": decoder}
    tokenizer = opened(folder(tmp_path, "tiktoken.model", **tokens))
    assert tokenizer.eos == (1501,) and tokenizer.bos == ()
    ids = [tokenizer.id_of(text) for text in ("<|im_end|>", "<|reserved_token_1503|>")]
    assert ids == [1502, 1503] and tokenizer.vocab_size == 1500 + 256
    assert 1502 not in tokenizer.special and 1503 in tokenizer.special


def test_special_tokens_of_llama_and_qwen(tmp_path):
    assert opened(folder(tmp_path, "tokenizer.model")).id_of("<|eot_id|>") == 1509
    (tmp_path / "tokenizer.model").unlink()
    qwen = opened(folder(tmp_path, "qwen.tiktoken"))
    assert (qwen.id_of("<|im_end|>"), qwen.id_of("<|extra_204|>")) == (1502, 1707)


def test_files_of_models_that_are_not_known_are_no_tokenizer(tmp_path):
    folder(tmp_path, "tiktoken.model", tokenizer_class="OtherTokenizer")
    assert tokenizer_of(tmp_path) is None
    assert "known of tokenizer_class=TikTokenTokenizer, and tokenizer_config.json names Other" in (
        unread(tmp_path)
    )


@pytest.mark.parametrize(
    ("line", "said"), [("YWI= x\n", r":1501: must be a token in base64"), ("YWI= 7\n", "each once")]
)
def test_damage_is_named(tmp_path, line, said):
    folder(tmp_path, "tiktoken.model")
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=said):
        opened(tmp_path)
