"""The Optax chain that a configuration describes, its schedules, and the weights to evaluate
with."""

from maxstack.optim.chain import build, changed_mask, trained_mask
from maxstack.optim.rates import describe_rate_change, learning_rate_at
from maxstack.optim.wrappers import ema_params, eval_params
from maxstack.schema.optimizer.paths import ParamInfo

__all__ = [
    "ParamInfo",
    "build",
    "changed_mask",
    "describe_rate_change",
    "ema_params",
    "eval_params",
    "learning_rate_at",
    "trained_mask",
]
