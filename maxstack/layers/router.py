"""Choice of experts for each token, their weights, and the balance of the load; in float32. A token
takes its `top_k` best experts by score plus selection bias, from the best groups where there are
groups; their weights are the scores without the bias. With a capacity, later tokens of a row lose
their choice of a full expert.

Shapes: B batch  T time  D embed  E experts  C chosen experts of a token  G groups of experts  I
experts of a group.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.layers import norm
from maxstack.schema.mlps import RouterConfig

SCORES = {
    "softmax": lambda logits_BTE: jax.nn.softmax(logits_BTE, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}
LEAST_SUM = 1e-20


def normalize_input(x_BTD: Array, scale_D: Array, eps: float) -> Array:
    """x / rms(x) * scale / sqrt(D), float32: the input of Gemma 4's router."""
    # One scale for both factors, so that there is one rounding.
    scale_D = scale_D.astype(jnp.float32) * x_BTD.shape[-1] ** -0.5
    return norm.normalize(x_BTD, scale_D, False, eps)


def logits(x_BTD: Array, router_DE: Array, bias_E: Array | None) -> Array:
    """x router + bias, float32 [B, T, E], at full precision on every device: rounding here would
    send tokens to other experts."""
    logits_BTE = jnp.einsum(
        "BTD,DE->BTE",
        x_BTD.astype(jnp.float32),
        router_DE.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return logits_BTE if bias_E is None else logits_BTE + bias_E.astype(jnp.float32)


def route(
    cfg: RouterConfig,
    top_k: int,
    logits_BTE: Array,
    selection_bias_E: Array | None = None,
    expert_scale_E: Array | None = None,
) -> tuple[Array, Array]:
    """-> (experts int32 [B, T, C], weights float32 [B, T, C]). Gradients reach the logits through
    the weights alone."""
    scores_BTE = SCORES[cfg.score](logits_BTE)
    # A choice has no gradient, and top_k's would be a scatter.
    experts_BTC = _choose(cfg, top_k, jax.lax.stop_gradient(scores_BTE), selection_bias_E)
    weights_BTC = _pick(scores_BTE, experts_BTC)
    if cfg.normalize:
        # Over the chosen experts alone, after the choice.
        weights_BTC = weights_BTC / (weights_BTC.sum(axis=-1, keepdims=True) + LEAST_SUM)
    weights_BTC = weights_BTC * cfg.scale
    if expert_scale_E is not None:
        weights_BTC = weights_BTC * _pick(
            expert_scale_E.astype(jnp.float32)[None, None], experts_BTC
        )
    return experts_BTC, weights_BTC


def _pick(values_BTE: Array, experts_BTC: Array) -> Array:
    """Values of the chosen experts; compared, not indexed, so that the gradient is no scatter."""
    mine_BTCE = experts_BTC[..., None] == jnp.arange(values_BTE.shape[-1])
    return jnp.where(mine_BTCE, values_BTE[:, :, None], 0.0).sum(axis=-1)


def _choose(
    cfg: RouterConfig, top_k: int, scores_BTE: Array, selection_bias_E: Array | None
) -> Array:
    """The best by score + selection bias, among the best groups where there are groups (DeepSeek-V3
    2024, arXiv:2412.19437, section 2.1.2)."""
    # The bias moves the choice alone: weights come from the scores without it.
    if selection_bias_E is not None:
        scores_BTE = scores_BTE + jax.lax.stop_gradient(selection_bias_E).astype(jnp.float32)
    if cfg.groups:
        scores_BTGI = scores_BTE.reshape(*scores_BTE.shape[:2], cfg.groups, -1)
        # A group counts by its best expert, or as in DeepSeek-V3 by its two best.
        best = min(1 if cfg.group_score == "max" else 2, scores_BTGI.shape[-1])
        group_BTG = jax.lax.top_k(scores_BTGI, best)[0].sum(axis=-1)
        kept = jax.lax.top_k(group_BTG, cfg.top_groups or cfg.groups)[1]
        kept_BTG = jax.nn.one_hot(kept, cfg.groups, dtype=bool).any(axis=-2)
        # Masked, not cut out, so that numbers of experts stay those of the whole list.
        scores_BTE = jnp.where(kept_BTG[..., None], scores_BTGI, -jnp.inf).reshape(scores_BTE.shape)
    return jax.lax.top_k(scores_BTE, top_k)[1]


def counts(experts_BTC: Array, experts: int, real_BT: Array) -> Array:
    """Number of real tokens of each row that chose each expert, float32 [B, E]; `real_BT` is true
    where a token is no padding."""
    return (jax.nn.one_hot(experts_BTC, experts) * real_BT[:, :, None, None]).sum(axis=(1, 2))


def within_capacity(experts_BTC: Array, experts: int, real_BT: Array, limit: int | None) -> Array:
    """Mask of the choices that count, bool [B, T, C]: choices of real tokens, and with a `limit`
    only the first so many of each row and expert."""
    real_BT1 = real_BT[:, :, None]
    if limit is None:
        return jnp.broadcast_to(real_BT1, experts_BTC.shape)
    chosen_BTE = jax.nn.one_hot(experts_BTC, experts).sum(axis=2) * real_BT1
    # Earlier tokens of a row come first; rows do not compete, so microbatches change nothing.
    before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    return real_BT1 & (_pick(before_BTE, experts_BTC) < limit)


def loss(
    cfg: RouterConfig, top_k: int, logits_BTE: Array, counts_BE: Array, real_BT: Array
) -> Array:
    """balance_loss * balance + z_loss * z, a float32 scalar that is a sum over real tokens, so that
    parts of a batch add up.

    balance of a row is E * sum_e(share of the row's choices * mean score), with scores that add up
    to 1 for a token (Fedus 2021, arXiv:2101.03961, eq. 4; per row: DeepSeek-V3 2024,
    arXiv:2412.19437, eq. 17-20), times the row's real tokens; z of a token is the square of its
    log-partition (Zoph 2022, arXiv:2202.08906, eq. 5).
    """
    real = real_BT.astype(jnp.float32)
    scores_BTE = SCORES[cfg.score](logits_BTE)
    if cfg.score == "sigmoid":
        # Sigmoids do not add up to 1, which the balance loss assumes.
        scores_BTE = scores_BTE / (scores_BTE.sum(axis=-1, keepdims=True) + LEAST_SUM)
    sums_BE = jnp.einsum("BTE,BT->BE", scores_BTE, real)
    # A row of padding has no choices; 1 avoids 0 / 0.
    tokens_B = jnp.maximum(real.sum(axis=-1), 1.0)
    balance = logits_BTE.shape[-1] / top_k * ((counts_BE * sums_BE).sum(axis=-1) / tokens_B).sum()
    z = (jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)) * real).sum()
    return cfg.balance_loss * balance + cfg.z_loss * z
