"""scripts/bench_gpu.py: its whole path at toy sizes, and what it makes of kernels that are wrong or
crash."""

import functools
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxstack.kernels.attention import blockwise

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bench_gpu  # noqa: E402
from bench import gpu_cases, gpu_worker  # noqa: E402


@pytest.mark.release
def test_every_section_runs_at_toy_sizes(tmp_path):
    subprocess.run(
        [
            *(sys.executable, "scripts/bench_gpu.py", "--tiny", "--out", str(tmp_path)),
            *("--peer-python", str(tmp_path / "none")),
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        check=True,
    )
    found = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert found["finished"] and {*found["left_out"]} == {"torch train", "torch attention"}
    good = {row["section"] for row in found["rows"] if row["status"] == "ok"}
    assert good == {*bench_gpu.SECTIONS, "check"}
    assert {row["status"] for row in found["rows"]} == {"ok", "unsupported"}


@pytest.mark.slow
def test_a_wrong_kernel_is_called_wrong_and_is_not_timed(monkeypatch, capsys):
    def half(run, *inputs, **options):
        return run(*inputs, **options) / 2

    monkeypatch.setattr(blockwise, "run", functools.partial(half, blockwise.run))
    for name, value in (("section", "attention"), ("backend", "blockwise"), ("size", "tiny")):
        monkeypatch.setattr(gpu_worker.ARGS, name, value, raising=False)
    gpu_worker.main()
    events = [json.loads(line.partition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    rows = [event["row"] for event in events if "row" in event]
    assert [(row["section"], row["status"]) for row in rows] == [("check", "wrong")]


def test_flops_of_a_window_are_those_of_its_visible_pairs():
    shape = {"length": 10, "heads": 1, "kv_heads": 1, "head_dim": 8}
    call = gpu_cases.of_attention(**shape, window=4)
    assert call.flops[0] == 4 * 8 * sum(min(place + 1, 4) for place in range(10))
    assert gpu_cases.of_attention(**shape).flops[0] == 4 * 8 * 10 * 10 / 2


def test_a_kernel_that_ends_its_process_costs_its_own_rows(tmp_path, monkeypatch):
    worker = tmp_path / "python"
    row = json.dumps({"row": {"backend": "x", "status": "ok"}})
    worker.write_text(f"#!/bin/sh\necho '@bench {row}'\n! grep -q cudnn || kill -ABRT $$\n")
    worker.chmod(worker.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(worker))
    args = SimpleNamespace(size="tiny", tuned=None, end=time.time() + 60)
    rows = [event["row"] for event in bench_gpu.kernels("attention", args)]
    failed = [row["backend"] for row in rows if row["status"] == "failed"]
    assert failed == ["cudnn"] and len(rows) == 7
