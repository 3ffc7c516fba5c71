"""Engines: what they write is the same, whatever happens to their processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import yaml
from json_lines import write_texts

from maxstack.data.engines import Engine, Processes, Ray
from maxstack.data.prepare import prepare
from maxstack.errors import ConfigError, installing
from maxstack.schema.data import DataConfig

SLOW = """
import time

def text(index):
    time.sleep(0.02)
    return f"document {index} " * (1 + index % 7)
"""
SHARDS, SIZE = 10, 25


def _config(folder):
    """A run over documents that take 20 ms each; its texts are of a file and of a function."""
    (folder / "slow.py").write_text(SLOW)
    write_texts(folder / "lines.jsonl", (f"line {i}" for i in range(60)))
    sources = [
        {"kind": "function", "call": "slow:text", "documents": SHARDS * SIZE},
        {"kind": "jsonl", "files": ["lines.jsonl"], "holdout": 0.2},
    ]
    path = processes.write_config(folder)
    read = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(read | {"data": {"seq_len": 64, "sources": sources}}))
    return path


def _started(folder, *options):
    command = [sys.executable, "-m", "maxstack.cli", "data", "prepare", "config.yml"]
    return subprocess.Popen(
        [*command, "--shard-size", str(SIZE), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _finished(folder):
    """When the shards that are finished were written, by name."""
    names = [path.stem for path in folder.glob(".finished/*.json")]
    return {name: (folder / name).stat().st_mtime_ns for name in names}


def _until_more(folder, process):
    """Wait for another shard of a preparation, which goes on."""
    before = _finished(folder)
    processes.until(lambda: len(_finished(folder)) > len(before), 60)
    assert process.poll() is None


def _workers():
    """The processes of Ray that run a task."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ray::_run_there" in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Ray cluster of a head without work and two nodes, on 127.0.0.1."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.release
def test_ray_writes_what_one_process_does_over_lost_workers_nodes_and_drivers(cluster, tmp_path):
    cluster, nodes = cluster
    _config(tmp_path)
    local, out = tmp_path / "local", tmp_path / "out"
    alone = _started(tmp_path, "--out", "local", "--workers", "1")
    options = "--out", "out", "--engine", "ray", "--address", cluster.address
    first = _started(tmp_path, *options)
    killed = processes.until(lambda: _finished(out) and _workers(), 60)[0]
    os.kill(killed, signal.SIGKILL)
    _until_more(out, first)
    cluster.remove_node(nodes[0], allow_graceful=False)
    _until_more(out, first)
    first.kill()
    first.wait()
    kept = _finished(out)
    assert 3 <= len(kept) < SHARDS and not (out / "manifest.json").exists()
    cluster.add_node(num_cpus=1)
    second = _started(tmp_path, *options)
    assert second.wait(120) == 0, second.stdout.read()
    assert alone.wait(60) == 0, alone.stdout.read()
    assert _files(out) == _files(local)
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}


@pytest.mark.release
def test_an_error_on_a_cluster_started_for_the_purpose_names_the_document(tmp_path):
    pytest.importorskip("ray")
    _config(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"text": "good"}\n{"text": 3}\n' * 40)
    done = _started(tmp_path, "--out", "out", "--engine", "ray", "--workers", "1")
    output, _ = done.communicate(timeout=120)
    assert done.returncode == 2 and "lines.jsonl: line 2: 'text' is a int" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_that_says_what_is_kept(tmp_path):
    _config(tmp_path)
    (tmp_path / "slow.py").write_text("import os\ndef text(index):\n    os._exit(9)\n")
    done = _started(tmp_path, "--out", "out", "--workers", "2")
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 1 and "a worker process died" in output
    assert "what was finished is kept" in output


class Elsewhere(Engine):
    """One process, in another folder than the main one."""

    def __init__(self, folder):
        self._folder = folder

    def map(self, function, context, tasks):
        with contextlib.chdir(self._folder):
            for task in tasks:
                for value in function(context, task):
                    yield task, value


@pytest.mark.parametrize("missing", ["lines.jsonl", "out"])
def test_a_worker_that_sees_other_files_says_so(missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    Path("lines.jsonl").write_text('{"text": "good"}\n')
    if missing == "out":
        (there / "lines.jsonl").write_text('{"text": "good"}\n')
    cfg = DataConfig(sources=[{"kind": "jsonl", "files": ["lines.jsonl"]}])
    with pytest.raises(ConfigError, match=f"a worker on .*: {missing}.* the same files on every"):
        prepare(cfg, "out", Elsewhere(there))


def test_ray_that_is_not_installed_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=re.escape(installing("ray"))):
        Ray(1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1"])
def test_a_cluster_that_is_not_there_is_an_error_at_once(address, monkeypatch):
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=f"--address {address}: no Ray cluster can be joined"):
        next(Ray(1, address).map(_counted, 0, [1]))


def _counted(start, task):
    yield from range(start, start + task)


@pytest.mark.slow
def test_the_values_of_a_task_come_in_order_and_all_of_them():
    made: dict[int, list[int]] = {}
    for task, value in Processes(2).map(_counted, 5, [3, 1, 2]):
        made.setdefault(task, []).append(value)
    assert made == {3: [5, 6, 7], 1: [5], 2: [5, 6]}
