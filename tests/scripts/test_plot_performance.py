"""scripts/plot_performance.py: plots and tables of docs/PERFORMANCE.md from measurements."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLOT = [sys.executable, str(ROOT / "scripts" / "plot_performance.py")]
ATTENTION = {
    "section": "attention",
    "mask": "causal",
    "head_dim": 128,
    "heads": 16,
    "window": None,
    "dtype": "bfloat16",
    "status": "ok",
}
BENCH = {
    "command": "bench_gpu.py",
    "date": "2026-11-21T10:00:00",
    "finished": True,
    "left_out": {},
    "machine": {"processor": "a processor"},
    "device": {"platform": "gpu", "kind": "a GPU", "versions": {"jax": "0.12"}},
    "rows": [
        ATTENTION
        | {
            "backend": backend,
            "length": length,
            "forward_tflops": 400.0,
            "backward_tflops": 300.0,
            "both_ms": 2.0,
            "temporary_bytes": 2**20,
        }
        for backend in ("cudnn", "<ours>")
        for length in (2048, 4096)
    ],
}
STEP = {
    "config": "mine",
    "overrides": [],
    "device": "a GPU",
    "jax": "0.12",
    "rounds": 5,
    "tokens": 4096,
    "step": {"seconds": 0.03},
    "components": [
        {"name": "optimizer", "count": 1, "seconds": 0.002},
        {"name": "attention", "count": 16, "seconds": 0.0125},
    ],
    "rest": {"seconds": 0.0155},
}

PEERS = {
    "date": "2026-11-27",
    "command": "bench_cpu.py",
    "processor": "a processor",
    "versions": {"jax": "0.12", "torch": "2"},
    "tokens_per_second": {"maxstack f32": [3000.0, 5000.0, 4000.0], "torch f32": [2000.0]},
    "gigabytes": {"maxstack f32": 0.9},
    "start": {"cold": [9.0, 1.0], "warm": [4.5, 0.9]},
    "peers_first_loss": {"maxtext f32": [60.0]},
    "scaling": [
        {"width": width, "length": length, "rows": 4, "programs": {"maxstack": figures}}
        for width, length, figures in (
            (256, 512, {"tokens_per_second": 4000.0, "gigabytes": 0.9}),
            (512, 512, {"tokens_per_second": 1300.0, "gigabytes": 1.5}),
            (256, 2048, {"tokens_per_second": 2500.0, "gigabytes": 0.8}),
        )
    ],
}


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "performance").mkdir()
    for name, found in ("gpu", BENCH), ("step", STEP), ("peers", PEERS):
        (tmp_path / "performance" / f"{name}.json").write_text(json.dumps(found))
    (tmp_path / "PERFORMANCE.md").write_text(
        "# Page\n\n<!-- gpu -->\n<!-- end -->\n\nBetween.\n\n<!-- step -->\nstale\n<!-- end -->\n"
        "<!-- peers -->\n<!-- end -->\n"
    )
    return tmp_path


def run(docs, *words):
    return subprocess.run(
        [*PLOT, "--docs", str(docs), *words], capture_output=True, text=True, check=False
    )


def words(path):
    return [
        element.text
        for element in xml.etree.ElementTree.parse(path).iter()
        if element.text and element.text.strip()
    ]


def test_plots_name_every_backend_and_component(docs):
    assert run(docs).returncode == 0
    attention = words(docs / "performance" / "gpu-attention-causal-128.svg")
    assert {
        "cudnn",
        "<ours>",
        "FlashAttention-3 (2024, H100)",
        "2,048",
        "4,096",
        "TFLOP/s",
        "a GPU, 2026-11-21; half of T S counted",
    } <= {*attention}
    step = words(docs / "performance" / "step.svg")
    assert [
        name
        for name in step
        if name in ("attention x 16", "12.5", "optimizer", "2", "the rest", "15.5")
    ] == ["attention x 16", "12.5", "optimizer", "2", "the rest", "15.5"]


def test_the_step_beside_its_peers_is_told_by_medians_and_by_size(docs):
    run(docs)
    page = (docs / "PERFORMANCE.md").read_text()
    for row in (
        "| maxstack f32 | 4,000 | 3,000 to 5,000 | 0.90 | 1.00 |",
        "| torch f32 | 2,000 | 2,000 to 2,000 |  | 2.00 |",
        "| maxtext f32, cold | 60.0 |",
        "| 512, 4 x 512 | maxstack | 1,300 | 1.50 | 1.00 |",
    ):
        assert row in page
    scaling = words(docs / "performance" / "peers-scaling.svg")
    assert {"Speed by width", "Memory by length", "maxstack"} <= {*scaling}


def test_page_keeps_its_text_and_says_when_it_is_old(docs):
    assert run(docs, "--check").returncode == 1
    run(docs)
    page = (docs / "PERFORMANCE.md").read_text()
    assert (
        run(docs, "--check").returncode == 0
        and "\nBetween.\n" in page
        and "stale" not in page
        and "| cudnn | 400 / 300 | 400 / 300 |" in page
    )


def test_measurements_without_a_place_on_the_page_are_an_error(docs):
    (docs / "performance" / "other.json").write_text(json.dumps(STEP))
    assert "has 0 places for a table; write `<!-- other -->`" in run(docs).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"scaling": []}', "cannot be drawn (StopIteration"),
        ("null", "cannot be drawn (TypeError"),
        ('{"tokens_per_second": {"maxstack f32": []}}', "cannot be drawn (KeyError: 'processor')"),
        ('{"scaling', "is not JSON"),
    ],
)
def test_what_cannot_be_drawn_is_named(docs, text, said):
    (docs / "performance" / "step.json").write_text(text)
    told = run(docs).stderr
    assert "step.json " + said in told and "Traceback" not in told


def test_the_page_of_this_repository_is_up_to_date():
    assert run(ROOT / "docs", "--check").stderr == ""
