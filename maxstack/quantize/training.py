"""Quantized training: Qwix intercepts the matmuls inside a block, and the layers know nothing of it."""

import re
from collections.abc import Callable
from typing import Any

from flax import nnx

from maxstack.config import ConfigError
from maxstack.quantize.config import QuantizationConfig

Change = Callable[..., nnx.Module]


def quantized(cfg: QuantizationConfig) -> Change | None:
    """(block, example inputs...) -> the block with its matmuls quantized by the rules; None without rules.

    Weights stay as they are, so checkpoints and shardings do too. Only projections by weights are taken, not the products inside attention.
    """
    if not cfg.rules:
        return None
    import qwix

    rules = [qwix.QtRule(op_names=("dot_general",), **rule.model_dump()) for rule in cfg.rules]

    def change(block: nnx.Module, *inputs: Any) -> nnx.Module:
        return qwix.quantize_model(block, qwix.QtProvider(rules), *inputs)

    return change


def check_rules(cfg: QuantizationConfig, modules: set[str]) -> None:
    """ConfigError for a rule that matches none of the modules, given by their paths inside a block."""
    for i, rule in enumerate(cfg.rules):
        if not any(re.fullmatch(rule.module_path, path) for path in modules):
            raise ConfigError(f"quantization.rules.{i}.module_path: {rule.module_path!r} matches no module; the modules of a block are "
                              f"{', '.join(sorted(modules))}")
