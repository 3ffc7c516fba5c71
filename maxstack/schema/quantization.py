"""The quantization recipe: rules with Qwix's own names, checked before jax or Qwix is imported."""

import re
from typing import Literal

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault
from maxstack.errors import quoted

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
"""Types of weights alone, and what to use of other operands."""


class RuleConfig(Section):
    """Which weights are quantized, and how; the first rule that matches a weight takes it."""

    module_path: str = ".*"
    """Regular expression that a weight's whole path must match, or that of the module that holds
    it: 'blocks/.*/mlp', '.*/mixer/query', embed, head. `maxstack quantize show CONFIG` lists the
    paths."""
    op_names: Items[Op] = ()
    """Only weights that are used so: dot_general is projections and a head of its own, einsum
    projections, ragged_dot experts, take tables, with or without a tied head. Empty: all."""
    mode: Mode | None = None
    """qt: float weights are trained, and their matmuls run in low precision. qat: the same with an
    unquantized backward pass, so that what is trained is what ptq gives. ptq: weights are kept in
    low precision and not trained. null: quantization.mode."""
    weight_qtype: QType | None = None
    """Type of the weights in the forward pass; null: what the rule takes stays as it is."""
    act_qtype: QType | None = None
    """Type of the activations in the forward pass; null: not quantized."""
    bwd_qtype: QType | None = None
    """Type of the incoming gradient in both backward matmuls; null: the backward pass is not
    quantized."""
    tile_size: int | float | None = Field(None, gt=0)
    """Values along the contracted axis that share a scale, or as a fraction the share of the axis;
    null: the whole axis."""
    weight_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """How the scale of weights follows from them: absmax, minmax, `rms,7`, `fixed,-10,10`;
    `absmax,0.8` takes 0.8 of the range."""
    act_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """The same for activations."""
    bwd_calibration_method: str = Field("absmax", pattern=CALIBRATION)
    """The same for gradients."""
    bwd_weight_grad_tile_size: int | float | None = Field(None, gt=0)
    """Positions of a sequence that share a scale, with those of the other sequences, where the
    gradient of the weights is made; null: all."""
    disable_channelwise_axes: bool = False
    """One scale for a whole tensor, or tile, in place of one for each row or column."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RuleConfig":
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise fault(
                "module_path", f"{quoted(self.module_path)} is no regular expression: {error}"
            ) from error
        for key in ("act_qtype", "bwd_qtype"):
            if getattr(self, key) and not self.weight_qtype:
                raise fault(
                    key,
                    f"{key}={getattr(self, key)} without weight_qtype; give one, or drop "
                    "this key to leave the weights as they are",
                )
            if instead := WEIGHTS_ALONE.get(qtype := getattr(self, key)):
                raise fault(
                    key,
                    f"{key}={qtype}: {qtype} is a type of weights alone; use "
                    f"{instead if key == 'act_qtype' else 'float8_e5m2 or int8'}",
                )
        for name in ("weight", "act", "bwd"):
            self._check_operand(name)
        if self.bwd_qtype and self.mode in ("qat", "ptq"):
            raise fault(
                "bwd_qtype",
                f"bwd_qtype={self.bwd_qtype} with mode={self.mode}, which has no "
                "quantized backward pass; use mode: qt",
            )
        return self

    def _check_operand(self, name: str) -> None:
        qtype, method = getattr(self, f"{name}_qtype"), getattr(self, f"{name}_calibration_method")
        if qtype is None:
            return
        key, numbers = (
            f"{name}_calibration_method",
            [float(number) for number in method.split(",")[1:]],
        )
        shifted = method.startswith("minmax") or (
            method.startswith("fixed") and len(numbers) == 2 and sum(numbers) != 0
        )
        if shifted and (qtype not in ("int8", "int4") or name == "bwd"):
            what = "a gradient" if name == "bwd" else qtype
            raise fault(
                key,
                f"{method} needs a zero point, which {what} cannot have; use absmax, or "
                "int8 or int4",
            )
        if shifted and self.bwd_qtype:
            raise fault(
                key,
                f"{method} needs a zero point, which a quantized backward pass cannot "
                "undo; use absmax, or drop bwd_qtype",
            )
        if len(numbers) == 2 and not (numbers[0] <= 0 <= numbers[1] and numbers[0] < numbers[1]):
            raise fault(
                key, f"{method}: the range must hold 0 and not be empty, as in fixed,-10,10"
            )
        if len(numbers) == 1 and numbers[0] <= 0:
            raise fault(
                key,
                f"{method}: the number must be more than 0, as in absmax,0.8, rms,7 and fixed,10",
            )
        if qtype in BLOCK and name != "bwd" and self.tile_size != BLOCK[qtype]:
            raise fault(
                "tile_size",
                f"tile_size={self.tile_size} with {qtype}, which has blocks of "
                f"{BLOCK[qtype]}; set tile_size: {BLOCK[qtype]}",
            )
        if qtype in BLOCK and name == "bwd":
            raise fault(
                "bwd_qtype",
                f"bwd_qtype={qtype} is a type of weights and activations; use float8_e5m2",
            )
        if isinstance(self.tile_size, float) and not (1 / self.tile_size).is_integer():
            raise fault(
                "tile_size",
                f"tile_size={self.tile_size} is no whole part of the axis; use 1/n, such "
                "as 0.25, or a whole number of values",
            )


class QuantizationConfig(Section):
    """Rules of quantization; models know nothing of it."""

    mode: Mode = "qt"
    """Mode of rules that give none: train in low precision (qt), train for low precision (qat), or
    keep weights in low precision (ptq), for evaluation and under lora."""
    rules: Items[RuleConfig] = ()
    """In order; no rules, no quantization."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "QuantizationConfig":
        if self.mode != "qt" and not self.rules:
            raise fault(
                "mode",
                f"mode={self.mode} without rules takes nothing; give rules, or a preset: "
                f"quantization={{preset: nf4}}",
            )
        for i, rule in enumerate(self.rules):
            if rule.bwd_qtype and (rule.mode or self.mode) != "qt":
                raise fault(
                    f"rules.{i}.bwd_qtype",
                    f"bwd_qtype={rule.bwd_qtype} with mode={rule.mode or self.mode}, "
                    "which has no quantized backward "
                    "pass; use mode: qt, or drop bwd_qtype",
                )
        return self
