"""The quantization recipe: rules with Qwix's own names, checked before jax or Qwix is imported."""

import re
from typing import Literal

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault

QType = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]


class RuleConfig(Section):
    """Which matmuls are quantized, and how; the first rule that matches a module takes it."""

    module_path: str = ".*"
    """Regular expression that a module's whole path inside its block must match: mixer, mlp."""
    weight_qtype: QType
    """Type of the weights in the forward matmul."""
    act_qtype: QType | None = None
    """Type of the activations in the forward matmul; null: not quantized."""
    bwd_qtype: QType | None = None
    """Type of the incoming gradient in both backward matmuls; null: the backward pass is not quantized."""
    tile_size: int | None = Field(None, ge=1)
    """Values along the contracted axis that share a scale; null: the whole axis."""
    weight_calibration_method: str = Field("absmax", pattern=r"^(absmax|minmax|rms|fixed)(,[-0-9.e]+)*$")
    """How the scale of weights follows from them: absmax, minmax, `rms,7`, `fixed,-10,10`."""
    act_calibration_method: str = Field("absmax", pattern=r"^(absmax|minmax|rms|fixed)(,[-0-9.e]+)*$")
    """The same for activations."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RuleConfig":
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise fault("module_path", f"{self.module_path!r} is no regular expression: {error}") from error
        return self


class QuantizationConfig(Section):
    """Quantized training (Qwix's QT): float weights are kept and updated, each matmul that a rule takes runs in low precision."""

    rules: Items[RuleConfig] = ()
    """In order; no rules, no quantization."""
