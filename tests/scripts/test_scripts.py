"""Every program of scripts/: its --help, a refusal, and a real run at its smallest size.

Of these only the arguments are tried: what needs torch, transformers, diffusers, peft or trl
(make_goldens, make_adapter_goldens, make_preset_goldens, make_trl_goldens, make_vision_goldens,
oracle, oracle_trl, oracle_vision, torch_*, post_trl, trl_sort with bench_rl; `make oracle` runs
them), another package (make_jobset_schema: kubeflow;
record_xpk_options: xpk), or hours (drills; tests/drills runs each). bench_gpu with its worker,
plot_performance, generate_docs, check_configs and make_optax_signatures have tests of their own.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
import packaged
import processes
import pytest
import yaml
from flags import flags
from forked import Forked
from served import make

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
TEXT = (
    "data.tokenizer={kind: bytes}",
    'data.sources=[{kind: text, files: ["{stdlib}/[a-f]*.py"], holdout: 0.2}]',
)


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


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_refuses_an_option_that_it_has_not(monkeypatch, capsys, path):
    assert run(monkeypatch, path, "--no-such-option") == 2
    assert capsys.readouterr().err.startswith("usage: ")


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


def test_quantization_curves_and_weak_scaling_are_plotted_again_from_their_figures(
    tmp_path, monkeypatch
):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name, plot in (
        ("quantization_curves", "quantization/curves.svg"),
        ("weak_scaling", "cluster/scaling.svg"),
    ):
        (docs / plot).unlink()
        monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        monkeypatch.setattr(sys, "argv", [name, "--plot", "--docs", str(docs)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        assert (docs / plot).read_text() == (ROOT / "docs" / plot).read_text()


@pytest.mark.slow
def test_the_size_is_counted_by_folder():
    counted = process("measure_size.py")
    assert re.search(r"[\d,]+  maxstack/schema/ \(\d+ files\)", counted)
    assert re.search(r"[\d,]+  tests/ in all", counted)


def test_drills_print_the_promises_of_the_readme(monkeypatch, capsys):
    assert run(monkeypatch, SCRIPTS / "drills.py", "--promises") == 0
    assert capsys.readouterr().out.strip() in (ROOT / "README.md").read_text()


@pytest.mark.release
def test_bench_cpu_measures_steps_starts_and_attention(tmp_path):
    said = process("bench_cpu.py", "--tiny", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"maxstack f32", "plain_jax scan f32", "plain_jax unroll f32"} <= found[
        "tokens_per_second"
    ].keys()
    assert found["start"].keys() == {"cold", "warm"} and found["attention"].keys() == {
        "ours 64",
        "jax 64",
    }
    assert "process start to first loss, warm compilation cache" in said
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
def test_bench_post_measures_sft_and_dpo_packed_and_not(tmp_path):
    said = process(
        *("bench_post.py", "--tiny", "--peer-python", "no-such-python"),
        *("--json", tmp_path / "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert "left out: TRL" in said and [*found] == ["sft", "dpo"]
    for figures in found.values():
        assert [*figures] == ["maxstack, packed", "maxstack, one a row"]
        assert all(row["tokens_per_second"] > 0 for [row] in figures.values())


@pytest.mark.release
def test_recipes_of_post_training_are_measured_from_a_run_on(tmp_path):
    """From weights that say nothing: every figure is there, and KL of a model to itself is 0."""
    config = (
        *("quickstart", *SMALL, *TEXT, "train.steps=2", f"run.output_dir={tmp_path}"),
        *("eval={every: 0, baselines: false}", "run.tensorboard=false"),
    )
    processes.run(
        [sys.executable, "-m", "maxstack.train", *config], processes.environment(), cwd=ROOT
    )
    said = process(
        "measure_recipes.py",
        *("--run", tmp_path / "quickstart", "--out", tmp_path / "out", "--questions", "12"),
        *("--recipes", "sft", "dpo", "--", "train.steps=20", "checkpoint.every=20"),
        *("eval={every: 0, baselines: false}", "run.tensorboard=false"),
    )
    rows = dict(re.findall(r"^\| (\w+) \|(.*)\|$", said, re.M))
    assert {"quickstart", "sft", "dpo"} <= rows.keys()


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
def test_bench_protection_compares_on_and_off(tmp_path):
    said = process(
        "bench_protection.py",
        "--rounds",
        "1",
        "--steps",
        "8",
        "--only",
        "one device",
        *SMALL[:1],
        RANDOM,
        "--json",
        tmp_path / "found.json",
    )
    assert said.count("one device") == 1
    [found] = json.loads((tmp_path / "found.json").read_text())["one device"]
    assert found.keys() == {"on", "off"} and all(
        one["tokens_per_second"] > 0 for one in found.values()
    )


@pytest.mark.release
def test_bench_checkpoint_times_each_tier(tmp_path):
    said = process(
        "bench_checkpoint.py",
        "--rounds",
        "1",
        "--gigabytes",
        "0.2",
        "--json",
        tmp_path / "found.json",
    )
    assert json.loads((tmp_path / "found.json").read_text())["seconds"].keys() == {
        "a folder that all see",
        "the host's own disk",
        "Orbax, no checksums",
    }
    assert said.startswith("0.2")


@pytest.mark.release
def test_a_training_curve_is_measured_and_kept_beside_the_others(tmp_path):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    process(
        "quantization_curves.py",
        "--steps",
        "12",
        "--only",
        "int8 QAT",
        "--docs",
        docs,
        *SMALL,
        *TEXT,
    )
    found = json.loads((docs / "quantization/curves.json").read_text())
    assert (
        len(found["int8 QAT"]["losses"]) == 12
        and [*found["int8 QAT"]["held_out"]][-1] == "12"
        and len(found["bfloat16"]["losses"]) == 300
    )


@pytest.mark.release
def test_weak_scaling_measures_processes_together_and_apart(tmp_path):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    process(
        "weak_scaling.py",
        "--only",
        "processes",
        "--counts",
        "1",
        "--rounds",
        "1",
        "--docs",
        docs,
        *SMALL[:1],
        *TEXT,
    )
    assert json.loads((docs / "cluster/scaling.json").read_text())["processes"]["1"].keys() == {
        "together",
        "apart",
    }


@pytest.mark.release
def test_an_import_and_an_export_are_measured():
    said = process("measure_import.py", "--gigabytes", "0.31", "--layers", "1")
    assert re.search(r"import_model: peak [\d.]+ GiB.*\nexport_model: peak [\d.]+ GiB", said)


@pytest.mark.release
def test_memory_of_a_run_is_measured_beside_its_plan():
    assert "| dense, fsdp 4 x tensor 2 |" in process(
        "measure_memory.py", "dense, fsdp 4 x tensor 2"
    )


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
def test_clients_soak_a_server_and_nothing_is_lost(tmp_path):
    folder = make(tmp_path / "model", length=128)
    process(
        "soak_server.py",
        *("--model", folder, "--minutes", "0.05", "--clients", "8", "--answer", "20"),
        *("--json", tmp_path / "found.json", "model.dtype=float32", "serve.max_requests=2"),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["lost"] == 0 and found["requests"] > 8 and found["exit code"] == 0
    assert found["all pages free at the end"] and found["seconds to first token"]["p50"] > 0


@pytest.mark.release
def test_clients_load_a_server_of_packages_and_nothing_is_lost_or_wrong(tmp_path):
    folder, found = packaged.make(tmp_path / "toy"), tmp_path / "found.json"
    words = ["--package", folder, "--clients", "4", "--seconds", "9", "--json", found]
    process("load_packages.py", *words)
    found = json.loads(found.read_text())
    assert found["sent"] == found["answered"] > 100 and {*found["answers by version"]} == {"1", "3"}
    assert "is damaged" in found["the damaged version"][0]


@pytest.mark.release
def test_joined_requests_are_measured_beside_single_ones_and_a_plain_loop(tmp_path):
    folder = packaged.make(tmp_path / "toy")
    for words in (["--batch", "8"], ["--signature", "mean"]):
        words += ["--package", folder, "--rounds", "1", "--seconds", "0.5", "--clients", "4"]
        said = process("bench/packages.py", *words)
        assert re.search(r"joined: [\d,]+ rows/s .* joined / this 1.00", said)
        assert re.search(r"loop of the largest batch: [\d,]+ rows/s", said)


def test_plans_that_were_kept_are_written_into_the_page_and_not_made_again(tmp_path, monkeypatch):
    page, kept = tmp_path / "PLAN.md", tmp_path / "plans.json"
    page.write_text((ROOT / "docs/PLAN.md").read_text())
    name = "Llama-3.1 8B on v6e"
    command = yaml.safe_load((SCRIPTS / "plans.yml").read_text())["published"][name]["plan"]
    kept.write_text(
        json.dumps(
            {
                name: {
                    "command": command,
                    "mfu_causal": 0.744,
                    "mfu_full": 0.837,
                    "topology": "v6e:16x16",
                    "mesh": {"fsdp": 256},
                    "took": 55,
                    "devices": 256,
                }
            }
        )
    )
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setattr(
        sys, "argv", ["measure_plans.py", "--only", name, "--kept", str(kept), "--page", str(page)]
    )
    runpy.run_path(str(SCRIPTS / "measure_plans.py"), run_name="__main__")
    assert (
        f"| {name} | `v6e:16x16`, fsdp 256 | 45.5 % full | 83.7% | 40.4 % | 74.4% | 55 s |"
        in page.read_text()
    )


@pytest.mark.release
def test_measure_rl_trains_a_seed_and_its_control_and_draws_them(tmp_path):
    small = "rollout.prompts=8", "train.batch_size=8", "train.steps=5", "eval.steps=1"
    words = "--out", tmp_path / "runs", "--pictures", tmp_path, "--seeds", "3"
    process("measure_rl.py", *small, "eval.every=5", "run.tensorboard=false", *words)
    found = json.loads((tmp_path / "rl.json").read_text())
    assert found.keys() == {"seed 3", "rewards permuted"}
    assert all(len(run["held_out"]) == 2 and len(run["training"]) == 1 for run in found.values())
    assert (tmp_path / "rl.svg").read_text().startswith("<svg")


@pytest.mark.release
def test_bench_images_measures_steps_and_the_feed(tmp_path):
    process("bench_images.py", "--tiny", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["vit-ti16"]["maxstack"][0] > 0 and found["feed"]["maxstack, 0 workers"][0] > 0


@pytest.mark.slow
def test_measure_images_judges_held_out_digits_as_the_page_says(monkeypatch):
    """The page is up to date, and the classifier and distances give what it says of real digits."""
    assert run(monkeypatch, SCRIPTS / "measure_images.py", "--check") == 0
    measure = runpy.run_path(str(SCRIPTS / "measure_images.py"))
    kept = json.loads((ROOT / "docs/pictures/images.json").read_text())
    assert measure["real_digits"]() == pytest.approx(kept["real"], rel=1e-6)


@pytest.mark.release
def test_plot_report_makes_a_run_and_draws_its_page(tmp_path):
    browser.installed()
    words = "--out", tmp_path / "out", "--pictures", tmp_path, "--steps", 36
    process("plot_report.py", *words)
    for name in ("report", "report-time"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.release
def test_the_feed_alone_is_measured_under_each_packing():
    said = process("bench/feed_tokens.py", "--documents", "300", "--batches", "2")
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [row["packing"] for row in rows] == ["concat", "fit", "best", "none"]
    assert rows[0]["padding"] == 0 < rows[2]["padding"] < rows[1]["padding"] < rows[3]["padding"]


@pytest.mark.slow
def test_near_duplicates_are_measured_against_brute_force():
    said = process("bench/near_duplicates.py", "--documents", "400")
    found = re.search(r"precision ([\d.]+) \(theory .*\), recall ([\d.]+) \(theory", said)
    assert min(map(float, found.groups())) > 0.8 and "Jaccard 0.95 to 1.00" in said


@pytest.mark.slow
def test_every_kind_of_step_has_a_speed():
    said = process("bench/steps.py", "README.md", "--megabytes", "0.01")
    kinds = {line.split()[0].removeprefix("kind=") for line in said.splitlines()}
    assert len(kinds) == 11 and all(float(line.split()[-1]) > 0 for line in said.splitlines())
