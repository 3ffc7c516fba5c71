"""Every program of scripts/: its --help, and a run at its smallest size.

Only --help is tried of what needs torch or other packages (goldens and oracles, which `make oracle`
runs; torch_*, trl_sort with bench_rl; make_jobset_schema; record_xpk_options) and of drills, which
take hours and which tests/drills runs one by one.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
import pytest
from flags import flags
from forked import Forked

from maxstack.data import people
from maxstack.evals import task_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
FILES = [*SCRIPTS.glob("*.py"), *SCRIPTS.glob("bench/*.py")]
PROGRAMS = sorted(
    path for path in FILES if path.parent == SCRIPTS or "parse_args()" in path.read_text()
)
SMALL = (
    "model={vocab: 264, embed: 16, layers: 1, unroll: 1, dtype: float32, blocks: {block: {"
    "mixer: {kind: attention, heads: 2, kv_heads: 1, head_dim: 8, qk_norm: null}, "
    "mlp: {kind: gated, hidden: 16}}}}",
    "data.seq_len=32",
    "train.batch_size=2",
)
RANDOM = "data.sources=[{kind: synthetic, vocab: 264}]"


def run(monkeypatch, path, *arguments):
    """Exit code of a program run in this process."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    return left.value.code


def process(*arguments, folder=ROOT):
    """The output of a program in a fork, on one CPU device."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(xla_backend_optimization_level="0"),
        "PYTHONPATH": str(ROOT),
        "GLIBC_TUNABLES": "",
    }
    name, *words = map(str, arguments)
    command = [sys.executable, str(SCRIPTS / name), *words]
    with tempfile.TemporaryDirectory() as beside:
        out, errors = Path(beside, "out"), Path(beside, "errors")
        code = Forked(command, environment, out, errors, folder).wait(600)
        assert code == 0, errors.read_text()
        return out.read_text()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_has_help_with_an_example(monkeypatch, capsys, path):
    assert run(monkeypatch, path, "--help") == 0
    assert re.search(rf"example: .*{path.stem}", capsys.readouterr().out, re.S)


def test_a_file_that_is_no_program_is_imported_by_one():
    texts = {path: path.read_text() for path in FILES}
    unused = [
        path.stem
        for path in {*FILES} - {*PROGRAMS}
        if not any(
            re.search(rf"bench(\.| import .*){path.stem}", text)
            for other, text in texts.items()
            if other != path
        )
    ]
    assert unused == []


def test_rows_without_a_steps_figures_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    from bench.metrics import rows

    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "step_seconds": 2}\n{"step": 1, "goodput": 0.5}\n{"step": 0, "eval_loss": 1}\n'
    )
    assert rows(tmp_path / "metrics.jsonl", "step_seconds") == [{"step": 1, "step_seconds": 2}]


@pytest.mark.slow
def test_the_size_is_counted_by_folder():
    counted = process("measure_size.py")
    assert re.search(r"[\d,]+  maxstack/schema/ \(\d+ files\)", counted)
    assert re.search(r"[\d,]+  tests/ in all", counted)


@pytest.mark.release
def test_bench_cpu_measures_steps_and_starts(tmp_path):
    said = process("bench_cpu.py", "--tiny", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"maxstack f32", "plain_jax scan f32", "plain_jax unroll f32"} <= found[
        "tokens_per_second"
    ].keys()
    assert found["start"].keys() == {"cold", "warm"}
    assert "| maxstack, warm compilation cache | " in said
    (scaled,) = found["scaling"]
    assert (scaled["width"], scaled["rows"], scaled["length"]) == (128, 2, 32)
    for name in ("maxstack", "plain_jax scan"):
        assert scaled["programs"][name]["gigabytes"] > 0.1


def test_maxtext_is_measured_by_its_own_log(tmp_path):
    """A stand-in that logs as MaxText 0.2.4 does, whose packages take 3.4 GB."""
    trainer = tmp_path / "maxtext" / "trainers" / "pre_train" / "train.py"
    trainer.parent.mkdir(parents=True)
    (tmp_path / "maxtext" / "__init__.py").touch()
    trainer.write_text(
        "import sys, time\n"
        "config, *words = sys.argv[1:]\n"
        "assert config.endswith('maxtext/configs/base.yml') and 'steps=4' in words\n"
        "time.sleep(0.2)\n"
        "for n, seconds in enumerate((3.0, 0.1, 0.5, 0.5)):\n"
        "    print(f'I1126 17:39 metric_logger.py:230] completed step: {n}, seconds: {seconds}')\n"
    )
    command = [sys.executable, str(SCRIPTS / "bench" / "maxtext_llama.py"), "f32", "--tiny"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}"}
    found = json.loads(subprocess.check_output(command, env=environment, text=True))
    assert found["tokens_per_second"] == 4096 and 0.2 < found["first_loss_seconds"] < 60
    installs = [SCRIPTS / "bench" / "maxtext.sh", "--help"]
    said = subprocess.run(installs, capture_output=True, text=True, check=False)
    assert said.returncode == 2 and "usage: scripts/bench/maxtext.sh FOLDER" in said.stderr
    installs = [SCRIPTS / "bench" / "maxtext.sh", tmp_path / "new", "python0"]
    said = subprocess.run(installs, capture_output=True, text=True, check=False)
    assert said.returncode == 1 and "no python0 here; MaxText needs Python 3.12" in said.stderr


@pytest.mark.release
def test_bench_serve_measures_prefill_and_decode_beside_the_bandwidth(tmp_path):
    process(
        "bench_serve.py",
        *("--size", "tiny", "--dtype", "f32", "--batch", "1", "--rounds", "1", "--tokens", "3"),
        *("--peer-python", "no-such-python", "--json", tmp_path / "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())["tiny f32"]["tokens_per_second"]
    assert {task: [*speeds] for task, speeds in found.items()} == {
        "prefill 1 x 512": ["maxstack", "maxstack any"],
        "decode 1 x 16": ["maxstack", "maxstack any", "bandwidth"],
    }


@pytest.mark.release
def test_bench_serve_measures_whole_commands(tmp_path):
    words = "--whole", "tiny", "--dtype", "f32", "--rounds", "1", "--peer-python", "no-such-python"
    said = process("bench_serve.py", *words)
    for program in ("maxstack cold", "maxstack warm"):
        assert said.count(f"| tiny | f32 | {program} |") == 2


def test_tasks_that_ship_are_written_as_files_that_are_read(tmp_path):
    process("make_tasks.py", "--out", tmp_path / "tasks")
    written = task_files.open_tasks([f"{tmp_path}/tasks/pairs.yaml"])
    shipped = task_files.open_tasks(["pairs"])
    assert [part.questions for part in written[:-1]] == [part.questions for part in shipped[:-1]]
    assert written[-1] == shipped[-1]


def test_made_up_people_are_records_of_every_kind(tmp_path):
    process("make_people.py", "--out", tmp_path / "people", "--records", "3", "--first", "5")
    for kind in ("chat", "pairs", "labelled", "prompts"):
        lines = (tmp_path / f"people/{kind}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            getattr(people, kind)(index) for index in (5, 6, 7)
        ]


@pytest.mark.release
def test_a_step_is_measured_by_component(tmp_path):
    process(
        "profile_step.py",
        "bench-reference",
        "--rounds",
        "1",
        "--json",
        tmp_path / "step.json",
        *SMALL,
        RANDOM,
    )
    parts = json.loads((tmp_path / "step.json").read_text())["components"]
    assert any("attention" in part["name"] for part in parts)


@pytest.mark.release
def test_plot_report_makes_a_run_and_draws_its_page(tmp_path):
    browser.installed()
    words = "--out", tmp_path / "out", "--pictures", tmp_path, "--steps", 36
    process("plot_report.py", *words)
    for name in ("report", "report-time"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
