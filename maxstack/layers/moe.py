"""Mixture of experts, dropless: tokens are sorted by expert, so that each expert is one matmul over the tokens that chose it.

Shapes: B batch  T time  D embed  E experts  C chosen experts of a token  F mlp hidden  N tokens  M tokens x chosen, sorted by expert.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels.grouped_matmul import grouped_matmul
from maxstack.layers import router
from maxstack.layers.config import GatedMLPConfig, MoEConfig, ParallelMLPConfig
from maxstack.layers.context import Context
from maxstack.layers.mlp import ACTIVATIONS, GatedMLP
from maxstack.layers.norm import Norm
from maxstack.layers.weight import weight

Report = dict[str, jax.Array]
Weights = dict[str, jax.Array]
Pair = tuple[jax.Array, jax.Array]
HIDDEN = {"gate": 2, "up": 2, "down": 1, "gate_bias": 1, "up_bias": 1}  # the dimension of an expert's hidden units
SIGMOID_SLOPE = 1.702  # gpt-oss: x sigmoid(1.702 x), a GELU nearly


class MoE(nnx.Module):
    """A token's chosen experts, weighted, and the shared one (Shazeer 2017, arXiv:1701.06538; shared: Dai 2024, arXiv:2401.06066)."""

    def __init__(self, cfg: MoEConfig, embed: int, *, std: float, out_std: float, dtype: str):
        self.cfg = cfg
        e, f, fan_in = cfg.experts, cfg.hidden, std / embed**0.5
        self.router = weight((embed, e), "embed norm", std=fan_in, dtype=dtype)
        if cfg.router.bias:
            self.router_bias = weight((e,), "norm", dtype=dtype)
        if cfg.router.selection_bias:
            self.selection_bias = weight((e,), "norm", dtype="float32", carried=True)
        if cfg.router.normed:
            self.router_scale = weight((embed,), "norm", fill=1.0, dtype=dtype)
            self.expert_scale = weight((e,), "norm", fill=1.0, dtype=dtype)
        self.gate = weight((e, embed, f), "expert embed mlp", std=fan_in, dtype=dtype)
        self.up = weight((e, embed, f), "expert embed mlp", std=fan_in, dtype=dtype)
        self.down = weight((e, f, embed), "expert mlp embed", std=out_std / f**0.5, dtype=dtype)
        if cfg.bias:
            self.gate_bias = weight((e, f), "expert mlp", dtype=dtype)
            self.up_bias = weight((e, f), "expert mlp", dtype=dtype)
            self.down_bias = weight((e, embed), "expert norm", dtype=dtype)
        if cfg.shared:
            shared = GatedMLPConfig(kind="gated", hidden=cfg.shared.hidden, activation=cfg.activation)
            self.shared = GatedMLP(shared, embed, std=std, out_std=out_std, dtype=dtype)
            if cfg.shared.gate:
                self.shared_gate = weight((embed,), "norm", std=fan_in, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, residual_BTD: jax.Array, context: Context) -> tuple[jax.Array, Report]:
        """-> ([B, T, D], report).

        `load`, float32 [E], is how many real tokens chose each expert; `router_loss` is a sum over real tokens, and there where it has a weight.
        A token is real unless its segment is 0.
        """
        cfg, rules = self.cfg, self.cfg.router
        read_BTD = router.normed(residual_BTD, self.router_scale[...], rules.norm_eps) if rules.normed else x_BTD
        logits_BTE = router.logits(read_BTD, self.router[...], self.router_bias[...] if rules.bias else None)
        names = ("gate", "up", "down", *(("gate_bias", "up_bias", "down_bias") if cfg.bias else ()))
        given = {name: getattr(self, name)[...].astype(x_BTD.dtype) for name in names}
        given |= {name: getattr(self, name)[...] for name in ("selection_bias", "expert_scale") if hasattr(self, name)}
        out_BTD, experts_BTC = _on_own_tokens(functools.partial(_mixture, cfg), given, x_BTD, logits_BTE)
        out_BTD = sharding.constrain(out_BTD, "batch residual embed")
        if cfg.shared:
            shared_BTD = self.shared(x_BTD, residual_BTD, context)[0]
            if cfg.shared.gate:
                open_BT1 = jax.nn.sigmoid(jnp.einsum("BTD,D->BT", x_BTD, self.shared_gate[...].astype(x_BTD.dtype)))[:, :, None]
                shared_BTD = shared_BTD * open_BT1
            out_BTD = out_BTD + shared_BTD
        return checkpoint_name(out_BTD, "mlp_out"), self._report(logits_BTE, experts_BTC, context)

    def _report(self, logits_BTE: jax.Array, experts_BTC: jax.Array, context: Context) -> Report:
        real_BT = jnp.ones(experts_BTC.shape[:2], bool) if context.segments_BT is None else context.segments_BT > 0
        counts_BE = router.counts(experts_BTC, self.cfg.experts, real_BT)
        report = {"load": counts_BE.sum(axis=0)}
        if self.cfg.router.balance_loss or self.cfg.router.z_loss:
            report["router_loss"] = router.loss(self.cfg.router, self.cfg.top_k, logits_BTE, counts_BE, real_BT)
        return report


class ParallelMLP(nnx.Module):
    """norm(dense(x)) + norm(moe(norm(residual))) (Gemma 4)."""

    def __init__(self, cfg: ParallelMLPConfig, embed: int, *, std: float, out_std: float, dtype: str):
        self.dense = GatedMLP(cfg.dense, embed, std=std, out_std=out_std, dtype=dtype)
        self.moe = MoE(cfg.moe, embed, std=std, out_std=out_std, dtype=dtype)
        self.dense_norm, self.moe_in_norm, self.moe_norm = (Norm(cfg.norm, embed, dtype=dtype) for _ in range(3))

    def __call__(self, x_BTD: jax.Array, residual_BTD: jax.Array, context: Context) -> tuple[jax.Array, Report]:
        """-> ([B, T, D], the report of the experts)."""
        dense_BTD, _ = self.dense(x_BTD, residual_BTD, context)
        moe_BTD, report = self.moe(self.moe_in_norm(residual_BTD), residual_BTD, context)
        return self.dense_norm(dense_BTD) + self.moe_norm(moe_BTD), report


def _mixture(cfg: MoEConfig, given: Weights, x_BTD: jax.Array, logits_BTE: jax.Array, platform: str | None,
             first: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """-> (the weighted sum over the chosen experts, of hidden units that are here; the chosen). `first` on the device that adds the sum's bias."""
    experts_BTC, weights_BTC = router.route(cfg.router, cfg.top_k, logits_BTE, given.get("selection_bias"), given.get("expert_scale"))
    x_ND, copies = x_BTD.reshape(-1, x_BTD.shape[-1]), cfg.top_k
    expert_M, weight_M1 = experts_BTC.reshape(-1), weights_BTC.reshape(-1, 1)
    order_M = jnp.argsort(expert_M)
    inverse_M = jnp.zeros_like(order_M).at[order_M].set(jnp.arange(order_M.size, dtype=order_M.dtype), unique_indices=True)
    mine_ME = expert_M[order_M][:, None] == jnp.arange(cfg.experts)
    sizes_E = mine_ME.sum(axis=0, dtype=jnp.int32)

    def times(x: jax.Array, name: str, biased: jax.Array | bool = True) -> jax.Array:
        out = grouped_matmul(x, given[name], sizes_E, platform=platform)
        if not cfg.bias:
            return out
        return out + jnp.einsum("ME,EF->MF", (mine_ME & biased).astype(x.dtype), given[f"{name}_bias"], precision=jax.lax.Precision.HIGHEST)

    x_MD = _take(x_ND, order_M, inverse_M, copies)
    if cfg.router.scale_input:
        x_MD = (x_MD * _take(weight_M1, order_M, inverse_M, 1)).astype(x_BTD.dtype)
        weight_M1 = jnp.ones_like(weight_M1)
    gate_MF, up_MF = checkpoint_name(times(x_MD, "gate"), "mlp_gate"), checkpoint_name(times(x_MD, "up"), "mlp_up")
    out_MD = _take(times(_gated(cfg, gate_MF, up_MF), "down", first), inverse_M, order_M, 1)
    out_ND = (out_MD * weight_M1).reshape(-1, copies, out_MD.shape[-1]).sum(axis=1)
    return out_ND.astype(x_BTD.dtype).reshape(x_BTD.shape), experts_BTC


def _gated(cfg: MoEConfig, gate_MF: jax.Array, up_MF: jax.Array) -> jax.Array:
    if cfg.clamp is None:
        return ACTIVATIONS[cfg.activation](gate_MF) * up_MF
    gate_MF, up_MF = jnp.minimum(gate_MF, cfg.clamp), jnp.clip(up_MF, -cfg.clamp, cfg.clamp)
    return (up_MF + 1) * gate_MF * jax.nn.sigmoid(SIGMOID_SLOPE * gate_MF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x: jax.Array, index_M: jax.Array, inverse_M: jax.Array, copies: int) -> jax.Array:
    """Rows of x, each copied, in the order of the permutation `index_M`; its gradient is a gather by the inverse, not a scatter."""
    return x[index_M // copies]


def _take_forward(x, index_M, inverse_M, copies):
    return x[index_M // copies], inverse_M


def _take_backward(copies, inverse_M, dy):
    return dy[inverse_M].reshape(-1, copies, dy.shape[-1]).sum(axis=1), None, None


_take.defvjp(_take_forward, _take_backward)


def _on_own_tokens(mixture: Callable[..., Pair], given: Weights, x_BTD: jax.Array, logits_BTE: jax.Array) -> Pair:
    """`mixture` of each device's own tokens. Expert weights are gathered for it, apart from hidden units over axes that the tokens leave free.

    Left to itself, XLA would gather all tokens on every device, to sort them.
    """
    current = sharding.current()
    if current is None:
        return mixture(given, x_BTD, logits_BTE, None, True)
    platform = current[0].devices.flat[0].platform
    *tokens, hidden = sharding.here("batch seq mlp")
    places = {name: PartitionSpec(*(hidden if i == HIDDEN.get(name) else None for i in range(value.ndim))) for name, value in given.items()}

    def local(given: Weights, x_BTD: jax.Array, logits_BTE: jax.Array) -> Pair:
        first = jax.lax.axis_index(hidden) == 0 if hidden else True
        out_BTD, experts_BTC = mixture(given, x_BTD, logits_BTE, platform, first)
        return jax.lax.psum(out_BTD, hidden) if hidden else out_BTD, experts_BTC

    own = PartitionSpec(*tokens, None)
    return sharding.per_device(local, (places, own, own), (own, own))(given, x_BTD, logits_BTE)
