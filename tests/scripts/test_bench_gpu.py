"""scripts/bench_gpu.py: its whole path at toy sizes, and what it makes of kernels that are wrong or
crash."""

import functools
import json
import os
import stat
import subprocess
import sys
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
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    found = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert found["finished"] and {*found["left_out"]} == {"torch train", "torch attention"}
    good = {row["section"] for row in found["rows"] if row["status"] == "ok"}
    assert good == {*bench_gpu.SHARES}
    assert {row["status"] for row in found["rows"]} == {"ok", "unsupported"}


@pytest.mark.slow
def test_a_wrong_kernel_is_called_wrong_and_is_not_timed(monkeypatch):
    def without_documents(run, inputs, request, **options):
        return run(inputs._replace(same=()), request, **options)

    monkeypatch.setattr(blockwise, "run", functools.partial(without_documents, blockwise.run))
    given = {"tuned": None, "size": "tiny", "verdicts": {"attention blockwise": "wrong"}}
    for settings, status in (({}, "ok"), ({"packed": True}, "wrong")):
        call = gpu_cases.of_attention({"case": "x"}, 128, heads=2, **settings)
        _, work = gpu_worker.of_backend(call, "blockwise", gpu_worker.check, given)
        assert gpu_worker.attempt(work)["status"] == status
    jobs = {row["backend"]: work for row, work in gpu_worker.jobs("attention", given)}
    assert jobs["blockwise"]()["status"] == "wrong"


def test_verdicts_are_the_worst_of_an_ops_checks():
    row = {"section": "check", "op": "attention", "backend": "cudnn"}
    found = [row | {"status": status} for status in ("unsupported", "ok", "wrong")]
    assert bench_gpu.verdicts(found[:1]) == {"attention cudnn": "absent"}
    assert bench_gpu.verdicts(found[:2]) == {"attention cudnn": "ok"}
    assert bench_gpu.verdicts(found) == {"attention cudnn": "wrong"}


def test_flops_of_a_window_are_those_of_its_visible_pairs():
    shape = {"length": 10, "heads": 1, "kv_heads": 1, "head_dim": 8}
    call = gpu_cases.of_attention({}, **shape, window=4)
    assert call.flops[0] == 4 * 8 * sum(min(place + 1, 4) for place in range(10))
    assert gpu_cases.of_attention({}, **shape).flops[0] == 4 * 8 * 10 * 10 / 2


WORKER = """#!{python}
import json, os, sys
given = json.load(sys.stdin)
for name in ("a", "b", "c"):
    if {{"name": name}} not in given["done"]:
        print("@bench", json.dumps({{"begin": {{"name": name}}}}), flush=True)
        if name == "b":
            os.abort()
        row = {{"row": {{"name": name}}, "figures": {{"status": "ok"}}}}
        print("@bench", json.dumps(row), flush=True)
"""


def test_a_kernel_that_ends_the_process_costs_its_own_row(tmp_path, monkeypatch):
    worker = tmp_path / "python"
    worker.write_text(WORKER.format(python=sys.executable))
    worker.chmod(worker.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(worker))
    args = SimpleNamespace(only=["attention"], size="tiny", tuned=None, silence=60)
    events = [*bench_gpu.worker("attention", args, 0.0, {"rows": []})]
    assert [(event["row"]["name"], event["figures"]["status"]) for event in events] == [
        ("a", "ok"),
        ("b", "failed"),
        ("c", "ok"),
    ]
