"""Rules of a quantization recipe, applied to the weights of a model."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from flax import nnx
from jax import Array

from maxstack.errors import ConfigError, quoted
from maxstack.schema.quantization import QuantizationConfig, RuleConfig
from maxstack.weights.arithmetic import Operand, QuantSpec
from maxstack.weights.low_precision import HALF, StoredWeight, TrainedWeight, floats, stored
from maxstack.weights.quantization_errors import Errors, ObservedWeight
from maxstack.weights.spec import WeightSpec, matches, near

OPS = {
    "matmul": ("dot_general", "einsum"),
    "experts": ("ragged_dot",),
    "rows": ("take",),
    "head": ("dot_general",),
}


@dataclasses.dataclass(frozen=True)
class RuleMatch:
    """A rule, and a weight that it quantizes."""

    number: int
    rule: RuleConfig
    mode: str
    quant: QuantSpec
    spec: WeightSpec

    @property
    def kept_low(self) -> bool:
        """The weight is kept in low precision, instead of rounded as it is used."""
        return self.mode == "ptq"

    def substitute(
        self, param: nnx.Param, path: str, errors: Errors | None
    ) -> TrainedWeight | StoredWeight | ObservedWeight:
        """Substitute for the weight; with `errors`, a substitute that computes as the weight does,
        and adds the change that the rule would make to them."""
        if errors is not None:
            return ObservedWeight(param, self.quant, self.spec, path, errors)
        if self.kept_low:
            return StoredWeight(param, self.quant)
        return TrainedWeight(param.get_value(), quant=self.quant, **param.get_metadata())

    def stored(self, array: Array) -> dict[str, Array]:
        """Leaves of the weight in low precision, where the mode is ptq."""
        return stored(array, self.spec, self.quant)

    def floats(self, leaves: Mapping[str, Array | np.ndarray]) -> Array:
        """The weight that such leaves stand for."""
        return floats(leaves, self.spec, self.quant)


def match_rules(cfg: QuantizationConfig, params: Mapping[str, nnx.Param]) -> dict[str, RuleMatch]:
    """Weights by path -> the first rule that matches each. ConfigError for a rule that takes
    nothing, or a weight that it cannot serve."""
    specs = {
        path: WeightSpec.of(param)
        for path, param in params.items()
        if param.get_metadata().get("use")
    }
    users = [
        [path for path, spec in specs.items() if _applies(rule, path, spec)] for rule in cfg.rules
    ]
    first = {path: number for number in reversed(range(len(users))) for path in users[number]}
    rows: dict[str, RuleMatch] = {}
    for number, rule in enumerate(cfg.rules):
        paths = [path for path in users[number] if first[path] == number]
        if not paths:
            why = _no_match(rule, params, specs)
            if users[number]:
                path = users[number][0]
                why = (
                    f"takes nothing: rule {first[path]} comes first and takes {path}; "
                    "put this rule before it"
                )
            raise ConfigError(
                f"quantization.rules.{number}.module_path: {quoted(rule.module_path)} {why}"
            )
        for path in paths if rule.weight_qtype else ():
            rows[path] = _match(number, rule, rule.mode or cfg.mode, path, specs[path])
    return rows


def _applies(rule: RuleConfig, path: str, spec: WeightSpec) -> bool:
    used = not rule.op_names or not set(rule.op_names).isdisjoint(OPS[spec.use])
    return used and matches(rule.module_path, path)


def _no_match(
    rule: RuleConfig, params: Mapping[str, nnx.Param], specs: Mapping[str, WeightSpec]
) -> str:
    """Reason why a rule matches no weight, and a remedy."""
    if any(matches(rule.module_path, path) for path in specs):
        return (
            "takes nothing: no weight that module_path matches is used so (op_names "
            f"{', '.join(rule.op_names)}); drop op_names, or see "
            "`maxstack quantize show CONFIG` for what there is"
        )
    others = [path for path in params if path not in specs and re.fullmatch(rule.module_path, path)]
    if others:
        return (
            f"matches only {', '.join(others[:3])}, which no quantized matmul can serve: "
            "routers, norms, biases and convolutions are computed as they are"
        )
    return (
        f"matches no weight; nearest paths: {near(rule.module_path, specs)}; `maxstack quantize "
        "show CONFIG` lists all"
    )


def _match(number: int, rule: RuleConfig, mode: str, path: str, spec: WeightSpec) -> RuleMatch:
    where = f"quantization.rules.{number}"
    assert rule.weight_qtype
    channelwise, tile = not rule.disable_channelwise_axes, rule.tile_size
    inputs = spec.matrix[spec.contracted]
    size = round(inputs * tile) if isinstance(tile, float) else tile
    if size is not None and (not size or inputs % size):
        raise ConfigError(
            f"{where}.tile_size: {tile} does not divide the {inputs} inputs of {path}; use a "
            f"divisor, or give {path} a rule of its own before this one"
        )
    if rule.weight_qtype in HALF and mode == "ptq" and spec.matrix[spec.packed] % 2:
        raise ConfigError(
            f"{where}.weight_qtype: {rule.weight_qtype} keeps two values in a byte, and "
            f"{path} {[*spec.shape]} has no even dimension "
            "for that; use int8 for it, in a rule before this one"
        )
    if rule.disable_channelwise_axes and spec.use == "rows":
        raise ConfigError(
            f"{where}.disable_channelwise_axes: {path} is a table, of which each lookup "
            "rounds the rows that it takes; "
            "give it a rule of its own before this one, with scales for its rows"
        )
    if rule.bwd_weight_grad_tile_size and spec.use == "experts":
        raise ConfigError(
            f"{where}.bwd_weight_grad_tile_size: {path} is of experts, whose rows lie in no "
            "sequence; give it a rule of its own before this one, without tiles"
        )
    if rule.bwd_qtype and spec.use in ("rows", "head"):
        head = "the head, which the loss multiplies in the compute dtype, forward and backward"
        what = head if spec.use == "head" else "a lookup, which has no matmul"
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
    return RuleMatch(number, rule, mode, QuantSpec(weight, act, grad, weight_grad), spec)
