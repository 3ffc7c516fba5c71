"""Rules and the weights that they take: by whole path or module, the first that matches, and an
error that says what to do where one cannot."""

import pytest
import tiny

from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.weights.rewrite import Rewrite

ONE = tiny.model(layers=1, pattern=["global"])
MIXER, MLP = ["key", "out", "query", "value"], ["down", "gate", "up"]


def rule(path: str = ".*", weight: str | None = "int8", **rest: object) -> dict:
    return {"module_path": path, "weight_qtype": weight} | rest


def matches(*rules: dict, model: dict = ONE, **rest: object) -> dict:
    return Rewrite(tiny.config(quantization={"rules": list(rules)} | rest, model=model)).matches


@pytest.mark.parametrize(
    ("path", "paths"),
    [
        (
            ".*",
            [
                "embed",
                "head",
                *(f"blocks/global/mixer/{name}" for name in MIXER),
                *(f"blocks/global/mlp/{name}" for name in MLP),
            ],
        ),
        (".*/mlp", [f"blocks/global/mlp/{name}" for name in MLP]),
        (".*/mixer/(query|key)", ["blocks/global/mixer/key", "blocks/global/mixer/query"]),
        ("blocks/global/mixer/out", ["blocks/global/mixer/out"]),
        ("embed", ["embed"]),
    ],
)
def test_a_rule_takes_the_weights_whose_path_or_module_it_matches_whole(path, paths):
    assert sorted(matches(rule(path))) == sorted(paths)


def test_the_first_rule_that_matches_takes_a_weight_and_one_without_a_type_leaves_it():
    found = matches(rule("embed", "int4"), rule(".*/gate", None), rule())
    assert {path: use.number for path, use in found.items() if path in ("embed", "head")} == {
        "embed": 0,
        "head": 2,
    }
    assert "blocks/global/mlp/gate" not in found and found["blocks/global/mlp/up"].number == 2


def test_op_names_choose_by_what_multiplies():
    assert sorted(matches(rule(op_names=["take"]))) == ["embed"]
    experts = tiny.one_block(mlp=tiny.MOE, layers=1)
    assert sorted(matches(rule(op_names=["ragged_dot"]), model=experts)) == [
        f"blocks/block/mlp/{name}" for name in MLP
    ]


def test_a_rule_has_its_own_mode_or_that_of_the_recipe():
    found = matches(rule("embed", mode="qat"), rule(), mode="ptq")
    assert (found["embed"].mode, found["head"].mode) == ("qat", "ptq")


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            [rule("blocks/globl/mlp")],
            "rules.0.module_path: 'blocks/globl/mlp' matches no weight; nearest paths: "
            "blocks/global/mlp",
        ),
        (
            [rule(), rule("embed", "int4")],
            "rules.1.module_path: 'embed' takes nothing: rule 0 comes first and takes "
            "embed; put this rule before it",
        ),
        (
            [rule(op_names=["ragged_dot"])],
            r"rules.0.module_path: '\.\*' takes nothing: no weight that module_path "
            r"matches is used so",
        ),
        (
            [rule(".*norm/scale")],
            r"rules.0.module_path: '\.\*norm/scale' matches only "
            r"blocks/global/mixer_norm/scale, .* which no quantized matmul can serve",
        ),
        ([rule(tile_size=24)], r"rules.0.tile_size: 24 does not divide the 32 inputs of \w+"),
        (
            [rule(bwd_qtype="int8")],
            "rules.0.bwd_qtype: embed is a lookup, which has no matmul; give it a rule "
            "of its own before this one",
        ),
        (
            [rule(disable_channelwise_axes=True)],
            "rules.0.disable_channelwise_axes: embed is a table, of which each lookup "
            "rounds the rows that it takes",
        ),
        (
            [rule("head", bwd_qtype="int8")],
            "rules.0.bwd_qtype: head is the head, which the loss multiplies in the "
            "compute dtype, forward and backward; give it a rule of its own",
        ),
    ],
)
def test_a_rule_that_cannot_serve_is_refused_by_name(rules, says):
    with pytest.raises(ConfigError, match=f"quantization.{says}"):
        matches(*rules)


def test_four_bits_need_an_even_dimension():
    mixer, mlp = {"kind": "attention", "heads": 1, "head_dim": 2}, {"kind": "dense", "hidden": 1}
    odd = tiny.one_block(mixer, mlp, layers=1, embed=3)
    said = "rules.0.weight_qtype: int4 keeps two values in a byte, and .* has no even dimension"
    with pytest.raises(ConfigError, match=said):
        matches(rule(".*/mlp", "int4", mode="ptq"), model=odd)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("quantization={mode: ptq}", "quantization.mode: mode=ptq without rules takes nothing"),
        ("quantization=int7", "did you mean int8"),
        (
            "quantization.rules=[{module_path: '(', weight_qtype: int8}]",
            "is not a regular expression",
        ),
        ("quantization.rules=[{act_qtype: int8}]", "act_qtype=int8 without weight_qtype"),
        (
            "quantization.rules=[{weight_qtype: int8, act_qtype: nf4}]",
            "nf4 is a type of weights alone",
        ),
        (
            "quantization.rules=[{weight_qtype: int8, weight_calibration_method: max}]",
            "calibration",
        ),
        (
            "quantization.rules=[{weight_qtype: int8, weight_calibration_method: 'absmax,1.2.3'}]",
            "allowed: text that matches",
        ),
        (
            "quantization.rules=[{weight_qtype: int8, weight_calibration_method: minmax, "
            "bwd_qtype: int8}]",
            "which a quantized backward pass cannot undo",
        ),
        (
            "quantization.rules=[{weight_qtype: int8, weight_calibration_method: 'fixed,1,2'}]",
            "the range must hold 0",
        ),
        ("quantization.rules=[{weight_qtype: mxfp4}]", "set tile_size: 32"),
        ("quantization.rules=[{weight_qtype: int8, tile_size: 0.3}]", "does not divide the axis"),
        (
            "quantization.rules=[{weight_qtype: int8, mode: qat, bwd_qtype: int8}]",
            "no quantized backward pass; use mode: qt",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_before_jax(override, says, tmp_path):
    path = tiny.write(tmp_path, tiny.config())
    with pytest.raises(ConfigError, match=says):
        load(path, [override])
