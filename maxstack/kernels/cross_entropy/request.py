"""What is asked of linear cross-entropy, what it gives, and what a backend looks at to say whether
it can serve."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from maxstack.kernels.backends import Device


@dataclasses.dataclass(frozen=True)
class Request:
    """Logits are x head + bias, capped as soft_cap * tanh(logits / soft_cap); the loss of a token
    is -log p(target) + z_loss * log(Z)^2."""

    soft_cap: float | None = None
    z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on one device."""

    request: Request
    rows: int
    """Tokens of this device."""
    embed: int
    vocab: int
    """Columns of the head that this device has."""
    dtype: str
    """Of x, in which the head is multiplied: bfloat16 or float32."""
    bias: bool
    split: bool
    """The vocabulary lies on several devices."""
    device: Device

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """What tuned sizes hang on."""
        return {
            "dtype": self.dtype,
            "embed": self.embed,
            "vocab": self.vocab,
            "rows": 1 << (self.rows - 1).bit_length(),
        }


class Losses(NamedTuple):
    """float32, or float64 where x is."""

    total: jax.Array
    """Sum of weights * loss; the only one with a gradient."""
    nll: jax.Array
    """-log p(target) in nats, in the shape of the targets."""
    log_z: jax.Array
    """Log of the sum over the vocabulary of exp(logits), in the shape of the targets."""


class Gradients(NamedTuple):
    """Of `Losses.total`, as one device makes them: where the vocabulary is split, x's is this
    device's part of a sum."""

    x: jax.Array
    """In x's dtype."""
    head: jax.Array
    """float32."""
    bias: jax.Array | None
    """float32."""
