"""vocab.json and merges.txt without a tokenizer.json; scripts/oracle.py holds them to
transformers."""

import json

import pytest
import tokenizers

from maxstack.data import byte_level
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.hf.tokenizer import tokenizer_of, unread
from maxstack.schema.data import HuggingFaceTokenizer

TEXT = "It's 1234 cafe\u0301s,\r\n\n  DON'T\t<|endoftext|> <tool> "
FLAGS = "special", "lstrip", "rstrip", "single_word", "normalized"
TOOL = {"content": "<tool>"} | dict.fromkeys(FLAGS, False)


@pytest.fixture
def folder(tmp_path):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["It's 1234 cafes DON'T " * 9],
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.save_model(str(tmp_path))
    say(tmp_path, "config.json", model_type="gpt2")
    return tmp_path


def say(folder, name, **keys):
    (folder / name).write_text(json.dumps(keys))


def opened(folder):
    return open_tokenizer(HuggingFaceTokenizer.model_validate(tokenizer_of(folder)))


def of_the_library(folder):
    files = folder / "vocab.json", folder / "merges.txt"
    return tokenizers.ByteLevelBPETokenizer.from_file(*map(str, files))


def test_gpt2_files_give_the_ids_of_gpt2s_algorithm(folder):
    ours, theirs = opened(folder), of_the_library(folder)
    end, ids = ours.encode(b""), ours.encode(TEXT.encode())
    assert end.tolist() == [theirs.token_to_id("<|endoftext|>")]
    assert ids[:-1].tolist() == theirs.encode(TEXT).ids
    assert ours.decode(ids).decode() == TEXT and ours.token_bytes[end].sum() == 0


def test_qwen_files_cut_digits_one_by_one_compose_characters_and_name_their_end(folder):
    say(folder, "config.json", model_type="qwen3")
    size = len(json.loads((folder / "vocab.json").read_text()))
    say(folder, "added_tokens.json", **{"<|im_end|>": size, "<tool>": size + 1})
    say(folder, "special_tokens_map.json", eos_token="<|im_end|>")
    ours = opened(folder)
    assert ours.encode(b" <tool>").tolist()[-2:] == [size + 1, size]
    assert len(ours.encode(b"1234")) == 5 > len(opened_as_gpt2(folder).encode(b"1234"))
    assert ours.decode(ours.encode(TEXT.encode())).decode() == TEXT.replace("e\u0301", "\u00e9")


def opened_as_gpt2(folder):
    say(folder, "config.json", model_type="gpt2")
    open_tokenizer.cache_clear()
    return opened(folder)


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [("llama", "GPT2Tokenizer"), ("gpt2", "Qwen2Tokenizer"), ("olmo2", None), ("qwen3_5", None)],
)
def test_files_whose_splitting_is_not_known_are_no_tokenizer(folder, model_type, tokenizer_class):
    say(folder, "config.json", model_type=model_type)
    say(folder, "tokenizer_config.json", tokenizer_class=tokenizer_class)
    assert tokenizer_of(folder) is None
    assert (
        f"model_type={model_type}, tokenizer_class={tokenizer_class} that is not known"
        in unread(folder)
    )


def test_a_tokenizer_json_that_is_no_file_does_not_give_way_to_others(folder):
    (folder / "tokenizer.json").symlink_to("nowhere")
    assert tokenizer_of(folder) is None and "tokenizer.json is no file" in unread(folder)


def test_an_added_token_whose_id_leaves_a_gap_is_refused_in_either_form(folder):
    spec = json.loads(of_the_library(folder).to_str())
    spec["added_tokens"] = [TOOL | {"id": 1000}]
    say(folder, "tokenizer_config.json", added_tokens_decoder={"1000": TOOL})
    with pytest.raises(DataError, match="added token '<tool>' has id 1000"):
        opened(folder)
    say(folder, "tokenizer.json", **spec)
    with pytest.raises(DataError, match=r"tokenizer.json: added token '<tool>' has id 1000"):
        opened(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("merges.txt", "a b c\n"),
        ("vocab.json", "{"),
        ("tokenizer_config.json", "{"),
        ("config.json", "[]"),
        ("special_tokens_map.json", "\xff"),
    ],
)
def test_damaged_files_are_named(folder, file, text):
    (folder / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"vocab.json with merges.txt|" + file):
        opened(folder)


@pytest.mark.parametrize(
    ("file", "keys", "says"),
    [
        ("vocab.json", {}, "vocab.json: holds no token"),
        ("vocab.json", {"d": 3, "zz": 3}, "vocab.json: tokens 'd' and 'zz' have the same id, 3"),
        ("vocab.json", {"zz": "5"}, "vocab.json: token 'zz' has id '5'"),
        ("vocab.json", {"zz": -1}, "vocab.json: token 'zz' has id -1"),
        ("added_tokens.json", {"<a>": "5"}, "added_tokens.json: token '<a>' has id '5'"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": 1}},
            "tokenizer_config.json: added_tokens_decoder: key 'x' is no id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": 1}},
            "tokenizer_config.json: added_tokens_decoder: key '5' has 1",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": 3},
            "tokenizer_config.json: added_tokens_decoder=3",
        ),
    ],
)
def test_ids_that_are_not_distinct_whole_numbers_are_refused_by_file_and_token(
    folder, file, keys, says
):
    say(folder, file, **keys)
    with pytest.raises(DataError, match=says):
        opened(folder)


def test_characters_of_tokens_are_the_bytes_of_the_tokenizers_library():
    text = "".join(map(chr, (*range(1, 0xD800), *range(0xFFFD, 0x110000, 4096))))
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((written, _),) = split.pre_tokenize_str(text)
    assert byte_level.bytes_of(written) == text.encode()
    assert byte_level.bytes_of("\u4e2d a") == "\u4e2d a".encode()
