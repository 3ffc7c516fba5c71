"""The Optax chain that a configuration describes, its schedules, and the weights to evaluate
with."""

from maxstack.optim.chain import build, changed, trained
from maxstack.optim.rates import learning_rate_at, moved_rate
from maxstack.optim.wrappers import ema_params, eval_params
from maxstack.schema.optimizer.paths import ParamInfo

__all__ = [
    "ParamInfo",
    "build",
    "changed",
    "ema_params",
    "eval_params",
    "learning_rate_at",
    "moved_rate",
    "trained",
]
