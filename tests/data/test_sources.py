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
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import TypeAdapter

from maxstack.data.documents import Tokens
from maxstack.data.files import match_files
from maxstack.data.shards import pack
from maxstack.data.sources import open_source
from maxstack.errors import DataError
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


def test_a_separator_splits_text_files_and_blank_documents_vanish():
    write("a.txt", "<|doc|>".join(["", *TEXTS[:2], " \n"]))
    write("b.txt.gz", "<|doc|>".join(TEXTS[2:]))
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


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize(
    ("kind", "policy"), [("jsonl", "refuse"), ("jsonl", "replace"), ("text", "refuse")]
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
        and {os.path.realpath(file.path) for file in match_files(source("text", files=[pattern]))}
        == expected
    )


def test_a_folder_that_links_to_its_parent_is_walked_once():
    write("corpus/a.txt", "x")
    os.symlink("..", "corpus/loop")
    assert [file.key for file in match_files(source("text", files=["corpus/**/*.txt"]))] == [
        "a.txt"
    ]


def test_stdlib_stands_for_the_standard_library_without_installed_packages():
    files = match_files(source("text", files=["{stdlib}/**/*.py"], exclude=["{stdlib}/test/**"]))
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


PLAIN = [
    ("text", {}, None, "a.file: no such file"),
    ("text", {"files": ["*.txt"]}, None, "*.txt: the glob matches no file"),
    ("text", {"exclude": ["*"]}, b"x", "a.file: every matching file is excluded by *"),
    ("jsonl", {"name": "web"}, b"\n\n", "web (a.file): no document"),
    ("text", {"separator": "---"}, b"", "(a.file): no document"),
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
    if content is not None:
        Path("a.file").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        texts(open_source(source(kind, **{"files": ["a.file"]} | fields)))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file_of_a_source():
    Path("corpus").mkdir()
    with pytest.raises(DataError, match=r"corpus/: is a folder; corpus/\*\* means all files in it"):
        open_source(source("text", files=["corpus/"]))


def test_what_is_no_zstd_is_named_where_the_name_says_that_it_is():
    Path("a.zst").write_bytes(b"no zstd at all")
    with pytest.raises(DataError, match="a.zst: corrupt zstd"):
        texts(open_source(source("text", files=["a.zst"])))


def test_a_null_of_parquet_is_named_by_its_row():
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), "a.parquet")
    with pytest.raises(DataError, match="a.parquet: record 1: 'text' is null"):
        texts(open_source(source("parquet", files=["a.parquet"])))


def test_text_that_is_read_as_tokens_is_refused_with_advice():
    write_array_records("a.array_record", [b"plain text"])
    cfg = source("array_record", files=["a.array_record"], content="tokens", partial=True)
    with pytest.raises(DataError, match="a.array_record: record 0: .*content: text"):
        open_source(cfg)[0]


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
    assert [file.key for file in match_files(cfg)] == ["a.txt", "deep/contest/d.txt"]
