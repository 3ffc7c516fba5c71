"""Rules of a quantization recipe, matched to the weights of a model.

A rule names weights by a pattern of their paths or of their modules' paths, and by the operation
that reads them. Each weight takes the first rule that matches it; a rule without `weight_qtype`
leaves its weights as they are. Every rule must take a weight and serve each that it takes: a recipe
with a typing error would otherwise train a float model without a word.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np
from flax import nnx
from jax import Array

from maxstack.errors import ConfigError, quoted
from maxstack.schema.quantization import QuantizationConfig, RuleConfig
from maxstack.weights.arithmetic import Operand, QuantSpec
from maxstack.weights.low_precision import (
    HALF,
    StoredWeight,
    TrainedWeight,
    dequantize_weight,
    quantize_weight,
)
from maxstack.weights.quantization_errors import Errors, ObservedWeight
from maxstack.weights.spec import WeightSpec, matches, near

OPS = {
    "matmul": ("dot_general", "einsum"),
    "experts": ("ragged_dot",),
    "rows": ("take",),
    "head": ("dot_general",),
}
"""Use of a weight -> Qwix's names of the operations that read it."""


@dataclasses.dataclass(frozen=True)
class RuleMatch:
    """A rule and a weight that it quantizes."""

    number: int
    rule: RuleConfig
    mode: str
    quant: QuantSpec
    spec: WeightSpec

    @property
    def kept_low(self) -> bool:
        """True where the weight is kept in low precision, not rounded at each use."""
        return self.mode == "ptq"

    def substitute(
        self, param: nnx.Param, path: str, errors: Errors | None
    ) -> TrainedWeight | StoredWeight | ObservedWeight:
        """Return the substitute for the weight; with `errors`, one that computes as the float
        weight does and records the error that the rule would make."""
        if errors is not None:
            return ObservedWeight(param, self.quant, self.spec, path, errors)
        if self.kept_low:
            return StoredWeight(param, self.quant)
        return TrainedWeight(param.get_value(), quant=self.quant, **param.get_metadata())

    def quantize(self, array: Array) -> dict[str, Array]:
        """Return the leaves that stand for a float weight in low precision."""
        return quantize_weight(array, self.spec, self.quant)

    def dequantize(self, leaves: Mapping[str, Array | np.ndarray]) -> Array:
        """Return the float weight that such leaves stand for."""
        return dequantize_weight(leaves, self.spec, self.quant)


def match_rules(cfg: QuantizationConfig, params: Mapping[str, nnx.Param]) -> dict[str, RuleMatch]:
    """Return the first matching rule of each quantized weight, by path. ConfigError for a rule that
    takes no weight, or one that it cannot serve."""
    specs = {
        path: WeightSpec.of(param)
        for path, param in params.items()
        # The others (routers, norms, biases, convolutions) are operands of no matmul that can be
        # rounded.
        if param.get_metadata().get("use")
    }
    taken: dict[str, int] = {}
    found: dict[str, RuleMatch] = {}
    for number, rule in enumerate(cfg.rules):
        users = [path for path, spec in specs.items() if _applies(rule, path, spec)]
        own = [path for path in users if path not in taken]
        if not own:
            why = _no_match(rule, params, specs)
            if users:
                why = (
                    f"takes nothing: rule {taken[users[0]]} comes first and takes {users[0]}; "
                    "put this rule before it"
                )
            where = f"quantization.rules.{number}.module_path: {quoted(rule.module_path)}"
            raise ConfigError(f"{where} {why}")
        # Before the next line: a rule without a type takes its weights from later rules too.
        taken |= dict.fromkeys(own, number)
        if not rule.weight_qtype:
            continue
        mode, quant = rule.mode or cfg.mode, _quant_spec(rule)
        for path in own:
            for key, problem in _problems(rule, mode, path, specs[path]):
                raise ConfigError(f"quantization.rules.{number}.{key}: {problem}")
            found[path] = RuleMatch(number, rule, mode, quant, specs[path])
    return found


def _applies(rule: RuleConfig, path: str, spec: WeightSpec) -> bool:
    used = not rule.op_names or not set(rule.op_names).isdisjoint(OPS[spec.use])
    return used and matches(rule.module_path, path)


def _no_match(
    rule: RuleConfig, params: Mapping[str, nnx.Param], specs: Mapping[str, WeightSpec]
) -> str:
    """Return why a rule matches no weight, and a remedy."""
    if any(matches(rule.module_path, path) for path in specs):
        return (
            "takes nothing: no weight that module_path matches is used so (op_names "
            f"{', '.join(rule.op_names)}); drop op_names, or see `maxstack quantize show CONFIG` "
            "for what there is"
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


def _problems(
    rule: RuleConfig, mode: str, path: str, spec: WeightSpec
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a rule cannot serve a weight: the rule's key, and what to do."""
    own, tile = "a rule of its own before this one", rule.tile_size
    inputs = spec.matrix[spec.contracted]
    size = round(inputs * tile) if isinstance(tile, float) else tile
    if size is not None and (not size or inputs % size):
        yield (
            "tile_size",
            f"{tile} does not divide the {inputs} inputs of {path}; use a divisor, or give {path} "
            f"{own}",
        )
    # qt and qat keep floats, which fit any width.
    if rule.weight_qtype in HALF and mode == "ptq" and spec.matrix[spec.packed] % 2:
        yield (
            "weight_qtype",
            f"{rule.weight_qtype} keeps two values in a byte, and {path} {[*spec.shape]} has no "
            f"even dimension for that; give it {own}, with int8",
        )
    if rule.disable_channelwise_axes and spec.use == "rows":
        yield (
            "disable_channelwise_axes",
            f"{path} is a table, of which each lookup rounds the rows that it takes; give it {own},"
            " with scales for its rows",
        )
    if rule.bwd_weight_grad_tile_size and spec.use == "experts":
        yield (
            "bwd_weight_grad_tile_size",
            f"{path} is of experts, whose rows lie in no sequence; give it {own}, without tiles",
        )
    no_backward = {
        "rows": "a lookup, which has no matmul",
        "head": "the head, which the loss multiplies in the compute dtype, forward and backward",
    }
    if rule.bwd_qtype and spec.use in no_backward:
        yield (
            "bwd_qtype",
            f"{path} is {no_backward[spec.use]}; give it {own}, without bwd_qtype: "
            f"{{module_path: {path}, weight_qtype: {rule.weight_qtype}}} rounds its values, "
            f"{{module_path: {path}}} leaves it",
        )


def _quant_spec(rule: RuleConfig) -> QuantSpec:
    """Return the operands of the three matmuls of a rule, in its words."""

    def operand(qtype: str | None, tile: int | float | None, method: str) -> Operand | None:
        return Operand(qtype, tile, method, not rule.disable_channelwise_axes) if qtype else None

    weight = operand(rule.weight_qtype, rule.tile_size, rule.weight_calibration_method)
    assert weight
    return QuantSpec(
        weight,
        act=operand(rule.act_qtype, rule.tile_size, rule.act_calibration_method),
        # As in Qwix, tile_size is of the forward pass; the weights' gradient has a tile size of its
        # own.
        grad=operand(rule.bwd_qtype, None, rule.bwd_calibration_method),
        weight_grad=operand(
            rule.bwd_qtype, rule.bwd_weight_grad_tile_size, rule.bwd_calibration_method
        ),
    )
