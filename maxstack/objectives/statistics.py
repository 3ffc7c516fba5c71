"""Statistics of each position's distribution over the vocabulary, a block of positions at a time.
Shapes: B batch  T time  D embed  V vocab."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from maxstack.models.decoder import Decoder

LARGEST = 1 << 26
"""Logits of a block at most."""


class Statistics(NamedTuple):
    """All [B, T], float32, without gradient."""

    entropy: Array
    """-sum p log p, in nats."""
    sharpness: Array
    """log sum p^2."""
    right: Array
    """1 where the target is the likeliest."""


def statistics(model: "Decoder", x_BTD: Array, targets_BT: Array) -> Statistics:
    """Statistics of the head's distributions for the normed residual stream, in natural order."""

    def block(logits_BtV: Array, targets_Bt: Array) -> Statistics:
        logp_BtV = jax.nn.log_softmax(logits_BtV)
        return Statistics(
            -(jnp.exp(logp_BtV) * logp_BtV).sum(-1),
            jax.nn.logsumexp(2 * logp_BtV, axis=-1),
            (logits_BtV.argmax(-1) == targets_Bt).astype(jnp.float32),
        )

    # Stopped on both sides, so that no gradient is traced through the head.
    x_BTD, targets_BT = jax.lax.stop_gradient((x_BTD, targets_BT))
    return jax.lax.stop_gradient(map_blocks([model], block, [x_BTD], targets_BT))


def entropies(model: "Decoder", x_BTD: Array, temperature: float = 1.0) -> Array:
    """-sum p log p [B, T], in nats and differentiable, of the head's distributions for the normed
    residual stream, in natural order."""

    def block(logits_BtV: Array) -> Array:
        logp_BtV = jax.nn.log_softmax(logits_BtV / temperature)
        return -(jnp.exp(logp_BtV) * logp_BtV).sum(-1)

    return map_blocks([model], block, [x_BTD])


def map_blocks(
    models: "list[Decoder]", f: Callable[..., Any], streams: list[Array], *others: Array
) -> Any:
    """Run `f(logits [B, t, V] of each model, others [B, t, ...])` on blocks of positions -> its
    results [B, T, ...]. Blocks are recomputed for the gradient, so that only one block of logits
    exists at a time. `streams`: the models' normed residual streams [B, T, D], in natural order."""
    batch, length = streams[0].shape[:2]
    # Logits of one position of all rows; a block has as many positions as fit, and divides the row,
    # so that none is padded.
    each = batch * sum(model.cfg.vocab for model in models)
    count = next(
        n
        for n in range(1, length + 1)
        if length % n == 0 and each * length // n <= max(LARGEST, each)
    )

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(batch, count, length // count, *x.shape[2:]), 1, 0)

    # Without it jax would keep the logits of every block for the gradient.
    @jax.checkpoint
    def block(parts: tuple[list[Array], tuple[Array, ...]]) -> Any:
        xs, rest = parts
        return f(*(model.logits(x) for model, x in zip(models, xs, strict=True)), *rest)

    if count == 1:
        return block((streams, others))
    results = jax.lax.map(block, jax.tree.map(cut, (streams, others)))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, length, *x.shape[3:]), results
    )
