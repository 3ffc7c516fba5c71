"""The choice among backends: told, pinned, refused; and the names that the configuration knows."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxstack import cli, train
from maxstack.errors import ConfigError
from maxstack.kernels import attention, cross_entropy, gated_delta, grouped_matmul, tuning
from maxstack.kernels.attention.request import AttentionCase, Request
from maxstack.kernels.backends import Device, config_scope, describe, record_choices
from maxstack.schema import kernels as names

ROOT = Path(__file__).resolve().parents[2]
CASE = AttentionCase(
    Request(0.125, window=64), 256, 256, 4, 2, 64, 64, "float32", True, False, Device("cpu", "cpu")
)


@pytest.mark.parametrize(
    ("op", "known"),
    [
        (attention.OP, names.Attention),
        (cross_entropy.OP, names.CrossEntropy),
        (gated_delta.OP, names.GatedDelta),
        (grouped_matmul.OP, names.GroupedMatmul),
    ],
)
def test_the_configuration_knows_every_backend_in_the_order_of_the_op(op, known):
    assert ["auto", *op.names] == [*typing.get_args(known)]


def test_auto_takes_the_first_that_can_serve_and_says_why_each_other_does_not():
    choice = attention.OP.choose(CASE)
    assert choice.backend == "blockwise"
    assert choice.reasons["splash"] == "runs on tpu, and this is a cpu"
    assert choice.reasons["reference"] == "could serve; auto prefers blockwise"
    assert {choice.backend, *choice.reasons} == {*attention.OP.names}


def test_a_pinned_backend_that_cannot_serve_is_an_error_with_its_reason_and_who_can():
    with (
        pytest.raises(ConfigError) as told,
        config_scope("model.blocks.local"),
        config_scope("mixer"),
    ):
        attention.OP.choose(CASE, "cudnn")
    assert str(told.value) == (
        "model.blocks.local.mixer.backend: backend cudnn cannot serve: runs on gpu, and "
        "this is a cpu; "
        "blockwise or reference can, and auto takes blockwise"
    )
    with pytest.raises(ConfigError, match="no backend blokwise; did you mean blockwise"):
        attention.OP.choose(CASE, "blokwise")


@pytest.mark.parametrize(
    "device",
    [Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0)), Device("tpu", "TPU v5p")],
    ids=lambda device: device.platform,
)
def test_keys_that_go_around_a_ring_are_served_by_those_alone_that_can(device):
    choice = attention.OP.choose(dataclasses.replace(CASE, device=device, ring=True))
    assert choice.backend == "blockwise"
    others = [why for why in choice.reasons.values() if not why.startswith("runs on")]
    assert len(others) > 1 and all("keys and values go around a ring" in why for why in others)


def test_what_is_chosen_while_a_program_is_traced_is_recorded_once():
    def layers(x):
        for part, window in (("first", None), ("second", 4), ("third", 4), ("second", 4)):
            with config_scope(part):
                x = attention.attention(x, x, x, None, Request(0.5, window))
        return x

    with record_choices() as choices:
        jax.make_jaxpr(layers)(jnp.zeros((1, 8, 2, 4)))
    assert [describe(choice.case).split(", queries")[0] for choice in choices] == [
        "scale=0.5, causal",
        "scale=0.5, window=4, causal",
    ]
    assert [choice.parts for choice in choices] == [("first",), ("second", "third")]


ROW = {
    "device": "cpu",
    "op": "attention",
    "backend": "blockwise",
    "shape": dict(CASE.shape_class),
    "blocks": {"rows": 32, "keys": 64},
}


def test_measured_sizes_are_found_by_device_op_and_shape_class(tmp_path):
    path = str(tmp_path / "own" / "tuned.json")
    with tuning.use(path):
        assert attention.OP.choose(CASE).blocks is None
        tuning.check_writable(path)
        tuning.add(path, [ROW | {"blocks": {"rows": 8, "keys": 8}}])
        tuning.add(path, [ROW, ROW | {"device": "another"}])
        assert attention.OP.choose(CASE).blocks == {"rows": 32, "keys": 64}
        assert attention.OP.choose(dataclasses.replace(CASE, head_dim=32)).blocks is None
    assert len(tuning.rows(path)) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ('{"a": 1}', "valid list"),
        ('[{"device": "cpu"}]', "0.op: Field required"),
        (json.dumps([ROW, ROW | {"blocks": {"rows": 0}}]), "1.blocks.rows: Input should be"),
        (json.dumps([ROW, ROW | {"blocks": {"rows": True}}]), "1.blocks.rows: Input should be"),
        (
            json.dumps([ROW | {"blocks": {"cows": 8, "keys": 8}}]),
            "are cows, keys, and should be rows, keys",
        ),
    ],
)
def test_a_table_that_says_something_else_is_an_error_and_not_a_default(tmp_path, text, told):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with tuning.use(str(path)), pytest.raises(ConfigError, match=re.escape(told)):
        attention.OP.choose(CASE)


def test_every_shipped_row_has_a_device_an_op_a_shape_and_where_it_was_measured():
    ops = {op.name: op for op in (attention.OP, cross_entropy.OP, grouped_matmul.OP)}
    for row in tuning.rows(tuning.SHIPPED):
        assert row["backend"] in ops[row["op"]].names and row["microseconds"] > 0 and row["date"]


def test_the_refusal_that_the_manual_shows_is_what_the_readmes_file_gets(
    tmp_path, monkeypatch, capsys
):
    readme, manual = ((ROOT / name).read_text() for name in ("README.md", "docs/KERNELS.md"))
    (tmp_path / "mine.yml").write_text(
        re.search(r"```yaml\n(# mine.yml\n.*?)```", readme, re.DOTALL)[1]
    )
    arguments, told = re.search(
        r"^\$ maxstack train (mine.yml .*)\n(error: .*\n)", manual, re.MULTILINE
    ).groups()
    monkeypatch.chdir(tmp_path)
    assert cli.run(train.main, arguments.split()) == 1
    assert capsys.readouterr().err.endswith(told) and sorted(tmp_path.iterdir()) == [
        tmp_path / "mine.yml"
    ]
