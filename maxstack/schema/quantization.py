"""The quantization recipe: rules with Qwix's own names, checked before jax or Qwix is imported."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import Fault, Items, PositiveFloat, PositiveInt, Regex, Section

QType = Literal[
    "int8",
    "int7",
    "int6",
    "int5",
    "int4",
    "int3",
    "int2",
    "float8_e4m3fn",
    "float8_e5m2",
    "nf4",
    "mxfp8",
    "mxfp4",
]
Mode = Literal["qt", "qat", "ptq"]
Op = Literal["dot_general", "einsum", "ragged_dot", "take"]
CALIBRATION = r"^(absmax(,\d*\.?\d+)?|minmax(,\d*\.?\d+)?|rms,\d*\.?\d+|fixed(,-?\d*\.?\d+){1,2})$"
BLOCK = {"mxfp8": 32, "mxfp4": 32}
WEIGHTS_ALONE = {"nf4": "int4 or int8", "mxfp4": "mxfp8 or int8"}
"""Types of weights only, and what to use for other operands."""


class RuleConfig(Section):
    """Quantization of the weights that a pattern matches; the first matching rule applies."""

    module_path: Regex = ".*"
    """Regular expression that matches the whole path of a weight, or of its module:
    'blocks/.*/mlp', '.*/mixer/query', embed, head. `maxstack quantize show CONFIG` lists the
    paths."""
    op_names: Items[Op] = ()
    """Restrict the rule to weights with these uses: dot_general: projections and an untied head;
    einsum: projections; ragged_dot: experts; take: embedding tables, also with a tied head. Empty:
    all."""
    mode: Mode | None = None
    """qt: train float weights with matmuls in low precision. qat: the same with an unquantized
    backward pass, so that training sees what ptq gives. ptq: keep weights in low precision, without
    training them. null: quantization.mode."""
    weight_qtype: QType | None = None
    """Type of the weights in the forward pass; null: leave the matched weights as they are."""
    act_qtype: QType | None = None
    """Type of the activations in the forward pass; null: not quantized."""
    bwd_qtype: QType | None = None
    """Type of the incoming gradient in both backward matmuls; null: the backward pass is not
    quantized."""
    tile_size: PositiveInt | PositiveFloat | None = None
    """Number of values along the contracted axis that share a scale, or a fraction of the axis;
    null: the whole axis."""
    weight_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """How the scale is computed from the weights: absmax, minmax, `rms,7`, `fixed,-10,10`;
    `absmax,0.8` uses 0.8 of the range."""
    act_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """How the scale is computed from the activations, as in weight_calibration_method."""
    bwd_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """How the scale is computed from the gradients, as in weight_calibration_method."""
    bwd_weight_grad_tile_size: PositiveInt | PositiveFloat | None = None
    """Number of positions, in all sequences together, that share a scale in the matmul for the
    weight gradient; null: all."""
    disable_channelwise_axes: bool = False
    """Use one scale for a whole tensor, or tile, instead of one per row or column."""

    def own_faults(self) -> Iterator[Fault]:
        for key in ("act_qtype", "bwd_qtype"):
            qtype = getattr(self, key)
            if qtype and not self.weight_qtype:
                yield (
                    key,
                    f"{key}={qtype} without weight_qtype; give one, or drop this key to leave the "
                    "weights as they are",
                )
            if instead := WEIGHTS_ALONE.get(qtype):
                yield (
                    key,
                    f"{key}={qtype}: {qtype} is a type of weights alone; use "
                    f"{instead if key == 'act_qtype' else 'float8_e5m2 or int8'}",
                )
        if self.bwd_qtype in BLOCK:
            yield (
                "bwd_qtype",
                f"bwd_qtype={self.bwd_qtype} is a type of weights and activations; use float8_e5m2",
            )
        for operand in ("weight", "act", "bwd"):
            if qtype := getattr(self, f"{operand}_qtype"):
                key = f"{operand}_calibration_method"
                for problem in self._range_problems(qtype, getattr(self, key), operand == "bwd"):
                    yield key, problem
            block = BLOCK.get(qtype, self.tile_size)
            if self.tile_size != block:
                yield (
                    "tile_size",
                    f"tile_size={self.tile_size} with {qtype}, which has blocks of {block}; set "
                    f"tile_size: {block}",
                )
        share = self.tile_size if self.weight_qtype else None
        if isinstance(share, float) and not (1 / share).is_integer():
            yield (
                "tile_size",
                f"tile_size={self.tile_size} does not divide the axis; use 1/n, such as 0.25, "
                "or a whole number of values",
            )

    def _range_problems(self, qtype: str, method: str, is_gradient: bool) -> Iterator[str]:
        """Mistakes in the range of a calibration method for a type."""
        numbers = [float(number) for number in method.split(",")[1:]]
        shifted = method.startswith("minmax") or (
            method.startswith("fixed") and len(numbers) == 2 and sum(numbers) != 0
        )
        if shifted and (qtype not in ("int8", "int4") or is_gradient):
            yield (
                f"{method} needs a zero point, which {'a gradient' if is_gradient else qtype} "
                "cannot have; use absmax, or int8 or int4"
            )
        if shifted and self.bwd_qtype:
            yield (
                f"{method} needs a zero point, which a quantized backward pass cannot undo; use "
                "absmax, or drop bwd_qtype"
            )
        if len(numbers) == 2 and not (numbers[0] <= 0 <= numbers[1] and numbers[0] < numbers[1]):
            yield f"{method}: the range must hold 0 and not be empty, as in fixed,-10,10"
        if len(numbers) == 1 and numbers[0] <= 0:
            yield f"{method}: the number must be more than 0, as in absmax,0.8, rms,7 and fixed,10"


class QuantizationConfig(Section):
    """Quantization rules; they need nothing from a model's code."""

    mode: Mode = "qt"
    """Mode of rules without one: train in low precision (qt), train for low precision (qat), or
    keep weights in low precision (ptq), for evaluation and under lora."""
    rules: Items[RuleConfig] = ()
    """Rules in order; none: no quantization."""

    def own_faults(self) -> Iterator[Fault]:
        if self.mode != "qt" and not self.rules:
            yield (
                "mode",
                f"mode={self.mode} without rules takes nothing; give rules, or a preset: "
                f"quantization={{preset: nf4}}",
            )
        for i, rule in enumerate(self.rules):
            if rule.bwd_qtype and (rule.mode or self.mode) != "qt":
                yield (
                    f"rules.{i}.bwd_qtype",
                    f"bwd_qtype={rule.bwd_qtype} with mode={rule.mode or self.mode}, which has no "
                    "quantized backward pass; use mode: qt, or drop bwd_qtype",
                )
