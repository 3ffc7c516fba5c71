"""Rules applied to the weights of a model: which rule takes which weight, and whether it can."""

import dataclasses
import re
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from maxstack.config import ConfigError, nearest, quoted
from maxstack.schema.quantization import QuantizationConfig, RuleConfig
from maxstack.weights.arithmetic import Operand, QuantSpec
from maxstack.weights.observe import Errors, Observed
from maxstack.weights.quantized import HALF, Stored, Trained, floats, stored
from maxstack.weights.spec import WeightSpec

OPS = {
    "matmul": ("dot_general", "einsum"),
    "experts": ("ragged_dot",),
    "rows": ("take",),
    "head": ("dot_general",),
}


@dataclasses.dataclass(frozen=True)
class RuleMatch:
    """A rule and a weight that it takes."""

    number: int
    rule: RuleConfig
    mode: str
    quant: QuantSpec
    spec: WeightSpec

    def substitute(
        self, param: nnx.Param, path: str, errors: Errors | None
    ) -> Trained | Stored | Observed:
        """What stands for the weight in the model; with `errors`, what tells them of the change
        that the rule would be."""
        if errors is not None:
            return Observed(param, self.quant, self.spec, path, errors)
        if self.mode == "ptq":
            return Stored(param, self.quant)
        return Trained(param.get_value(), quant=self.quant, **param.get_metadata())

    def stored(self, array: jax.Array) -> dict[str, jax.Array]:
        """What is kept of the weight where the mode is ptq."""
        return stored(array, self.spec, self.quant)

    def floats(self, leaves: Mapping[str, jax.Array | np.ndarray]) -> jax.Array:
        """The weight that what is kept of it stands for."""
        return floats(leaves, self.spec, self.quant)


def match_rules(cfg: QuantizationConfig, params: Mapping[str, nnx.Param]) -> dict[str, RuleMatch]:
    """Weights by path -> the rule that takes each. ConfigError for a rule that takes nothing, or a
    weight that it cannot serve."""
    weights = {
        path: WeightSpec.of(param)
        for path, param in params.items()
        if param.get_metadata().get("use")
    }
    found: dict[str, RuleMatch] = {}
    users = {
        number: [path for path, place in weights.items() if _matches(rule, path, place)]
        for number, rule in enumerate(cfg.rules)
    }
    first = {path: number for number in reversed(users) for path in users[number]}
    for number, rule in enumerate(cfg.rules):
        mine = [path for path in users[number] if first[path] == number]
        if not mine:
            why = _nothing(rule, users, first, number, params, weights)
            raise ConfigError(
                f"quantization.rules.{number}.module_path: {quoted(rule.module_path)} {why}"
            )
        for path in mine if rule.weight_qtype else ():
            found[path] = _of(number, rule, rule.mode or cfg.mode, path, weights[path])
    return found


def _matches(rule: RuleConfig, path: str, place: WeightSpec) -> bool:
    names = path, path.rpartition("/")[0]
    return any(re.fullmatch(rule.module_path, name) for name in names if name) and (
        not rule.op_names or bool({*OPS[place.use]} & {*rule.op_names})
    )


def _nothing(
    rule: RuleConfig,
    users: dict[int, list[str]],
    first: dict[str, int],
    number: int,
    params: Mapping[str, nnx.Param],
    weights: Mapping[str, WeightSpec],
) -> str:
    if users[number]:
        return (
            f"takes nothing: rule {first[users[number][0]]} comes first and takes "
            f"{users[number][0]}; put this rule before it"
        )
    if rule.op_names and any(
        _matches(rule.model_copy(update={"op_names": ()}), path, place)
        for path, place in weights.items()
    ):
        return (
            "takes nothing: no weight that module_path matches is used so (op_names "
            f"{', '.join(rule.op_names)}); drop op_names, or see "
            "`maxstack quantize show CONFIG` for what there is"
        )
    others = [
        path for path in params if path not in weights and re.fullmatch(rule.module_path, path)
    ]
    if others:
        return (
            f"matches only {', '.join(others[:3])}, which no quantized matmul can serve: "
            "routers, norms, biases and convolutions are computed as they are"
        )
    modules = {part for path in weights for part in (path, path.rpartition("/")[0]) if part}
    close = nearest(rule.module_path, modules, 3) or sorted(modules)[:6]
    return (
        f"matches no weight; nearest paths: {', '.join(close)}; `maxstack quantize show "
        "CONFIG` lists all"
    )


def _of(number: int, rule: RuleConfig, mode: str, path: str, place: WeightSpec) -> RuleMatch:
    where = f"quantization.rules.{number}"
    assert rule.weight_qtype
    channelwise, tile = not rule.disable_channelwise_axes, rule.tile_size
    inputs = place.matrix[place.contracted]
    size = round(inputs * tile) if isinstance(tile, float) else tile
    if size is not None and (not size or inputs % size):
        raise ConfigError(
            f"{where}.tile_size: {tile} does not divide the {inputs} inputs of {path}; "
            f"use a divisor, or give {path} a rule of its own "
            "before this one"
        )
    if rule.weight_qtype in HALF and mode == "ptq" and place.matrix[place.packed] % 2:
        raise ConfigError(
            f"{where}.weight_qtype: {rule.weight_qtype} keeps two values in a byte, and "
            f"{path} {[*place.shape]} has no even dimension "
            "for that; use int8 for it, in a rule before this one"
        )
    if rule.disable_channelwise_axes and place.use == "rows":
        raise ConfigError(
            f"{where}.disable_channelwise_axes: {path} is a table, of which each lookup "
            "rounds the rows that it takes; "
            "give it a rule of its own before this one, with scales for its rows"
        )
    if rule.bwd_weight_grad_tile_size and place.use == "experts":
        raise ConfigError(
            f"{where}.bwd_weight_grad_tile_size: {path} is of experts, whose rows lie in "
            "no sequence; give it a rule of its own before "
            "this one, without tiles"
        )
    if rule.bwd_qtype and place.use in ("rows", "head"):
        head = "the head, which the loss multiplies in the compute dtype, forward and backward"
        what = head if place.use == "head" else "a lookup, which has no matmul"
        raise ConfigError(
            f"{where}.bwd_qtype: {path} is {what}; give it a rule of its own before this "
            "one, without bwd_qtype: "
            f"{{module_path: {path}, weight_qtype: {rule.weight_qtype}}} rounds its "
            f"values, {{module_path: {path}}} leaves it"
        )

    def operand(qtype: str | None, tile: int | float | None, method: str) -> Operand | None:
        return Operand(qtype, tile, method, channelwise) if qtype else None

    weight = Operand(rule.weight_qtype, tile, rule.weight_calibration_method, channelwise)
    act = operand(rule.act_qtype, tile, rule.act_calibration_method)
    grad = operand(rule.bwd_qtype, None, rule.bwd_calibration_method)
    weight_grad = operand(
        rule.bwd_qtype, rule.bwd_weight_grad_tile_size, rule.bwd_calibration_method
    )
    return RuleMatch(number, rule, mode, QuantSpec(weight, act, grad, weight_grad), place)
