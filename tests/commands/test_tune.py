"""`maxstack tune`: a table of what was measured; and a kernel whose values are wrong is told, not
kept."""

import dataclasses
import json

import pytest

from maxstack import cli
from maxstack.kernels import examples


@pytest.fixture
def file(tmp_path):
    from tiny_config import TINY

    path = tmp_path / "tiny.yml"
    path.write_text(TINY)
    return path


@pytest.mark.slow
def test_the_table_holds_the_fastest_sizes_of_each_shape_and_the_next_run_takes_them(
    file, tmp_path, capsys
):
    out = tmp_path / "tuned.json"
    assert cli.main(f"tune {file} --out {out} --rounds 1 --ops attention".split()) == 0
    rows, told = json.loads(out.read_text()), capsys.readouterr().out
    assert {row["shape"]["span"] for row in rows} == {8, 32} and {
        row["backend"] for row in rows
    } == {"blockwise"}
    assert all(0 < row["microseconds"] <= row["default_microseconds"] for row in rows)
    assert "attention on cpu: scale=0.25, window=8, causal" in told
    assert cli.main(["kernels", str(file), f"run.tuned={out}"]) == 0
    assert (
        "blockwise  chosen; tuned blocks "
        f"{', '.join(f'{name}={size}' for name, size in rows[0]['blocks'].items())}"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_kernel_with_wrong_values_is_told_and_not_kept(file, tmp_path, capsys, monkeypatch):
    op, *rest = examples.OPS["attention"]
    fast = dataclasses.replace(op["blockwise"], name="fast", module="wrong_attention")
    monkeypatch.setitem(
        examples.OPS, "attention", (dataclasses.replace(op, backends=(fast, *op.backends)), *rest)
    )
    out = tmp_path / "tuned.json"
    assert cli.main(f"tune {file} --out {out} --rounds 1 --ops attention".split()) == 1
    assert (
        "fast" in (told := capsys.readouterr().out)
        and "WRONG: differs from the reference by" in told
    )
    assert "fast" not in {row["backend"] for row in json.loads(out.read_text())}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ops", "atention"], "this run has no op atention to tune; it has attention"),
        (["--rounds", "0"], "0 is not a number above 0"),
        (["run.tuned=null"], "so there is no table to write"),
        (["--out", "/proc/nowhere/tuned.json"], "/proc/nowhere/tuned.json: cannot write"),
        (["--out", "/proc"], "/proc: cannot read the table"),
    ],
)
def test_what_cannot_be_done_is_told(file, words, told, capsys):
    assert cli.main(["tune", str(file), *words]) == 1
    assert told in capsys.readouterr().err
