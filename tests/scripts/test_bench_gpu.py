"""scripts/bench_gpu.py: its whole path at toy sizes, what it makes of kernels that are wrong, crash
or cannot serve."""

import dataclasses
import functools
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxstack.kernels import tuning
from maxstack.kernels.attention import blockwise
from maxstack.kernels.backends import Device
from maxstack.load import load

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import gpu_attention, gpu_programs, gpu_tables, gpu_train  # noqa: E402
from bench.gpu_blocks import Sizes  # noqa: E402
from bench.gpu_ops import Bench  # noqa: E402
from bench.gpu_processes import work  # noqa: E402
from bench.gpu_worker import Verdicts  # noqa: E402

ABSENT = (
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "grain",
    "orbax",
    "qwix",
    "tensorboardX",
    "tensorstore",
    "array_record",
    "tokenizers",
)
BLOCKER = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Rows that a run at toy sizes writes, where nothing but jax, flax and optax can be imported of
    what maxstack depends on."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [
            sys.executable,
            "scripts/bench_gpu.py",
            "--tiny",
            "--out",
            str(folder),
            "--peer-python",
            str(folder / "none"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (
        json.loads((folder / "bench_gpu.json").read_text()),
        (folder / "bench_gpu.md").read_text(),
        done.stdout,
    )


@pytest.mark.release
def test_every_section_runs_at_toy_sizes_with_jax_flax_and_optax_alone(found):
    results, report, printed = found
    assert (
        results["finished"]
        and report == printed.removesuffix("\n")
        and {*results["left_out"]} == {"torch train", "torch attention"}
    )
    assert {row["section"] for row in results["rows"] if row["status"] == "ok"} == {
        *gpu_tables.TABLES
    }
    assert {row["status"] for row in results["rows"]} <= {"ok", "unsupported"}, results["rows"]


@pytest.mark.release
def test_a_backend_of_another_platform_is_told_once(found):
    told = [row for row in found[0]["rows"] if row.get("backend") == "hopper"]
    assert [(row["status"], row["reason"]) for row in told] == [
        ("unsupported", "runs on gpu, and this is a cpu")
    ]


def test_training_is_of_the_preset_with_heads_of_128():
    heads = {"blocks": {"block": {"mixer": {"heads": 16, "kv_heads": 4, "head_dim": 128}}}}
    preset = load(
        {
            "model": {"preset": "llama-3.2-1b", **heads},
            "data": {"sources": [{"kind": "synthetic"}]},
        },
    )
    assert gpu_train.configuration(gpu_train.SHAPES["full"], 8).model == preset.model


@pytest.mark.slow
def test_a_wrong_kernel_is_called_wrong_and_its_speed_is_not_measured(monkeypatch):
    without_documents = functools.partial(_without_documents, blockwise.run)
    monkeypatch.setattr(blockwise, "run", without_documents)
    cpu, verdicts = Device.of(jax.devices()[0]), Verdicts([])
    checks = (
        job
        for job in gpu_attention.checks("tiny", cpu)
        if job.row["backend"] == "blockwise" and job.row["case"] in ("documents", "causal 64")
    )
    figures = {
        job.row["case"]: (job, found)
        for job, found in gpu_programs.run(checks, 1, 1, lambda job, phase: None)
    }
    for job, found in figures.values():
        verdicts.add(job.row, found)
    assert {case: found["status"] for case, (_, found) in figures.items()} == {
        "causal 64": "ok",
        "documents": "wrong",
    }
    bench = Bench("tiny", cpu, None, verdicts.refusal, Sizes(False, "none.json"))
    speeds = gpu_attention.speeds(bench)
    refused = {job.row["backend"]: job.refused for job in speeds}
    assert refused == {
        "jax.nn xla": None,
        "reference": None,
        "blockwise": "wrong: attention blockwise is wrong on this device: documents",
    }


def _without_documents(run, inputs, request, **options):
    return run(inputs._replace(same=()), request, **options)


def test_no_speed_without_a_check_that_passed():
    assert (
        Verdicts([]).refusal("attention", "cudnn", "causal 128")
        == "unchecked: its check causal 128 is not reached"
    )
    passed = Verdicts(
        [{"op": "attention", "backend": "cudnn", "case": "causal 128", "status": "ok"}]
    )
    assert passed.refusal("attention", "cudnn", "causal 128") is None


def test_a_loop_makes_every_call_and_gives_what_one_gives():
    made = []

    def count(x, y):
        jax.debug.callback(lambda: made.append(1))
        return x @ y

    x = jnp.arange(12.0).reshape(3, 4)
    looped = jax.jit(functools.partial(gpu_programs.repeated, count, 5))(x, x.T)
    jax.effects_barrier()
    assert len(made) == 5 and (looped == x @ x.T).all()


def test_flops_of_a_window_are_those_of_its_visible_pairs():
    asked = gpu_attention.Asked(10, heads=1, head_dim=8, window=4)
    assert asked.flops == 4 * 8 * sum(min(place + 1, 4) for place in range(10))
    assert dataclasses.replace(asked, window=None).flops == 4 * 8 * 10 * 10 / 2


def test_tuning_keeps_the_fastest_sizes_that_give_what_the_default_ones_give(tmp_path):
    sizes, shape = Sizes(True, str(tmp_path / "tuned.json")), {"head_dim": 128}
    assert sizes.differs(False, "call", {"o": jnp.ones(4)}, "float32")["status"] == "unchecked"
    assert (
        sizes.differs(True, "call", {"o": jnp.ones(4)}, "float32")
        == {}
        == sizes.differs(False, "call", {"o": jnp.ones(4)}, "float32")
    )
    assert sizes.differs(False, "call", {"o": jnp.arange(4.0)}, "float32")["status"] == "wrong"
    rows = [
        {
            "op": "attention",
            "backend": "hopper",
            "mask": "causal",
            "length": length,
            "shape_class": shape,
            "blocks": {"rows": blocks},
            "both_ms": ms,
            "status": status,
        }
        for length, blocks, ms, status in (
            (2048, 64, 2.0, "ok"),
            (2048, 128, 3.0, "ok"),
            (8192, 64, 30.0, "ok"),
            (8192, 128, 20.0, "ok"),
            (8192, 256, 10.0, "wrong"),
        )
    ]
    sizes.keep(rows, "a GPU")
    with tuning.use(sizes.table):
        assert tuning.blocks("attention", "hopper", "a GPU", shape) == {"rows": 128}


WORKER = """#!{python}
import json, os, sys
given = json.load(sys.stdin)
for name in ("a", "b", "c"):
    if name not in given["done"]:
        print("@bench", json.dumps({{"begin": name, "phase": "run", "row": {{"name": name}}}}), flush=True)
        os.abort() if name == "b" else print("@bench", json.dumps({{"row": {{"name": name, "status": "ok"}}, "key": name}}), flush=True)
print("@bench", json.dumps({{"section": "one", "seconds": 1.0}}), flush=True)
"""  # noqa: E501


def test_a_kernel_that_ends_the_process_costs_its_own_row(tmp_path):
    worker = tmp_path / "python"
    worker.write_text(WORKER.format(python=sys.executable))
    worker.chmod(worker.stat().st_mode | stat.S_IXUSR)
    heard: list[dict] = []
    work(
        str(worker),
        ["one"],
        {"rows": [], "threads": 2, "end": time.time() + 60},
        60,
        tmp_path / "log",
        heard.append,
    )
    assert [
        (event["row"]["name"], event["row"]["status"]) for event in heard if "row" in event
    ] == [("a", "ok"), ("b", "failed"), ("c", "ok")]
    assert heard[-1] == {"section": "one", "seconds": 1.0}
