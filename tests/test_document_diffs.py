"""The changes that docs/ADDING_A_MODEL.md shows: they fit the code as it is, and they work."""

import os
import shutil
import subprocess
import sys

import documents
import pytest
from documents import ROOT

PAGE = ROOT / "docs" / "ADDING_A_MODEL.md"
FAMILY, ACTIVATION = documents.blocks(PAGE, "diff")


def files(diff):
    """(path, its lines) of a diff whose files begin with `+++ PATH`."""
    for part in diff.removeprefix("+++ ").split("\n+++ "):
        path, *lines = part.splitlines()
        yield path, lines


def applied(text, lines):
    """`text` with the lines that begin with `-`, each there once, replaced by those with `+`."""
    before = "\n".join(line[1:] for line in lines if line[:1] in "- ")
    after = "\n".join(line[1:] for line in lines if line[:1] in "+ ")
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


def test_the_change_for_an_activation_fits_the_code():
    for path, lines in files(ACTIVATION):
        assert "mish" in applied((ROOT / path).read_text(), lines)


@pytest.mark.slow
def test_an_activation_that_is_added_as_the_page_says_is_trained_and_tested(tmp_path):
    for folder in ("maxstack", "tests", "configs"):
        left_out = shutil.ignore_patterns("goldens", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    for path, lines in files(ACTIVATION):
        (tmp_path / path).write_text(applied((tmp_path / path).read_text(), lines))
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{tmp_path / 'tests'}",
        "GLIBC_TUNABLES": "",
    }
    mlp = "model.blocks.block.mlp.activation=mish"
    small = [
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
        ["maxstack.train", "quickstart", mlp, *small],
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
