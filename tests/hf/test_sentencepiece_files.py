"""A learnt SentencePiece model as a tokenizer of transformers."""

import sysconfig
from pathlib import Path

import pytest
import tokenizers

from maxstack.data import vocabulary
from maxstack.data.tokenizers import open_tokenizer
from maxstack.hf import sentencepiece_files
from maxstack.hf.writer import write_json
from maxstack.schema.data import DataConfig, SentencePieceTokenizer

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
ODD = ["", "Grüß  \t日本\n\n 1234 <s>", "\N{GRINNING FACE}\r\n def", " a"]


@pytest.fixture(scope="module")
def learn(tmp_path_factory):
    """Learns a model of a kind from Python's source -> its file."""
    folder = tmp_path_factory.mktemp("learnt")
    source = {"kind": "text", "files": [f"{LIBRARY}/json/*.py"]}

    def learnt(kind):
        path = folder / f"{kind}.model"
        data = DataConfig.model_validate({"sources": [source]})
        vocabulary.train_vocabulary(data, str(path), vocab=600, model=kind)
        return path

    return learnt


@pytest.mark.slow
def test_the_files_give_the_ids_of_the_model(learn, tmp_path):
    path = learn("bpe")
    for name, content in sentencepiece_files.files_of(path).items():
        write_json(tmp_path / name, content)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    settings = {"kind": "sentencepiece", "path": str(path), "bos": False, "eos": False}
    model = open_tokenizer(SentencePieceTokenizer.model_validate(settings))
    plain = [file.read_text() for file in sorted((LIBRARY / "email").glob("*.py"))]
    for text in plain + ODD:
        made.encode_special_tokens = True  # as in data: what is spelt out is text
        assert made.encode(text).ids == model.encode(text.encode()).tolist()
    for text in plain:
        assert made.decode(made.encode(text).ids) == text
    made.encode_special_tokens = False
    assert made.encode("</s>", add_special_tokens=False).ids == [model.id_of("</s>")]


def test_no_files_are_made_of_a_model_that_cuts_in_another_way(learn):
    assert sentencepiece_files.files_of(learn("unigram")) == {}
