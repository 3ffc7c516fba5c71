"""Next-token cross-entropy. Shapes: B batch  T time  V vocab."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from maxstack.models.decoder import Decoder


class Loss(NamedTuple):
    """Sums and a weight, never means: accumulation, padding and devices stay exact. All float32 scalars."""

    total: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


def next_token(model: "Decoder", batch: Mapping[str, jax.Array], z_loss: float) -> Loss:
    """Sum over counted targets of -log p(target), plus z_loss * log(Z)^2 (PaLM, arXiv:2204.02311, section 5)."""
    nll_BT, log_z_BT = cross_entropy(model.logits(model.hidden(batch)), batch["targets"])
    mask_BT = batch["mask"].astype(jnp.float32)
    nll = (nll_BT * mask_BT).sum()
    metrics = {"nll": nll}
    total = nll
    if z_loss:
        metrics["z_loss"] = z_loss * (jnp.square(log_z_BT) * mask_BT).sum()
        total = total + metrics["z_loss"]
    return Loss(total, mask_BT.sum(), metrics)
