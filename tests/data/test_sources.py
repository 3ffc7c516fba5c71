import glob
import gzip
import json
import os
import pickle
import re
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from json_lines import lines_of_texts
from source_files import (
    contents,
    opened,
    source_of,
    texts_of,
    write_array_records,
    write_source,
)

from maxstack.data.documents import Tokens
from maxstack.data.files import match_files
from maxstack.data.shards import pack
from maxstack.data.sources import open_source
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig, SyntheticSource

TEXTS = ["first\nlines", "zweites d\u00f6kument", "3rd", "\U0001f600 fourth"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def keys(*patterns, **fields):
    """Keys of the files that a source of texts has."""
    return [file.key for file in match_files(source_of("text", *patterns, **fields))]


def test_each_text_file_is_a_document():
    for i, text in enumerate(TEXTS):
        write(f"corpus/{i}.txt", text)
    assert texts_of(opened("text", "corpus/*")) == TEXTS


def test_a_separator_splits_text_files_and_blank_documents_vanish():
    write("a.txt", "<|doc|>".join(["", *TEXTS[:2], " \n"]))
    write("b.txt", "<|doc|>".join(TEXTS[2:]))
    assert texts_of(opened("text", "?.txt", separator="<|doc|>")) == TEXTS


def test_jsonl_reads_the_field_of_each_line_and_passes_blank_lines_of_any_length():
    lines = [json.dumps({"body": text, "n": 1}) for text in TEXTS]
    blank = f"{' ' * 9}\n{lines[0]}\n{chr(9) * 500}\r\n \n"
    write("a.jsonl", blank + "\n".join(lines[1:]) + "    ")
    assert texts_of(opened("jsonl", "a.jsonl", field="body")) == TEXTS


@pytest.mark.parametrize("largest", [255, 65535, 65536, 2**31 - 1])
def test_array_record_reads_tokens_of_any_width(largest):
    ids = np.array([0, largest, 7], np.int32)
    write_array_records(
        "a.array_record", [pack(Tokens(ids, None)), pack(Tokens(ids[:0], np.array([[0, 70_000]])))]
    )
    first, second = opened("array_record", "a.array_record", content="tokens", partial=True)
    assert first.ids.dtype == np.int32 and first.ids.tolist() == ids.tolist()
    assert first.sizes is None
    assert second.ids.size == 0 and second.sizes.tolist() == [[0, 70_000]]


WRONG = b"caf\xe9 \xff!"
NOT_UTF8 = {
    "text": "01.txt: not UTF-8 at byte 3",
    "separated": "a.separated: record 1: not UTF-8 at byte 3",
    "jsonl": "a.jsonl: line 2: not UTF-8 at byte 13",
    "parquet": "a.parquet: record 1: not UTF-8 at byte 3",
    "array_record": "a.array_record: record 1: not UTF-8 at byte 3",
    "bagz": "a.bagz: record 1: not UTF-8 at byte 3",
}


@pytest.mark.parametrize("kind", NOT_UTF8)
def test_text_that_is_not_utf8_is_refused_replaced_or_kept_alike_in_every_kind_of_source(kind):
    fields = write_source(kind, [b"caf\xc3\xa9", WRONG])
    says = f"{NOT_UTF8[kind]}: invalid .* set encoding_errors of this source"
    with pytest.raises(DataError, match=says):
        texts_of(opened(**fields))
    replaced, kept = (opened(**fields, encoding_errors=how) for how in ("replace", "keep"))
    assert (replaced[1], kept[1]) == ("caf\ufffd \ufffd!".encode(), WRONG)


WIDE = "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize(
    ("kind", "policy"), [("jsonl", "refuse"), ("jsonl", "replace"), ("text", "refuse")]
)
def test_a_file_in_utf16_or_utf32_is_told_its_encoding_and_not_to_replace_bytes(
    kind, encoding, policy
):
    lines = '{"text": "one"}\n' * 3 + '{"text": "caf\u00e9"}\n'
    Path("a.file").write_bytes(lines.encode(encoding))
    name = encoding[:6].upper()
    says = f"not UTF-8: it begins as {name} does; .*iconv -f {name} -t UTF-8"
    with pytest.raises(DataError, match=says) as caught:
        texts_of(opened(kind, "a.file", encoding_errors=policy))
    assert "replace" not in str(caught.value)


def test_half_a_surrogate_pair_is_replaced_where_that_is_asked_for():
    write("a.jsonl", '{"text": "a\\ud800b"}\n')
    assert texts_of(opened("jsonl", "a.jsonl", encoding_errors="replace")) == ["a\ufffdb"]


def test_keeping_what_is_not_utf8_is_refused_for_a_tokenizer_that_reads_text():
    kept = {"kind": "text", "files": ["a.txt"], "encoding_errors": "keep"}
    DataConfig(sources=[kept])
    with pytest.raises(ValueError, match="is keep, but data.tokenizer is of kind sentencepiece"):
        DataConfig(sources=[kept], tokenizer={"kind": "sentencepiece", "path": "x"})


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ([], "\ufeffa\r\nb\rc\n"),
        (["bom"], "a\r\nb\rc\n"),
        (["newlines"], "\ufeffa\nb\nc\n"),
        (["bom", "newlines"], "a\nb\nc\n"),
    ],
)
def test_marks_and_line_ends_are_as_in_the_file_unless_they_are_normalized(normalize, expected):
    Path("a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    Path("a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"text": "\ufeffa\r\nb\rc\n"}).encode() + b"\r\n"
    )
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl")):
        assert texts_of(opened(kind, name, normalize=normalize)) == [expected]


def test_a_separator_with_a_line_end_is_found_in_any_line_ends_that_are_normalized():
    Path("a.txt").write_bytes(b"one\r\n--\r\ntwo\n--\nthree")
    for normalize, expected in (
        (["newlines"], ["one", "two", "three"]),
        ([], ["one\r\n--\r\ntwo", "three"]),
    ):
        found = opened("text", "a.txt", separator="\n--\n", normalize=normalize)
        assert texts_of(found) == expected


def test_synthetic_documents_are_the_same_each_time_and_within_bounds():
    first, second = ([*synthetic(documents=50, length=9, ragged=True, vocab=5)] for _ in range(2))
    assert all(map(np.array_equal, first, second))
    assert {*map(len, first)} == {*range(1, 10)} and max(map(max, first)) == 4
    assert {*map(len, synthetic(documents=5, length=9))} == {9}


def synthetic(**fields):
    return contents(open_source(SyntheticSource(kind="synthetic", **fields)))


@pytest.mark.parametrize("kind", ["jsonl", "array_record", "parquet"])
def test_an_opened_source_goes_to_another_process(kind):
    documents = opened(**write_source(kind, [b"a", b"b"]))
    assert texts_of(pickle.loads(pickle.dumps(documents))) == ["a", "b"]


def test_a_compressed_file_is_decompressed_once_and_again_when_it_changes():
    for copies, texts in enumerate((TEXTS, ["new text"]), 1):
        Path("a.jsonl.gz").write_bytes(gzip.compress(lines_of_texts(texts).encode()))
        for _ in range(2):
            assert texts_of(opened("jsonl", "a.jsonl.gz")) == texts
            assert len(os.listdir("cache/data")) == copies


@pytest.mark.parametrize(
    "pattern",
    [
        "*.py",
        "json/*.py",
        "./j*/*.py",
        "**/__init__.py",
        "[jk]*/**",
        "**",
        "email/../json/*.py",
        "json/tool.py",
    ],
)
def test_globs_match_what_the_glob_module_matches(pattern):
    for name in (
        "a.py",
        "json/tool.py",
        "json/__init__.py",
        "json/.hidden.py",
        ".git/x.py",
        "kit/deep/er/__init__.py",
        "email/mime.py",
        "b[1].py",
    ):
        write(name, "x")
    files = filter(os.path.isfile, glob.glob(pattern, recursive=True))
    expected = {*map(os.path.realpath, files)}
    found = {os.path.realpath(file.path) for file in match_files(source_of("text", pattern))}
    assert expected and found == expected


def test_a_folder_that_links_to_its_parent_is_walked_once():
    write("corpus/a.txt", "x")
    os.symlink("..", "corpus/loop")
    assert keys("corpus/**/*.txt") == ["a.txt"]


def test_stdlib_stands_for_the_standard_library_without_installed_packages():
    cfg = source_of("text", "{stdlib}/**/*.py", exclude=["{stdlib}/test/**"])
    first, *others = files = match_files(cfg)
    found = {file.key for file in files}
    assert others and {"os.py", "json/decoder.py"} <= found
    assert not any(key.startswith(("site-packages", "test/")) for key in found)
    assert os.path.samefile(first.path.removesuffix(first.key), sysconfig.get_path("stdlib"))


def test_holdout_splits_documents_without_loss_or_overlap_at_the_share():
    texts = [str(i) for i in range(2000)]
    write("a.jsonl", lines_of_texts(texts))
    train, held = (
        texts_of(opened("jsonl", "a.jsonl", holdout=0.05, split=split))
        for split in ("train", "eval")
    )
    assert sorted(train + held) == sorted(texts) and 60 < len(held) < 140


def test_holdout_depends_on_keys_alone_and_grows_with_the_share():
    for root in ("here", "there/deeper"):
        for i in range(100):
            write(f"{root}/{i}.txt", f"text {i}")

    def held(root, holdout):
        return texts_of(opened("text", f"{root}/*.txt", holdout=holdout, split="eval"))

    assert held("here", 0.2) == held("there/deeper", 0.2)
    assert {*held("here", 0.2)} < {*held("here", 0.4)}


PLAIN = [
    ("text", {}, None, "a.file: no such file"),
    ("text", {"files": ["*.txt"]}, None, "*.txt: the glob matches no file"),
    ("text", {"files": ["corpus/"]}, None, "corpus/: is a folder; corpus/** means all files in it"),
    ("text", {"exclude": ["*"]}, b"x", "a.file: every matching file is excluded by *"),
    ("jsonl", {"name": "web"}, b"\n\n", "web (a.file): no document"),
    ("text", {"separator": "---"}, b"", "(a.file): no document"),
    ("text", {"files": ["a.zst"]}, b"no zstd at all", "a.zst: corrupt zstd"),
    ("text", {"holdout": 1e-9, "split": "eval"}, b"x", "holdout=1e-09"),
    ("jsonl", {}, b'\n{"text": "x"}\n{\n', "a.file: line 3: not JSON"),
    ("jsonl", {}, b'{"body": "x"}', "a.file: line 1: no key 'text'; it has 'body'"),
    ("jsonl", {}, b'{"text": 3}', "a.file: line 1: 'text' is a int, not text"),
    ("jsonl", {}, b'{"text": "\\ud800"}', "a.file: line 1: 'text' holds half a surrogate pair"),
    ("jsonl", {}, b"[" * 200_000, "a.file: line 1: nested deeper"),
    ("parquet", {}, b"no parquet at all", "a.file: not a readable Parquet file"),
    ("bagz", {}, b"x" * 20, "a.file: not an intact Bagz file"),
]


@pytest.mark.parametrize(("kind", "fields", "content", "says"), PLAIN)
def test_damage_is_an_error_that_names_the_file_and_record(kind, fields, content, says):
    Path("corpus").mkdir()
    given = {"files": ["a.file"]} | fields
    if content is not None:
        Path(*given["files"]).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        texts_of(opened(kind, **given))
    assert "\n" not in str(caught.value)


def test_a_null_of_parquet_is_named_by_its_row():
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), "a.parquet")
    with pytest.raises(DataError, match="a.parquet: record 1: 'text' is null"):
        texts_of(opened("parquet", "a.parquet"))


def test_text_that_is_read_as_tokens_is_refused_with_advice():
    write_array_records("a.array_record", [b"plain text"])
    documents = opened("array_record", "a.array_record", content="tokens", partial=True)
    with pytest.raises(DataError, match="a.array_record: record 0: .*content: text"):
        documents[0]


def test_an_exclude_that_begins_with_two_stars_matches_in_any_folder(tmp_path):
    for name in ("a.txt", "test/b.txt", "deep/test/c.txt", "deep/contest/d.txt"):
        write(name, name)
    found = keys(f"{tmp_path}/**/*.txt", exclude=["**/test/**"])
    assert found == ["a.txt", "deep/contest/d.txt"]
