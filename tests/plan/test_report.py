"""`maxstack plan` as a user calls it, on eight virtual CPU devices: its figures against sums made
another way."""

import json
import re

import jax
import pytest
import tiny
from plans import plan

from maxstack import cli
from maxstack.models.flops import flops_per_token
from maxstack.plan import report

MESH = {"data": 2, "context": 2, "tensor": 2}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The configuration, what the command printed, and its JSON."""
    folder, cfg = tmp_path_factory.mktemp("plan"), tiny.config(mesh=MESH)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *text, **_: said.extend(map(str, text)))
        words = f"plan {tiny.write(folder, cfg)} --json {folder / 'plan.json'}"
        assert cli.main(words.split()) == 0
    return cfg, "\n".join(said), json.loads((folder / "plan.json").read_text())


@pytest.mark.slow
def test_the_parts_of_memory_add_up_to_what_is_needed(planned):
    _, _, found = planned
    assert sum(found["memory"].values()) == found["needed"] <= found["usable"]
    assert found["fits"] is True


@pytest.mark.slow
def test_state_is_counted_by_its_shards(planned):
    cfg, _, found = planned
    state = tiny.make_run(cfg, 8).init()
    for part, tree in (("parameters", state.params), ("optimizer", state.opt)):
        assert found["memory"][part] == sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree)
        )


def test_flops_are_those_of_mfu(planned):
    cfg, _, found = planned
    total = sum(count["causal"] for count in found["flops"].values())
    assert total == pytest.approx(
        flops_per_token(cfg.model, cfg.data.seq_len) * cfg.train.batch_size * cfg.data.seq_len
    )


@pytest.mark.slow
def test_products_in_low_precision_are_told_by_their_type(planned, tmp_path, maxstack):
    rule = {"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "int8", "act_qtype": "int8"}
    path = tiny.write(tmp_path, tiny.config(mesh=MESH, quantization={"rules": [rule]}))
    said = maxstack(f"plan {path} --json {tmp_path / 'plan.json'}")
    weights, tokens = 3 * (32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 64), 8 * 48
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["products"]["s8"] == 2 * weights * tokens / 8
    assert "in s8: 2.65 MFLOP of " in said and "in s8" not in planned[1]


def test_gradients_are_seen_to_be_summed_over_the_replicas(planned):
    _, _, found = planned
    assert any(
        flow["kind"] == "all-reduce" and "data" in flow["axes"] and flow["bytes"] > 0
        for flow in found["flows"]
    )


def test_the_screen_ends_with_the_verdict_and_names_source_lines(planned):
    _, said, _ = planned
    lines = said.splitlines()
    assert lines[-1].startswith("FITS: ") and len(lines) < 60
    assert re.search(r"maxstack/(layers|kernels)/\S+\.py:\d+", said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--topology v5e:16x17", "nearest: v5e:16x16"),
        ("--topology v9:2x2", "chip v9: is not in the table"),
        ("--search --batch max", "leave one out"),
        ("--search", "has none in chips.yml"),
        ("--topology here:8", "takes no size"),
        ("--search --finalists 0", "a number of 1 or more"),
        ("--out x.yml", "needs --search or --batch max"),
        ("--json no/such/x.json", "give a file in a folder that exists"),
        ("--save-executable .", "is a folder"),
    ],
)
def test_a_mistake_is_one_line(arguments, says, tmp_path, maxstack):
    path = tiny.write(tmp_path, tiny.config(mesh=MESH))
    error = maxstack(f"plan {path} {arguments}", code=1)
    assert says in error and error.count("\n") == 1


def test_images_are_counted_as_such():
    made = plan(batch_size=8, seq_len=16, counted="images")
    assert made.json()["images_per_second"] == 16 and made.tokens_per_second == 256
    assert "at most 16 images/s, 256 tokens/s (64 per device)" in report.text(made)
