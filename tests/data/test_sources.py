import glob
import gzip
import json
import os
import pickle
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import TypeAdapter

from maxstack.data.documents import Tokens
from maxstack.data.files import matched
from maxstack.data.shards import pack
from maxstack.data.sources import open_source
from maxstack.errors import DataError, installing
from maxstack.schema.data import AnySource, DataConfig

TEXTS = ["first\nlines", "zweites d\u00f6kument", "3rd", "\U0001f600 fourth"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    return tmp_path


def source(kind, **fields):
    return TypeAdapter(AnySource).validate_python({"kind": kind, **fields})


def write(name, data):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        half = len(data) // 2
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    Path(name).write_bytes(data)


def write_array_records(name, records):
    writer = ArrayRecordWriter(name, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def lines(texts=TEXTS, field="text"):
    return "".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts)


def texts(documents):
    return [documents[i].decode() for i in range(len(documents))]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_each_text_file_is_a_document(ending):
    for i, text in enumerate(TEXTS):
        write(f"corpus/{i}.txt{ending}", text)
    assert texts(open_source(source("text", files=["corpus/*"]))) == TEXTS


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_separator_splits_text_files_and_blank_documents_vanish(ending):
    write(f"a.txt{ending}", "<|doc|>".join(["", *TEXTS[:2], " \n"]))
    write(f"b.txt{ending}", "<|doc|>".join(TEXTS[2:]))
    assert texts(open_source(source("text", files=["?.txt*"], separator="<|doc|>"))) == TEXTS


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_jsonl_reads_the_field_of_each_line_and_passes_blank_lines(ending):
    write(
        f"a.jsonl{ending}",
        lines(TEXTS[:3], "body") + "\n\r\n" + lines(TEXTS[3:], "body").rstrip("\n"),
    )
    assert texts(open_source(source("jsonl", files=[f"a.jsonl{ending}"], field="body"))) == TEXTS


def test_array_record_reads_text():
    write_array_records("a.array_record", [text.encode() for text in TEXTS])
    assert texts(open_source(source("array_record", files=["a.array_record"]))) == TEXTS


@pytest.mark.parametrize("largest", [255, 65535, 65536, 2**31 - 1])
def test_array_record_reads_tokens_of_any_width(largest):
    ids = np.array([0, largest, 7], np.int32)
    write_array_records(
        "a.array_record", [pack(Tokens(ids, None)), pack(Tokens(ids[:0], np.array([[0, 70_000]])))]
    )
    cfg = source("array_record", files=["a.array_record"], content="tokens", partial=True)
    documents = open_source(cfg)
    assert (
        documents[0].ids.dtype == np.int32
        and documents[0].ids.tolist() == ids.tolist()
        and documents[0].sizes is None
    )
    assert documents[1].ids.size == 0 and documents[1].sizes.tolist() == [[0, 70_000]]


def test_bagz_reads_text():
    bagz = pytest.importorskip("bagz")
    with bagz.Writer("a.bagz") as writer:
        for text in TEXTS:
            writer.write(text.encode())
    assert texts(open_source(source("bagz", files=["a.bagz"]))) == TEXTS


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("bagz", "bagz")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(kind, package, monkeypatch):
    write("a.file", "x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package} package: {re.escape(installing(kind))}"):
        open_source(source(kind, files=["a.file"]))


WRONG = b"caf\xe9 \xff!"


def not_utf8(kind):
    """A file whose second document is not UTF-8; the words that tell where."""
    texts = [b"caf\xc3\xa9", WRONG]
    if kind == "text":
        Path("b.txt").write_bytes(WRONG)
        return {"files": ["b.txt"]}, "b.txt: not UTF-8 at byte 3"
    if kind == "separated":
        Path("a.txt").write_bytes(b"---".join(texts))
        return {
            "kind": "text",
            "files": ["a.txt"],
            "separator": "---",
        }, "a.txt: record 1: not UTF-8 at byte 3"
    if kind == "jsonl":
        Path("a.jsonl").write_bytes(b"".join(b'{"text": "%s"}\n' % text for text in texts))
        return {"files": ["a.jsonl"]}, "a.jsonl: line 2: not UTF-8 at byte 13"
    if kind == "parquet":
        offsets = pyarrow.py_buffer(np.cumsum([0, *map(len, texts)], dtype=np.int32).tobytes())
        column = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"".join(texts)))
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), "a.parquet")
        return {"files": ["a.parquet"]}, "a.parquet: record 1: not UTF-8 at byte 3"
    if kind == "bagz":
        with pytest.importorskip("bagz").Writer("a.bagz") as writer:
            for text in texts:
                writer.write(text)
        return {"files": ["a.bagz"]}, "a.bagz: record 1: not UTF-8 at byte 3"
    write_array_records("a.array_record", texts)
    return {"files": ["a.array_record"]}, "a.array_record: record 1: not UTF-8 at byte 3"


@pytest.mark.parametrize("kind", ["text", "separated", "jsonl", "parquet", "array_record", "bagz"])
def test_text_that_is_not_utf8_is_refused_replaced_or_kept_alike_in_every_kind_of_source(kind):
    fields, words = not_utf8(kind)
    fields = {"kind": kind} | fields
    with pytest.raises(DataError, match=f"{words}: invalid .* set encoding_errors of this source"):
        texts(open_source(source(**fields)))
    opened = {
        policy: open_source(source(**fields, encoding_errors=policy))
        for policy in ("replace", "keep")
    }
    assert {policy: documents[len(documents) - 1] for policy, documents in opened.items()} == {
        "replace": "caf\ufffd \ufffd!".encode(),
        "keep": WRONG,
    }


WIDE = "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"


@pytest.mark.parametrize(
    ("kind", "encoding", "policy"),
    [
        *(("jsonl", encoding, policy) for encoding in WIDE for policy in ("refuse", "replace")),
        *(("text", encoding, "refuse") for encoding in ("utf-16", "utf-16-le", "utf-32")),
    ],
)
def test_a_file_in_utf16_or_utf32_is_told_its_encoding_and_not_to_replace_bytes(
    kind, encoding, policy
):
    lines = '{"text": "one"}\n' * 3 + '{"text": "caf\u00e9"}\n'
    Path("a.file").write_bytes(lines.encode(encoding))
    documents = open_source(source(kind, files=["a.file"], encoding_errors=policy))
    name = encoding[:6].upper()
    says = f"not UTF-8: it begins as {name} does; .*iconv -f {name} -t UTF-8"
    with pytest.raises(DataError, match=says) as caught:
        texts(documents)
    assert "replace" not in str(caught.value)


def test_half_a_surrogate_pair_is_replaced_where_that_is_asked_for():
    write("a.jsonl", '{"text": "a\\ud800b"}\n')
    assert texts(open_source(source("jsonl", files=["a.jsonl"], encoding_errors="replace"))) == [
        "a\ufffdb"
    ]


def test_keeping_what_is_not_utf8_is_refused_for_a_tokenizer_that_reads_text():
    kept = {"kind": "text", "files": ["a.txt"], "encoding_errors": "keep"}
    DataConfig(sources=[kept])
    with pytest.raises(ValueError, match="is keep, but data.tokenizer is of kind sentencepiece"):
        DataConfig(sources=[kept], tokenizer={"kind": "sentencepiece", "path": "x"})


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ([], ["\ufeffa\r\nb\rc\n"]),
        (["bom"], ["a\r\nb\rc\n"]),
        (["newlines"], ["\ufeffa\nb\nc\n"]),
        (["bom", "newlines"], ["a\nb\nc\n"]),
    ],
)
def test_marks_and_line_ends_are_as_in_the_file_unless_they_are_normalized(normalize, expected):
    Path("a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    Path("a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"text": "\ufeffa\r\nb\rc\n"}).encode() + b"\r\n"
    )
    assert texts(open_source(source("text", files=["a.txt"], normalize=normalize))) == expected
    assert texts(open_source(source("jsonl", files=["a.jsonl"], normalize=normalize))) == expected


def test_a_separator_with_a_line_end_is_found_in_any_line_ends_that_are_normalized():
    Path("a.txt").write_bytes(b"one\r\n--\r\ntwo\n--\nthree")
    cfg = {"files": ["a.txt"], "separator": "\n--\n"}
    assert texts(open_source(source("text", **cfg, normalize=["newlines"]))) == [
        "one",
        "two",
        "three",
    ]
    assert texts(open_source(source("text", **cfg))) == ["one\r\n--\r\ntwo", "three"]


def test_synthetic_documents_are_the_same_each_time_and_within_bounds():
    cfg = source("synthetic", documents=50, length=9, ragged=True, vocab=5)
    first, second = open_source(cfg), open_source(cfg)
    assert all((first[i] == second[i]).all() for i in range(50))
    assert {len(first[i]) for i in range(50)} == set(range(1, 10))
    assert max(first[i].max() for i in range(50)) == 4
    assert {len(open_source(source("synthetic", documents=5, length=9))[i]) for i in range(5)} == {
        9
    }


def test_an_opened_source_goes_to_another_process():
    write("a.jsonl", lines())
    write_array_records("a.array_record", [text.encode() for text in TEXTS])
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "a.parquet")
    for cfg in (
        source("jsonl", files=["a.jsonl"]),
        source("array_record", files=["a.array_record"]),
        source("parquet", files=["a.parquet"]),
    ):
        documents = open_source(cfg)
        assert texts(documents) == texts(pickle.loads(pickle.dumps(documents)))


def test_a_compressed_file_is_decompressed_once_and_again_when_it_changes():
    write("a.jsonl.gz", lines())
    cfg = source("jsonl", files=["a.jsonl.gz"])
    open_source(cfg)
    assert len(os.listdir("cache/data")) == 1
    assert texts(open_source(cfg)) == TEXTS and len(os.listdir("cache/data")) == 1
    write("a.jsonl.gz", lines(["new text"]))
    assert texts(open_source(cfg)) == ["new text"] and len(os.listdir("cache/data")) == 2


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
def test_globs_match_what_the_glob_module_matches(pattern, monkeypatch, folder):
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
    expected = {
        os.path.realpath(path)
        for path in glob.glob(pattern, recursive=True)
        if os.path.isfile(path)
    }
    assert (
        expected
        and {os.path.realpath(file.path) for file in matched(source("text", files=[pattern]))}
        == expected
    )


def test_a_folder_that_links_to_its_parent_is_walked_once():
    write("corpus/a.txt", "x")
    os.symlink("..", "corpus/loop")
    assert [file.key for file in matched(source("text", files=["corpus/**/*.txt"]))] == ["a.txt"]


def test_stdlib_stands_for_the_standard_library_without_installed_packages():
    files = matched(source("text", files=["{stdlib}/**/*.py"], exclude=["{stdlib}/test/**"]))
    keys = {file.key for file in files}
    assert {"os.py", "json/decoder.py"} <= keys and not any(
        key.startswith(("site-packages", "test/")) for key in keys
    )
    assert os.path.samefile(files[0].path.removesuffix(files[0].key), sysconfig.get_path("stdlib"))


def test_holdout_splits_documents_without_loss_or_overlap():
    for i in range(200):
        write(f"corpus/{i}.txt", f"text {i}")
    cfg = source("text", files=["corpus/*.txt"], holdout=0.2)
    train, held = texts(open_source(cfg)), texts(open_source(cfg, split="eval"))
    assert sorted(train + held) == sorted(f"text {i}" for i in range(200)) and 20 < len(held) < 60


def test_holdout_depends_on_keys_alone_and_grows_with_the_share():
    for root in ("here", "there/deeper"):
        for i in range(100):
            write(f"{root}/{i}.txt", f"text {i}")
    held = [
        texts(open_source(source("text", files=[f"{root}/*.txt"], holdout=0.2), split="eval"))
        for root in ("here", "there/deeper")
    ]
    os.remove("there/deeper/0.txt")
    assert held[0] == held[1]
    assert set(held[0]) < set(
        texts(open_source(source("text", files=["here/*.txt"], holdout=0.4), split="eval"))
    )


def test_holdout_of_records_keeps_the_expected_share():
    write("a.jsonl", lines([str(i) for i in range(2000)]))
    assert (
        60 < len(open_source(source("jsonl", files=["a.jsonl"], holdout=0.05), split="eval")) < 140
    )


def flip(name, at):
    data = bytearray(Path(name).read_bytes())
    data[at] ^= 1
    Path(name).write_bytes(data)


def broken(case):
    """Files for one kind of damage: (source, the words that the message must hold)."""
    if case == "missing":
        return source("text", files=["corpus/none.txt"]), ["corpus/none.txt", "no such file"]
    if case == "folder":
        Path("corpus").mkdir()
        return source("text", files=["corpus/"]), [
            "corpus/: is a folder; corpus/** means all files in it"
        ]
    if case == "no match":
        return source("text", files=["corpus/*.txt"]), ["corpus/*.txt", "matches no file"]
    if case == "all excluded":
        write("a.txt", "x")
        return source("text", files=["a.txt"], exclude=["*.txt"]), ["a.txt", "excluded"]
    if case == "empty jsonl":
        write("a.jsonl", "\n\n")
        return source("jsonl", name="web", files=["a.jsonl"]), ["web", "a.jsonl", "no document"]
    if case == "empty separated":
        write("a.txt", "")
        return source("text", files=["a.txt"], separator="---"), ["a.txt", "no document"]
    if case == "not json":
        write("a.jsonl", "\n" + lines(["x"]) + "{\n")
        return source("jsonl", files=["a.jsonl"]), ["a.jsonl: line 3", "not JSON"]
    if case == "missing key":
        write("a.jsonl", lines(["x"], "body"))
        return source("jsonl", files=["a.jsonl"]), ["a.jsonl: line 1", "'text'", "'body'"]
    if case == "number instead of text":
        write("a.jsonl", '{"text": 3}\n')
        return source("jsonl", files=["a.jsonl"]), ["a.jsonl: line 1", "a int, not text"]
    if case == "half a surrogate":
        write("a.jsonl", '{"text": "\\ud800"}\n')
        return source("jsonl", files=["a.jsonl"]), ["a.jsonl: line 1", "surrogate"]
    if case == "deep json":
        write("a.jsonl", "[" * 200_000 + "\n")
        return source("jsonl", files=["a.jsonl"]), ["a.jsonl: line 1: nested deeper"]
    if case == "cut gzip":
        Path("a.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
        return source("text", files=["a.txt.gz"]), ["a.txt.gz", "gzip"]
    if case == "flipped gzip":
        write("a.jsonl.gz", lines())
        flip("a.jsonl.gz", 30)
        return source("jsonl", files=["a.jsonl.gz"]), ["a.jsonl.gz", "gzip"]
    if case == "cut zstd":
        Path("a.txt.zst").write_bytes(zstandard.compress(os.urandom(3000))[:-9])
        return source("text", files=["a.txt.zst"]), ["a.txt.zst", "cut short"]
    if case == "not zstd":
        Path("a.txt.zst").write_bytes(b"no zstd at all")
        return source("text", files=["a.txt.zst"]), ["a.txt.zst", "zstd"]
    return broken_shard(case)


def broken_shard(case):
    if case == "not parquet":
        write("a.parquet", "no parquet at all")
        return source("parquet", files=["a.parquet"]), ["a.parquet", "Parquet"]
    if case == "missing column":
        pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), "a.parquet")
        return source("parquet", files=["a.parquet"]), ["a.parquet", "'text'", "body"]
    if case == "null":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), "a.parquet")
        return source("parquet", files=["a.parquet"]), ["a.parquet: record 1", "null"]
    if case == "flipped array record":
        write_array_records("a.array_record", [os.urandom(300) for _ in range(4)])
        flip("a.array_record", Path("a.array_record").stat().st_size // 2 + 16)
        return source("array_record", files=["a.array_record"]), ["a.array_record"]
    if case == "cut array record":
        write_array_records("a.array_record", [os.urandom(300) for _ in range(4)])
        Path("a.array_record").write_bytes(Path("a.array_record").read_bytes()[:5000])
        return source("array_record", files=["a.array_record"]), ["a.array_record", "intact"]
    if case == "text for tokens":
        write_array_records("a.array_record", [b"plain text"])
        cfg = source("array_record", files=["a.array_record"], content="tokens", partial=True)
        return cfg, [
            "a.array_record: record 0",
            "content: text",
        ]
    assert case == "cut bagz"
    pytest.importorskip("bagz")
    Path("a.bagz").write_bytes(b"x" * 20)
    return source("bagz", files=["a.bagz"]), ["a.bagz", "Bagz"]


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "folder",
        "no match",
        "all excluded",
        "empty jsonl",
        "empty separated",
        "not json",
        "missing key",
        "number instead of text",
        "half a surrogate",
        "deep json",
        "cut gzip",
        "flipped gzip",
        "cut zstd",
        "not zstd",
        "not parquet",
        "missing column",
        "null",
        "flipped array record",
        "cut array record",
        "text for tokens",
        "cut bagz",
    ],
)
def test_damage_is_an_error_that_names_the_file_and_record(case):
    cfg, words = broken(case)
    with pytest.raises(DataError) as caught:
        documents = open_source(cfg)
        for i in range(len(documents)):
            documents[i]
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_a_holdout_that_keeps_nothing_is_an_error():
    write("a.txt", "x")
    with pytest.raises(DataError, match="holdout=1e-09"):
        open_source(source("text", files=["a.txt"], holdout=1e-9), split="eval")


def test_an_exclude_that_begins_with_two_stars_matches_in_any_folder(tmp_path):
    for name in ("a.txt", "test/b.txt", "deep/test/c.txt", "deep/contest/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    cfg = TypeAdapter(AnySource).validate_python(
        {"kind": "text", "files": [f"{tmp_path}/**/*.txt"], "exclude": ["**/test/**"]}
    )
    assert [file.key for file in matched(cfg)] == ["a.txt", "deep/contest/d.txt"]
