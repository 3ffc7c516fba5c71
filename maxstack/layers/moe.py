"""Mixture of experts.

Tokens are sorted by expert, and each expert is one matmul over the tokens that chose it
(kernels/grouped_matmul/), so nothing is dropped unless a capacity is set. On a mesh each device
routes its own tokens; where experts are split over devices, tokens travel to them and back in
windows of bounded size (dispatch.py), as many as the fullest expert needs. Balance losses are sums
over rows, so they add up over microbatches and devices; the selection bias is a weight that the
step moves by a rule of its own and the optimizer does not see (`carried`).

Shapes: B batch  T time  D embed  E experts  C chosen experts of a token  F mlp hidden  N tokens  S
rows sorted by expert.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.errors import ConfigError
from maxstack.kernels.backends import config_scope
from maxstack.layers import batch_invariance, dispatch, router
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.mlp import ACTIVATIONS
from maxstack.layers.weight import experts, multiply_each
from maxstack.schema.mesh import names
from maxstack.schema.mlps import MoEConfig, ParallelMLPConfig

Report = dict[str, Array]
Weights = dict[str, Any]
"""Arrays by name; matrices as `experts` gives them."""
Mixed = tuple[Array, Array, Array]
HIDDEN = {
    "gate": 2,
    "up": 2,
    "down": 1,
    "gate_bias": 1,
    "up_bias": 1,
}  # a weight of each expert -> the dimension of its hidden units
SIGMOID_SLOPE = 1.702  # gpt-oss: x sigmoid(1.702 x), a GELU nearly


class MoE(Layer):
    """Weighted sum of a token's chosen experts, and the shared expert (Shazeer 2017,
    arXiv:1701.06538; shared: Dai 2024, arXiv:2401.06066)."""

    cfg: MoEConfig

    def __call__(self, x_BTD: Array, residual_BTD: Array, context: Context) -> tuple[Array, Report]:
        """-> ([B, T, D], report).

        The report holds `load`, float32 [E]: the number of real tokens that chose each expert; with
        a capacity, `dropped`, float32: the number of choices beyond it; where tokens travel and
        none may be dropped, `rounds`, int32: the number of windows that they took; and where the
        router has a loss, `router_loss`: its sum over real tokens. A token is real unless its
        segment is 0; no expert sees the others.
        """
        # Grouped matmuls of few rows round otherwise on a
        # CPU, so rows of inference go through in groups.
        if not batch_invariance.active():
            return self._mix(x_BTD, residual_BTD, context)

        def own(x_BTD: Array, residual_BTD: Array, real_BT: Array) -> Array:
            here = dataclasses.replace(context, real_BT=real_BT)
            return self._mix(x_BTD, residual_BTD, here)[0]

        # No report: inference reads none.
        return batch_invariance.in_groups(own)(x_BTD, residual_BTD, context.real_BT), {}

    def _mix(self, x_BTD: Array, residual_BTD: Array, context: Context) -> tuple[Array, Report]:
        cfg, rules = self.cfg, self.cfg.router
        read_BTD = (
            router.normalize_input(residual_BTD, self.router_scale[...], rules.norm_eps)
            if rules.normed
            else x_BTD
        )
        logits_BTE = router.logits(
            read_BTD, self.router[...], None if self.router_bias is None else self.router_bias[...]
        )
        weights = {
            name: experts(getattr(self, name), x_BTD.dtype)
            for name in (*HIDDEN, "down_bias")
            if getattr(self, name) is not None
        }
        # These multiply no rows and stay in the types that they have.
        weights |= {
            name: getattr(self, name)[...]
            for name in ("selection_bias", "expert_scale")
            if getattr(self, name) is not None
        }
        # Padding must go to no expert: it would fill capacities and count as load.
        real_BT = jnp.ones(x_BTD.shape[:2], bool) if context.real_BT is None else context.real_BT
        split = _expert_sharding(cfg, x_BTD.shape[1])
        out_BTD, experts_BTC, rounds = _on_own_tokens(
            cfg, split, weights, x_BTD, logits_BTE, real_BT
        )
        out_BTD = sharding.constrain(out_BTD, "batch residual embed")
        if cfg.shared:
            # Every token goes through it, so it needs no dispatch, and works as any MLP.
            shared_BTD = self.shared(x_BTD, residual_BTD, context)[0]
            if cfg.shared.gate:
                open_BT1 = jax.nn.sigmoid(
                    jnp.einsum("BTD,D->BT", x_BTD, self.shared_gate[...].astype(x_BTD.dtype))
                )[:, :, None]
                shared_BTD = shared_BTD * open_BT1
            out_BTD = out_BTD + shared_BTD
        report = self._report(logits_BTE, experts_BTC, real_BT)
        return checkpoint_name(out_BTD, "mlp_out"), report | (
            {"rounds": rounds} if split.experts and cfg.capacity is None else {}
        )

    def _report(self, logits_BTE: Array, experts_BTC: Array, real_BT: Array) -> Report:
        counts_BE = router.counts(experts_BTC, self.cfg.experts, real_BT)
        report = {"load": counts_BE.sum(axis=0)}
        if limit := self.cfg.limit(experts_BTC.shape[1]):
            report["dropped"] = jnp.maximum(counts_BE - limit, 0).sum()
        if self.cfg.router.balance_loss or self.cfg.router.z_loss:
            report["router_loss"] = router.loss(
                self.cfg.router, self.cfg.top_k, logits_BTE, counts_BE, real_BT
            )
        return report


class ParallelMLP(Layer):
    """norm(dense(x)) + norm(moe(norm(residual))) (Gemma 4)."""

    cfg: ParallelMLPConfig

    def __call__(self, x_BTD: Array, residual_BTD: Array, context: Context) -> tuple[Array, Report]:
        """-> ([B, T, D], the report of the experts)."""
        dense_BTD, _ = self.dense(x_BTD, residual_BTD, context)
        with config_scope("moe"):
            moe_BTD, report = self.moe(self.moe_in_norm(residual_BTD), residual_BTD, context)
        return self.dense_norm(dense_BTD) + self.moe_norm(moe_BTD), report


@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """Split of the work over the mesh; by default none."""

    experts: tuple[str, ...] = ()
    """Mesh axes that the experts are split over, and so their tokens travel over."""
    hidden: tuple[str, ...] = ()
    """Mesh axes that hidden units are split over."""
    residual: tuple[str, ...] = ()
    """Mesh axes over whose parts of time the sum over hidden units is left scattered; empty: it is
    not."""


def _expert_sharding(cfg: MoEConfig, length: int) -> ExpertSharding:
    """`ExpertSharding` on the current mesh, for rows of `length`."""
    if sharding.current() is None:
        return ExpertSharding()
    batch, seq, mlp = (names(part) for part in sharding.here("batch seq mlp"))
    experts, _, hidden = (names(part) for part in sharding.here("expert embed mlp"))
    assert cfg.capacity is None or sharding.size_of(*seq) == 1, "a capacity is of whole rows"
    assert hidden == mlp, "experts share no axis with their hidden units"
    assert {*experts} <= {*batch, *seq}, "devices that share experts have tokens of their own"
    residual = names(sharding.here("batch residual embed")[1])
    if sharding.size_of(*hidden) == 1:  # libtpu aborts on a reduce-scatter among one device
        hidden = ()
    # The sum over hidden units then leaves each device
    # its part of time, as the residual stream lies.
    scattered = (
        bool(hidden) and residual == (*seq, *hidden) and length % sharding.size_of(*residual) == 0
    )
    return ExpertSharding(
        experts if sharding.size_of(*experts) > 1 else (), hidden, residual if scattered else ()
    )


def _on_own_tokens(
    cfg: MoEConfig,
    split: ExpertSharding,
    weights: Weights,
    x_BTD: Array,
    logits_BTE: Array,
    real_BT: Array,
) -> Mixed:
    """`_mix_own_tokens` on each device for its own tokens. Weights are gathered for it, except
    along axes that split experts or hidden units.

    By hand, because XLA would gather all tokens on every device in order to sort them.
    """
    mixture = functools.partial(_mix_own_tokens, cfg, cfg.limit(x_BTD.shape[1]), split)
    if sharding.current() is None:
        return mixture(weights, x_BTD, logits_BTE, real_BT)
    # Weights along `embed` are gathered here, by their shardings alone.
    specs = {
        name: jax.tree.map(functools.partial(_part, name, split), value)
        for name, value in weights.items()
    }
    batch, seq = sharding.here("batch seq")
    tokens, own = PartitionSpec(batch, seq), PartitionSpec(batch, seq, None)
    # Scattered along time where the residual stream lies so: the sum needs no gather.
    left = PartitionSpec(batch, split.residual, None) if split.residual else own
    return sharding.per_device(mixture, (specs, own, own, tokens), (left, own, PartitionSpec()))(
        weights, x_BTD, logits_BTE, real_BT
    )


def _part(name: str, split: ExpertSharding, value: Array) -> PartitionSpec:
    """The part of a weight that a device needs: its experts, and of those its hidden units."""
    parts = {HIDDEN[name]: split.hidden, 0: split.experts} if name in HIDDEN else {}
    for i, axes in parts.items():
        # Size 1 is a scale that is shared along this dimension, which every device needs.
        if value.shape[i] > 1 and value.shape[i] % sharding.size_of(*axes):
            raise ConfigError(
                f"quantization: {value.shape[i]} scales along the hidden units of experts' {name} "
                f"do not divide over the mesh's {' x '.join(axes)} of {sharding.size_of(*axes)}; "
                "choose a tile_size that divides the hidden units of one device"
            )
    return PartitionSpec(
        *(parts.get(i) if size > 1 else None for i, size in enumerate(value.shape))
    )


def _mix_own_tokens(
    cfg: MoEConfig,
    limit: int | None,
    split: ExpertSharding,
    weights: Weights,
    x_BTD: Array,
    logits_BTE: Array,
    real_BT: Array,
) -> Mixed:
    """-> (the weighted sum over the chosen experts, the chosen experts, the number of windows that
    the dispatch took)."""
    experts_BTC, weights_BTC = router.route(
        cfg.router,
        cfg.top_k,
        logits_BTE,
        weights.get("selection_bias"),
        weights.get("expert_scale"),
    )
    # Choices that do not count get number E, of no expert, and are sorted to the end.
    counted_BTC = router.within_capacity(experts_BTC, cfg.experts, real_BT, limit)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    # Zeroed and not left out, since shapes are fixed.
    weight_NC = jnp.where(counted_BTC, weights_BTC, 0).reshape(-1, cfg.top_k)
    expert_NC = jnp.where(counted_BTC, experts_BTC, cfg.experts).reshape(weight_NC.shape)
    how = dispatch.plan_travel(
        cfg.experts,
        split.experts,
        x_ND.shape[0],
        cfg.top_k,
        cfg.slack,
        # A capacity is of a row and expert, so a device's
        # expert gets at most that for each of its rows.
        limit and limit * x_BTD.shape[0],
        cfg.router.scale_input,
    )
    own = {name: weights[name] for name in HIDDEN if name in weights}
    out_ND, rounds = dispatch.mix_experts(
        functools.partial(_experts, cfg), how, own, x_ND, weight_NC, expert_NC
    )
    if cfg.bias:
        # Devices that split the hidden units add their sums up, and only one may add the bias.
        once = jax.lax.axis_index(split.hidden) == 0 if split.hidden else True
        chosen_NCE = (expert_NC[:, :, None] == jnp.arange(cfg.experts)) & once
        share_NE = jnp.where(
            chosen_NCE, 1.0 if cfg.router.scale_input else weight_NC[:, :, None], 0.0
        ).sum(axis=1)
        out_ND = out_ND + jnp.einsum(
            "NE,ED->ND",
            share_NE,
            weights["down_bias"].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
    out_BTD = out_ND.astype(x_BTD.dtype).reshape(x_BTD.shape)
    if split.residual:
        out_BTD = jax.lax.psum_scatter(out_BTD, split.hidden, scatter_dimension=1, tiled=True)
    elif split.hidden:
        out_BTD = jax.lax.psum(out_BTD, split.hidden)
    return out_BTD, experts_BTC, rounds


def _experts(cfg: MoEConfig, weights: Weights, x_SD: Array, sizes_E: Array) -> Array:
    """Apply each expert to its own rows, without the bias of its output."""
    # Rows are sorted, so an expert's are those between two ends.
    ends_E = jnp.cumsum(sizes_E)

    def times(x: Array, name: str) -> Array:
        out = multiply_each(x, weights[name], sizes_E, cfg.backend)
        if f"{name}_bias" not in weights:
            return out
        row_S1 = jnp.arange(x.shape[0])[:, None]
        mine_SE = (row_S1 >= ends_E - sizes_E) & (row_S1 < ends_E)
        # A product with ones, since the gradient of a gather is a scatter.
        return out + jnp.einsum(
            "SE,EF->SF",
            mine_SE.astype(x.dtype),
            weights[f"{name}_bias"],
            precision=jax.lax.Precision.HIGHEST,
        )

    gate_SF = checkpoint_name(times(x_SD, "gate"), "mlp_gate")
    up_SF = checkpoint_name(times(x_SD, "up"), "mlp_up")
    return times(_gate(cfg, gate_SF, up_SF), "down")


def _gate(cfg: MoEConfig, gate_MF: Array, up_MF: Array) -> Array:
    if cfg.clamp is None:
        return ACTIVATIONS[cfg.activation](gate_MF) * up_MF
    # The gate from above alone, as gpt-oss has it: from below its sigmoid closes.
    gate_MF, up_MF = jnp.minimum(gate_MF, cfg.clamp), jnp.clip(up_MF, -cfg.clamp, cfg.clamp)
    return (up_MF + 1) * gate_MF * jax.nn.sigmoid(SIGMOID_SLOPE * gate_MF)
