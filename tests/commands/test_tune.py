"""`maxstack tune`: a table of what was measured; and a kernel whose values are wrong is told, not
kept."""

import dataclasses
import json

import pytest
from tiny_config import TINY

from maxstack.kernels import examples


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yml"
    path.write_text(TINY)
    return path


@pytest.mark.slow
def test_the_table_holds_the_fastest_sizes_of_each_shape_and_the_next_run_takes_them(
    file, tmp_path, maxstack
):
    out = tmp_path / "tuned.json"
    told = maxstack(f"tune {file} --out {out} --rounds 1 --ops attention")
    rows = json.loads(out.read_text())
    assert {row["shape"]["span"] for row in rows} == {8, 32}
    assert {row["backend"] for row in rows} == {"blockwise"}
    assert all(0 < row["microseconds"] <= row["default_microseconds"] for row in rows)
    assert "attention on cpu: scale=0.25, window=8, causal" in told
    blocks = ", ".join(f"{name}={size}" for name, size in rows[0]["blocks"].items())
    said = maxstack(f"kernels {file} run.tuned={out}")
    assert f"blockwise  chosen; tuned blocks {blocks}" in said


@pytest.mark.slow
def test_a_kernel_with_wrong_values_is_told_and_not_kept(file, tmp_path, maxstack, monkeypatch):
    op, *rest = examples.OPS["attention"]
    fast = dataclasses.replace(op["blockwise"], name="fast", module="wrong_attention")
    both = dataclasses.replace(op, backends=(fast, *op.backends))
    monkeypatch.setitem(examples.OPS, "attention", (both, *rest))
    out = tmp_path / "tuned.json"
    told = maxstack(f"tune {file} --out {out} --rounds 1 --ops attention", code=1)
    assert "fast" in told and "WRONG: differs from the reference by" in told
    assert "fast" not in {row["backend"] for row in json.loads(out.read_text())}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ops atention", "this run has no op atention to tune; it has attention"),
        ("--rounds 0", "0 is not a number above 0"),
        ("run.tuned=null", "so there is no table to write"),
        ("--out /proc/nowhere/tuned.json", "/proc/nowhere/tuned.json: cannot write"),
        ("--out /proc", "/proc: cannot read the table"),
    ],
)
def test_what_cannot_be_done_is_told(file, words, told, maxstack):
    assert told in maxstack(f"tune {file} {words}", code=1)
