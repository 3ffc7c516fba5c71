"""GGUF files: the header, hostile ones too, and the tokenizer of its metadata."""

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from gguf_files import write_gguf
from tokenizer_files import learn_byte_level, learn_pieces
from tokenizers import Tokenizer, decoders, pre_tokenizers

from maxstack.data import hub
from maxstack.data.chat import open_template, read_ends
from maxstack.data.gguf.file import GgufFile
from maxstack.errors import ConfigError, DataError
from maxstack.hf.contents import Contents
from maxstack.hf.reader import pieces_of
from maxstack.hf.tokenizer import tokenizer_of, unread
from maxstack.models.model import weights_of
from maxstack.schema.data import DataConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
TEXTS = [
    "def f(x):\n    return x + 1  # don't",
    "  two  and    more\t\n\n 1234567 3.14",
    "Grüße, 日本語 \N{GRINNING FACE} e\u0301 \u2167\xb2",
    "a<|end|>b <think> <s></s>",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))


def made_tokenizer(file):
    return Tokenizer.from_file(str(hub.model_folder(str(file), False) / "tokenizer.json"))


def ids_of(tokenizer):
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def vocab_of(learnt, **more):
    spec = json.loads(learnt.to_str())
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    special = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_a_byte_level_vocabulary_cuts_texts_as_its_name_says(tmp_path):
    learnt = learn_byte_level(TEXTS * 3, 330, ["<|end|>"])
    # SmolLM2's: each digit by itself, before GPT-2's words.
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level])
    learnt.decoder = decoders.ByteLevel()
    vocab = vocab_of(learnt, pre="smollm", eos_token_id=0, bos_token_id=0, eot_token_id=5)
    vocab["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    file = write_gguf(tmp_path / "bytes.gguf", GOLDENS / "llama", vocab=vocab)
    assert ids_of(made_tokenizer(file)) == ids_of(learnt)
    folder = hub.model_folder(str(file), False)
    assert read_ends(folder) == {0, 5}
    tokenizer = tokenizer_of(folder)
    assert (tokenizer["bos"], tokenizer["eos"]) == (None, "<|end|>")
    data = {"sources": [{"kind": "synthetic", "vocab": 2}], "seq_len": 1}
    template = open_template(DataConfig.model_validate({**data, "tokenizer": tokenizer}))
    assert template.render([{"role": "user", "content": "Hi"}]) == "<|end|>Hi"


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_are_merged_as_sentencepiece_does(prefix, tmp_path):
    spaces = [] if prefix else ["\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n"]
    path = learn_pieces(
        tmp_path / "pieces",
        TEXTS * 3,
        420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=spaces,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    kinds = [2, 3, 3, *(6 if model.is_byte(i) else 1 for i in range(3, len(pieces)))]
    kinds = [4 if piece in spaces else kind for piece, kind in zip(pieces, kinds, strict=True)]
    vocab = {
        "model": "llama",
        "pre": None,
        "merges": None,
        # As the converter spells what a user has defined.
        "tokens": [p.replace("\u2581", " ") if p in spaces else p for p in pieces],
        "scores": [float(model.get_score(i)) for i in range(len(pieces))],
        "token_type": kinds,
        "add_space_prefix": prefix,
        "eos_token_id": None,
    }
    vocab = {f"tokenizer.ggml.{key}": value for key, value in vocab.items()}
    file = write_gguf(tmp_path / "pieces.gguf", GOLDENS / "gemma2", vocab=vocab)
    made, plain = made_tokenizer(file), TEXTS[:3]
    assert [made.encode(text, add_special_tokens=False).ids for text in plain] == model.encode(
        plain
    )
    assert [made.decode(model.encode(text)) for text in plain] == plain
    assert made.encode("a").tokens[0] == "<s>"


def test_weights_are_of_use_without_a_known_tokenizer(tmp_path):
    vocab = {"tokenizer.ggml.pre": "of-tomorrow"}
    file = write_gguf(tmp_path / "new.gguf", GOLDENS / "llama", vocab=vocab)
    assert len(Contents(file).tensors) == 30
    folder = hub.model_folder(str(file), False)
    assert tokenizer_of(folder) is None
    assert "pre='of-tomorrow', which says how a text is cut into words" in unread(folder)


REFUSED = {
    "general.architecture='mamba' is not supported; of GGUF files these are read: llama, qwen2": {
        "general.architecture": "mamba"
    },
    "llama.expert_weights_scale: not known": {"llama.expert_weights_scale": 2.0},
    "llama.attention.head_count='many': is no value": {"llama.attention.head_count": "many"},
    "llama.rope.scaling.type='new': supported: none": {"llama.rope.scaling.type": "new"},
    "heads of 8 are rotated whole": {"llama.rope.dimension_count": 4},
    "general.type='adapter': is no model": {"general.type": "adapter"},
    "is one of 3 parts": {"split.count": 3},
    "has fewer tensors than llama.block_count": {"llama.block_count": 1 << 31},
    "llama.embedding_length=None: must be 1": {"llama.embedding_length": None},
    "missing model.layers.3.input_layernorm.weight": {"llama.block_count": 4},
    r"shape \[24, 16\], and this model makes it \[32, 16\]": {"llama.feed_forward_length": 32},
}


@pytest.mark.parametrize("message", REFUSED)
def test_metadata_that_are_not_understood_are_refused_by_name(message, tmp_path):
    file = write_gguf(tmp_path / "odd.gguf", GOLDENS / "mixtral", **REFUSED[message])
    with pytest.raises((ConfigError, DataError), match=f"^{file}.*{message}"):
        contents = Contents(file)
        shapes = {path: leaf.shape for path, leaf in weights_of(contents.model).items()}
        pieces_of(contents, shapes)


def header(keys=b"", count=0, tensors=b"", number=0):
    return b"GGUF" + struct.pack("<IQQ", 3, number, count) + keys + tensors


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name, sizes, kind, offset):
    described = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return text(name) + described


ARRAY, TEXT, U8 = 9, 8, 0
PAIR = tensor(b"a", [8], 0, 0) + tensor(b"b", [8], 0, 16)
HOSTILE = {
    "is no GGUF file": b"PK\3\4",
    "begins with b'', so": b"",
    "byte 4 of the header": b"GGUF\3",
    "GGUF version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "claims 1,152,921,504,606,846,976 tensors": header(number=1 << 60),
    "claims 0 tensors and 281,474,976,710,656 keys": header(count=1 << 48),
    "key 'k' with 1,000,000,000 values": header(text(b"k") + struct.pack("<IIQ", 9, 0, 10**9), 1),
    "key 'k' with 900,000,000 values": header(text(b"k") + struct.pack("<IIQ", 9, 8, 9 * 10**8), 1),
    "a text of 9,223,372,036,854,775,808 bytes": header(struct.pack("<Q", 1 << 63) + b" " * 20, 1),
    "is an array of the type 9": header(text(b"k") + struct.pack("<IIQ", 9, 9, 1), 1),
    "has the unknown type 77": header(text(b"k") + struct.pack("<Id", 77, 0), 1),
    "'k' is there twice": header(2 * (text(b"k") + struct.pack("<Id", 12, 0)), 2),
    "invalid start byte": header(text(b"\xff") + struct.pack("<Id", 12, 0), 1),
    "tensor b overlaps tensor a": header(tensors=PAIR + bytes(99), number=2),
    "a is there twice": header(tensors=2 * tensor(b"a", [1], 0, 0), number=2),
    "ends at byte": header(tensors=tensor(b"a", [1 << 40], 0, 0), number=1),
    "of 5 dimensions": header(tensors=tensor(b"a", [1] * 5, 0, 0), number=1),
    "has sizes": header(tensors=tensor(b"a", [1 << 62], 0, 0), number=1),
    "has ggml type 99": header(tensors=tensor(b"a", [32], 99, 0), number=1),
    "are no whole blocks of 32": header(tensors=tensor(b"a", [40], 8, 0), number=1),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_header_is_refused(message, tmp_path):
    file = tmp_path / "hostile.gguf"
    file.write_bytes(HOSTILE[message])
    with pytest.raises((ConfigError, DataError), match=f"^{file}.*{message}"):
        GgufFile(file).check_sizes()


def test_a_folder_a_pipe_and_an_absent_file_are_told(tmp_path):
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "a.gguf" / "inside.gguf").touch()
    os.mkfifo(tmp_path / "b.gguf")
    for name, message in {
        "a": "config.json: no such file; give .*inside.gguf",
        "b": "is a pipe, a socket or a device",
        "c": "cannot be read: No such file",
    }.items():
        with pytest.raises((ConfigError, DataError), match=message):
            Contents(tmp_path / f"{name}.gguf")


def test_a_damaged_file_gives_no_other_error(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", GOLDENS / "llama").read_bytes()
    draws = np.random.default_rng(0)
    for number in range(200):
        damaged = bytearray(whole[: draws.integers(24, len(whole))] if number % 2 else whole)
        damaged[draws.integers(4, min(len(damaged), 1500))] = draws.integers(256)
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(damaged)
        try:
            Contents(file)
        except (ConfigError, DataError) as error:
            assert str(file) in str(error)


def test_an_absent_package_is_named_with_its_extra(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "small.gguf", GOLDENS / "phi4_mini", quantize="Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"tensor .* is quantized.*maxstack\[gguf\]|\[gguf\]"):
        Contents(file)
