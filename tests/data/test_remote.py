"""Data at URLs, end to end: fsspec's memory:// and file:// stand for gs:// and s3://."""

import gzip
import json
import os
import shutil
import time

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import TypeAdapter

from maxstack.config import storage
from maxstack.data.feed import Feed
from maxstack.data.files import match_files
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.schema.data import AnySource, DataConfig, HuggingFaceTokenizer

TEXTS = [f"document {i} with some text" for i in range(20)]


@pytest.fixture(params=["memory", "file"])
def bucket(request, tmp_path, monkeypatch):
    """The URL of an empty folder; processes do not share memory://."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    open_tokenizer.cache_clear()
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket"


def source(kind, **fields):
    return TypeAdapter(AnySource).validate_python({"kind": kind, **fields})


def upload(url):
    """The files of the folder `files`, at a URL."""
    for folder, _, names in os.walk("files"):
        for name in names:
            path = os.path.join(folder, name)
            with storage.replacing(storage.join(url, os.path.relpath(path, "files"))) as copy:
                shutil.copy(path, copy)


def written(kind):
    """Files of TEXTS in the folder `files`, and the source that reads them below `{}`."""
    os.mkdir("files")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    if kind == "text":
        for i, text in enumerate(TEXTS):
            with open(f"files/{i:02d}.txt", "w") as file:
                file.write(text)
        return {"kind": "text", "files": "{}/*.txt"}
    if kind == "separated":
        with open("files/a.txt", "w") as file:
            file.write("---".join(TEXTS))
        return {"kind": "text", "files": "{}/a.txt", "separator": "---"}
    if kind == "jsonl":
        with open("files/a.jsonl", "wb") as file:
            file.write(lines)
        return {"kind": "jsonl", "files": "{}/a.jsonl"}
    if kind == "jsonl.gz":
        with open("files/a.jsonl.gz", "wb") as file:
            file.write(gzip.compress(lines))
        return {"kind": "jsonl", "files": "{}/*.gz"}
    if kind == "parquet":
        table = pyarrow.table({"text": TEXTS})
        pyarrow.parquet.write_table(table, "files/a.parquet", row_group_size=6)
        return {"kind": "parquet", "files": "{}/**"}
    writer = ArrayRecordWriter("files/a.array_record", "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return {"kind": "array_record", "files": "{}/a.array_record"}


KINDS = "text", "separated", "jsonl", "jsonl.gz", "parquet", "array_record"


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_data_at_a_url_are_those_of_the_same_data_in_a_folder(bucket, kind):
    cfg = written(kind)
    upload(bucket)
    batches = {}
    for folder in ("files", bucket):
        given = cfg | {"files": [cfg["files"].format(folder)], "name": "texts", "holdout": 0.2}
        data = DataConfig(sources=[source(**given)], seq_len=64)
        train_feed, eval_feed = Feed(data, [0, 1], 2), Feed(data, [0], 1, evaluation=True)
        batches[folder] = [next(train_feed), next(train_feed), next(eval_feed)]
        train_feed.close()
        eval_feed.close()
    for local, remote in zip(batches["files"], batches[bucket], strict=True):
        assert local.keys() == remote.keys()
        for key, array in local.items():
            np.testing.assert_array_equal(array, remote[key])


def test_globs_match_at_a_url_what_they_match_in_a_folder(bucket):
    names = "a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt", "deep/.hidden/e.txt", ".f.txt", "g[1]"
    for name in names:
        os.makedirs(os.path.dirname(f"files/{name}") or "files", exist_ok=True)
        with open(f"files/{name}", "w") as file:
            file.write("x")
    upload(bucket)
    for pattern in ("*.txt", "**/*.txt", "**", "d*/*.txt", "[ab].txt", "deep/c.txt", "g[[]1]"):
        for exclude in ((), ("{}/deep/*.txt",), ("**/er/*",)):
            keys = {}
            for folder in ("files", bucket):
                cfg = source(
                    "text",
                    files=[f"{folder}/{pattern}"],
                    exclude=[glob.format(folder) for glob in exclude],
                )
                try:
                    keys[folder] = [file.key for file in match_files(cfg)]
                except DataError:
                    keys[folder] = []
            assert keys["files"] == keys[bucket], (pattern, exclude)
            assert keys["files"] or exclude


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("none.txt", "no such file; correct the `files` of this source"),
        ("*.txt", "the glob matches no file, or there is no such bucket; correct"),
        ("deep", r"is a folder; .*/deep/\*\* means all files in it"),
    ],
)
def test_what_is_not_at_a_url_is_told(bucket, pattern, says):
    with storage.replacing(f"{bucket}/deep/a.jsonl") as file:
        file.write_text("{}")
    with pytest.raises(DataError, match=says) as caught:
        match_files(source("text", files=[f"{bucket}/{pattern}"]))
    assert str(caught.value).startswith(f"{bucket}/{pattern}: ")


def test_a_file_at_a_url_is_copied_once_and_again_when_it_changes(bucket, tmp_path):
    cfg = source("jsonl", files=[f"{bucket}/a.jsonl"])
    for text in ("first", "first", "other"):
        with storage.replacing(f"{bucket}/a.jsonl") as file:
            file.write_text(json.dumps({"text": text}) + "\n")
        assert [open_source(cfg)[0] for _ in range(2)] == [text.encode()] * 2
        time.sleep(0.02)
    assert len(os.listdir(tmp_path / "cache" / "data")) == 3


def test_vocab_json_at_a_url_is_read_with_the_files_beside_it(bucket):
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    for name, text in {
        "vocab.json": json.dumps(vocab),
        "merges.txt": "#version: 0.2\na b\n",
        "config.json": '{"model_type": "gpt2"}',
    }.items():
        with storage.replacing(f"{bucket}/gpt2/{name}") as file:
            file.write_text(text)
    cfg = HuggingFaceTokenizer(kind="huggingface", path=f"{bucket}/gpt2/vocab.json")
    assert open_tokenizer(cfg).encode(b"abba").tolist() == [2, 1, 0, 3]
