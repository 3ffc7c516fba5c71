"""The changes that docs/EXTENDING.md shows: they fit the code as it is, and they work."""

import os
import shutil
import subprocess
import sys

import documents
import pytest
from documents import ROOT

PAGE = ROOT / "docs" / "EXTENDING.md"
FAMILY, ACTIVATION, OBJECTIVE = documents.blocks(PAGE, "diff")


def files(diff):
    """(path, its lines) of a diff whose files begin with `+++ PATH`."""
    for part in diff.removeprefix("+++ ").split("\n+++ "):
        path, *lines = part.splitlines()
        yield path, lines


def changed(root, path, lines):
    """The text of a file with the lines that begin with `-`, each there once, replaced by those
    with `+`; a new file has only these."""
    before = "\n".join(line[1:] for line in lines if line[:1] in "- ")
    after = "\n".join(line[1:] for line in lines if line[:1] in "+ ")
    if not before:
        return f"{after}\n"
    text = (root / path).read_text()
    assert text.count(f"{before}\n") == 1, before
    return text.replace(f"{before}\n", f"{after}\n")


@pytest.mark.parametrize(
    "path",
    [
        "maxstack/hf/families/smollm3.py",
        "scripts/goldens.yml",
        "configs/models/smollm3-3b.yml",
    ],
)
def test_a_family_came_in_as_the_page_says(path):
    added = [line[1:] for line in dict(files(FAMILY))[path] if line.startswith("+")]
    text = (ROOT / path).read_text()
    assert [line for line in added if line not in text] == []


@pytest.mark.parametrize(("diff", "name"), [(ACTIVATION, "mish"), (OBJECTIVE, "focal")])
def test_the_changes_for_an_activation_and_an_objective_fit_the_code(diff, name):
    for path, lines in files(diff):
        assert name in changed(ROOT, path, lines).lower()


@pytest.mark.slow
def test_an_activation_and_an_objective_added_as_the_page_says_are_trained_and_tested(tmp_path):
    for folder in ("maxstack", "tests", "configs"):
        left_out = shutil.ignore_patterns("goldens", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    for path, lines in (*files(ACTIVATION), *files(OBJECTIVE)):
        (tmp_path / path).write_text(changed(tmp_path, path, lines))
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{tmp_path / 'tests'}",
        "GLIBC_TUNABLES": "",
    }
    small = [
        "model.blocks.block.mlp.activation=mish",
        "objective.kind=focal",
        "model.embed=16",
        "model.layers=1",
        "data.sources=[{kind: synthetic}]",
        "data.tokenizer={kind: bytes}",
        "data.seq_len=16",
        "train.steps=2",
        "eval={every: 0, baselines: false}",
    ]
    for command in (
        ["pytest", "-q", "--import-mode=importlib", "tests/layers/test_mlp.py", "-k", "formulas"],
        ["maxstack.train", "quickstart", *small],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
