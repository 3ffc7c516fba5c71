"""Data at URLs, end to end: fsspec's memory:// and file:// stand for gs:// and s3://."""

import gzip
import json
import os
import shutil
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from json_lines import lines_of_texts
from source_files import opened, source_of, write_source

from maxstack.config import storage
from maxstack.data.feed import Feed
from maxstack.data.files import match_files
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig, HuggingFaceTokenizer


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


def write(url, text):
    """Write a file at a URL or path."""
    with storage.replacing(url) as file:
        file.write_text(text)


def upload(url):
    """The files of the folder `files`, at a URL."""
    for path in filter(os.path.isfile, Path("files").rglob("*")):
        with storage.replacing(storage.join(url, str(path.relative_to("files")))) as copy:
            shutil.copy(path, copy)


KINDS = "text", "separated", "jsonl", "jsonl.gz", "parquet", "array_record"


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_data_at_a_url_are_those_of_the_same_data_in_a_folder(
    bucket, kind, tmp_path, monkeypatch
):
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "files")
    texts = [f"document {i} with some text".encode() for i in range(20)]
    options = {"row_group_size": 6} if kind == "parquet" else {}
    fields = write_source(kind.removesuffix(".gz"), texts, **options)
    if kind == "jsonl.gz":
        Path("a.jsonl").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    monkeypatch.chdir(tmp_path)
    upload(bucket)
    (files,) = fields["files"]
    batches = {}
    for folder in ("files", bucket):
        own = {"files": [f"{folder}/{files}"], "name": "texts", "holdout": 0.2}
        data = DataConfig(sources=[source_of(**fields | own)], seq_len=64)
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
        write(f"files/{name}", "x")
    upload(bucket)

    def keys(folder, pattern, exclude):
        excluded = [glob.format(folder) for glob in exclude]
        try:
            files = match_files(source_of("text", f"{folder}/{pattern}", exclude=excluded))
        except DataError:
            return []
        return [file.key for file in files]

    for pattern in ("*.txt", "**/*.txt", "**", "d*/*.txt", "[ab].txt", "deep/c.txt", "g[[]1]"):
        for exclude in ((), ("{}/deep/*.txt",), ("**/er/*",)):
            found = keys("files", pattern, exclude)
            assert found == keys(bucket, pattern, exclude), (pattern, exclude)
            assert found or exclude


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("none.txt", "no such file; correct the `files` of this source"),
        ("*.txt", "the glob matches no file, or there is no such bucket; correct"),
        ("deep", r"is a folder; .*/deep/\*\* means all files in it"),
    ],
)
def test_what_is_not_at_a_url_is_told(bucket, pattern, says):
    write(f"{bucket}/deep/a.jsonl", "{}")
    with pytest.raises(DataError, match=says) as caught:
        match_files(source_of("text", f"{bucket}/{pattern}"))
    assert str(caught.value).startswith(f"{bucket}/{pattern}: ")


def test_a_file_at_a_url_is_copied_once_and_again_when_it_changes(bucket, tmp_path):
    for text in ("first", "first", "other"):
        write(f"{bucket}/a.jsonl", lines_of_texts([text]))
        for _ in range(2):
            assert opened("jsonl", f"{bucket}/a.jsonl")[0] == text.encode()
        time.sleep(0.02)
    assert len(os.listdir(tmp_path / "cache" / "data")) == 3


def test_vocab_json_at_a_url_is_read_with_the_files_beside_it(bucket):
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    write(f"{bucket}/gpt2/vocab.json", json.dumps(vocab))
    write(f"{bucket}/gpt2/merges.txt", "#version: 0.2\na b\n")
    write(f"{bucket}/gpt2/config.json", '{"model_type": "gpt2"}')
    cfg = HuggingFaceTokenizer(kind="huggingface", path=f"{bucket}/gpt2/vocab.json")
    assert open_tokenizer(cfg).encode(b"abba").tolist() == [2, 1, 0, 3]
