"""Quantized training: the matmuls that the rules take run in low precision, close to full precision, on any mesh."""

import jax
import pytest
import tiny

from maxstack import config
from maxstack.config import ConfigError
from maxstack.schema import Config


def recipe(path: str = ".*", weight: str = "int8", **rest: object) -> dict:
    return {"rules": [{"module_path": path, "weight_qtype": weight, "act_qtype": weight} | rest]}


@pytest.mark.parametrize(("path", "dots"), [(".*", 7), ("mlp", 3), ("mixer", 4)])
def test_the_modules_that_a_rule_names_multiply_in_int8_and_no_other(path, dots):
    run = tiny.make_run(tiny.config(quantization=recipe(path), model=tiny.model(layers=1, pattern=["global"])))
    assert str(jax.make_jaxpr(run.eval_step)(run.abstract.params, run.abstract_batch() | {"bytes": run.abstract_batch()["mask"]})).count(
        "preferred_element_type=int32") == dots


@pytest.mark.parametrize(("weight", "rest"), [("int8", {}), ("int8", {"tile_size": 8}), ("int4", {"act_qtype": None}),
                                              ("float8_e4m3fn", {"bwd_qtype": "float8_e5m2"})])
def test_quantized_training_follows_full_precision(weight, rest):
    model = tiny.model(remat={"policy": "full"}, layers=1, pattern=["global"])
    exact, ours = (tiny.steps(tiny.make_run(tiny.config(quantization=q, model=model)), 8) for q in ({}, recipe(weight=weight, **rest)))
    for row, known in zip(ours, exact, strict=True):
        assert row["loss"] != known["loss"]
        assert row["loss"] == pytest.approx(known["loss"], rel=0.02)


def test_a_mesh_does_not_change_quantized_training():
    quantized = {"quantization": recipe(), "model": tiny.model(layers=1, pattern=["global"])}
    alone = tiny.steps(tiny.make_run(tiny.config(**quantized)), 4)
    spread = tiny.steps(tiny.make_run(tiny.config(**quantized, mesh={"data": 2, "fsdp": 2, "tensor": 2}), 8), 4)
    assert [row["loss"] for row in spread] == pytest.approx([row["loss"] for row in alone], rel=5e-3)  # a rounding that falls the other way


@pytest.mark.parametrize(("quantization", "says"), [
    (recipe("mpl"), "quantization.rules.0.module_path: 'mpl' matches no module; the modules of a block are mixer, mlp")])
def test_a_rule_that_matches_nothing_is_refused(quantization, says):
    with pytest.raises(ConfigError, match=says):
        tiny.make_run(tiny.config(quantization=quantization))


@pytest.mark.parametrize(("override", "says"), [
    ("quantization=int7", "did you mean int8"), ("quantization.rules=[{module_path: '(', weight_qtype: int8}]", "no regular expression"),
    ("quantization.rules=[{weight_qtype: int3}]", "int4"),
    ("quantization.rules=[{weight_qtype: int8, weight_calibration_method: max}]", "calibration")])
def test_a_recipe_that_cannot_be_is_refused_before_jax(override, says, tmp_path):
    (tmp_path / "run.yml").write_text(config.dump(tiny.config()))
    with pytest.raises(ConfigError, match=says):
        config.load(Config, tmp_path / "run.yml", [override])
