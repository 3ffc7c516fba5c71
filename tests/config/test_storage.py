"""Paths and URLs through one opener: fsspec's memory:// and file:// stand for gs:// and s3://."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry

from maxstack.command import check_writable, write_json
from maxstack.config import storage
from maxstack.config.compose import merged_tree, plain
from maxstack.data.copies import local_folder
from maxstack.errors import ConfigError
from maxstack.hf.adapter import Adapter
from maxstack.hf.contents import open_contents
from maxstack.kernels import tuning
from maxstack.load import load

GOLDENS = Path(__file__).parents[1] / "goldens"
PRESETS = {"": (), "model": ("models",)}


@pytest.fixture(params=["memory", "file"])
def bucket(request, tmp_path, monkeypatch):
    """The URL of an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket"


def write(path, text):
    with storage.replacing(path) as unfinished:
        unfinished.write_text(text)


@pytest.mark.parametrize(
    ("folder", "name", "expected"),
    [
        ("gs://b/runs", "x.yml", "gs://b/runs/x.yml"),
        ("gs://b/runs", "../x.yml", "gs://b/x.yml"),
        ("gs://b/runs", "s3://c/x.yml", "s3://c/x.yml"),
        ("gs://b/runs", "/etc/x.yml", "/etc/x.yml"),
        ("runs", "gs://b/x.yml", "gs://b/x.yml"),
        ("runs", "../x.yml", "runs/../x.yml"),
        ("", "x.yml", "x.yml"),
    ],
)
def test_a_name_is_joined_to_a_folder_unless_it_says_where_it_is(folder, name, expected):
    assert storage.join(folder, name) == expected


def test_a_file_is_written_whole_or_not_at_all(bucket):
    path = f"{bucket}/new/a.txt"
    with pytest.raises(RuntimeError), storage.replacing(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert storage.kind(path) is None
    write(path, "whole")
    assert (storage.kind(path), storage.read(path), storage.read(path, 2)) == (
        "file",
        b"whole",
        b"wh",
    )
    assert storage.kind(f"{bucket}/new") == "directory"
    with storage.open_file(path) as file:
        file.seek(3)
        assert file.read() == b"le"


def test_a_stamp_has_the_size_and_changes_when_the_file_does(bucket):
    write(f"{bucket}/a", "first")
    before = storage.stamp(f"{bucket}/a")
    time.sleep(0.02)
    write(f"{bucket}/a", "other")
    assert before[0] == storage.stamp(f"{bucket}/a")[0] == 5
    assert before != storage.stamp(f"{bucket}/a")


def test_a_folder_is_copied_once_and_again_when_a_file_changes(bucket):
    write(f"{bucket}/model/config.json", "{}")
    write(f"{bucket}/model/big.bin", "weights")
    write(f"{bucket}/model/deep/a.json", "[]")
    copy = local_folder(f"{bucket}/model", ("*.json",))
    names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*.*"))
    assert (copy.name, names) == ("model", ["config.json", "deep/a.json"])
    assert local_folder(f"{bucket}/model", ("*.json",)) == copy
    write(f"{bucket}/model/config.json", '{"a": 1}')
    again = local_folder(f"{bucket}/model", ("*.json",))
    assert again != copy and (again / "config.json").read_text() == '{"a": 1}'


def put(bucket, name, folder):
    """Copy a folder's files to the bucket; the URL."""
    for path in folder.iterdir():
        with storage.replacing(f"{bucket}/{name}/{path.name}") as copy:
            copy.write_bytes(path.read_bytes())
    return f"{bucket}/{name}"


def test_a_model_folder_at_a_url_is_read_as_at_a_path(bucket):
    model = put(bucket, "llama", GOLDENS / "llama")
    write(f"{model}/pytorch_model.bin", "a pickle, which is not downloaded")
    write(f"{model}/checkpoint-100/model.safetensors", "nor is another model below it")
    data = {"sources": [{"kind": "synthetic", "vocab": 2}], "seq_len": 16}
    cfg = load({"model": {"from": model}, "data": data})
    local = load({"model": {"from": str(GOLDENS / "llama")}, "data": data})
    assert cfg.model.weights == model
    assert cfg.model.model_copy(update={"weights": local.model.weights}) == local.model
    read, wanted = open_contents(model), open_contents(GOLDENS / "llama")
    names = sorted(path.name for path in read.folder.path.iterdir())
    assert names == ["config.json", "model.safetensors"]
    for name, tensor in wanted.tensors.items():
        np.testing.assert_array_equal(read.tensors[name].array(), tensor.array())


def test_an_adapter_at_a_url_is_read(bucket):
    ours = GOLDENS / "adapters" / "lora-llama"
    read, wanted = Adapter(put(bucket, "adapter", ours)), Adapter(ours)
    assert read.tensors.keys() == wanted.tensors.keys() and read.said == wanted.said


def test_an_output_of_a_command_is_written_at_a_url(bucket):
    check_writable("--json", f"{bucket}/new/figures.json")
    write_json(f"{bucket}/new/figures.json", {"a": 1})
    assert json.loads(storage.read(f"{bucket}/new/figures.json")) == {"a": 1}


def test_a_table_of_block_sizes_at_a_url_is_written_and_read(bucket):
    row = {"device": "cpu", "op": "attention", "backend": "b", "shape": {}, "blocks": {"rows": 8}}
    tuning.add(f"{bucket}/tuned.json", [row])
    tuning.add(f"{bucket}/tuned.json", [row | {"device": "another"}])
    assert [each["device"] for each in tuning.rows(f"{bucket}/tuned.json")] == ["cpu", "another"]


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    write(str(tmp_path / "pipe"), "text")
    assert reader.communicate(timeout=10)[0] == b"text"
    assert (tmp_path / "pipe").is_fifo()


def test_a_configuration_extends_files_and_presets_at_urls(bucket):
    write(f"{bucket}/base.yml", "model: models/small.yml\ntrain: {steps: 1}")
    write(f"{bucket}/models/small.yml", "extends: tiny\nembed: 8")
    write(f"{bucket}/models/tiny.yml", "embed: 4\nheads: 2")
    write(f"{bucket}/runs/run.yml", "extends: ../base.yml\ntrain: {steps: 2}")
    write("local.yml", f"extends: {bucket}/runs/run.yml\nmodel: {bucket}/models/tiny.yml")
    tree = merged_tree(PRESETS, f"{bucket}/runs/run.yml")
    assert plain(tree) == {"model": {"embed": 8, "heads": 2}, "train": {"steps": 2}}
    assert tree.at("train", "steps").where == f"{bucket}/runs/run.yml:2"
    assert plain(merged_tree(PRESETS, "local.yml"))["model"] == {"embed": 4, "heads": 2}


@pytest.mark.parametrize(
    ("path", "package"), [("gs://bucket/a.yml", "gcsfs"), ("s3://bucket/a.yml", "s3fs")]
)
def test_a_missing_driver_is_named_in_one_paragraph_within_a_second(path, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    # A driver that another test has imported would look for Google's servers for minutes.
    monkeypatch.delitem(_registry, path[:2], raising=False)
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        merged_tree(PRESETS, path)
    assert time.perf_counter() - start < 1
    scheme = path[:2]
    assert str(caught.value) == (
        f"{path}: what reads {scheme}:// cannot be imported: import of {package} halted; None in "
        f"sys.modules; pip install {package}"
    )


def test_a_store_that_fails_is_an_error_with_its_words(monkeypatch):
    def fail(self, path, **kwargs):
        raise RuntimeError("no credentials\nfor this bucket")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
    with pytest.raises(ConfigError) as caught:
        merged_tree(PRESETS, "memory://b/a.yml")
    assert str(caught.value) == (
        "memory://b/a.yml: cannot be read: RuntimeError: no credentials for this bucket"
    )


@pytest.mark.slow
def test_local_paths_import_no_fsspec():
    code = (
        "import sys; from maxstack.load import load; load('quickstart.yml'); "
        "assert 'fsspec' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "url", ["ftp://h/a.yml", "zip://a::gs://b", "sftp://h/a", "github://a:b@/c"]
)
def test_only_stores_of_files_are_read(url):
    with pytest.raises(ConfigError, match=rf"{url}: nothing is read from \w+://; use gs, gcs, s3"):
        storage.read(url)
    with pytest.raises(ConfigError, match="nothing is read from"):
        storage.read("memory://a::ftp://h/b")
