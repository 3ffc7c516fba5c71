"""The types of linear cross-entropy: a request, the case that backends accept or refuse, a
backend's arguments and its results. Shapes: M rows  D embed  V vocab."""

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
class CrossEntropyCase:
    """One call on one device."""

    request: Request
    rows: int
    """Tokens of this device."""
    embed: int
    vocab: int
    """Columns of the head that this device has."""
    dtype: str
    """The dtype of x, in which the head is multiplied: bfloat16 or float32."""
    bias: bool
    split: bool
    """True where the vocabulary is split over devices."""
    device: Device

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """The key of tuned block sizes."""
        return {
            "dtype": self.dtype,
            "embed": self.embed,
            "vocab": self.vocab,
            "rows": 1 << (self.rows - 1).bit_length(),
        }


class Inputs(NamedTuple):
    """Arrays of one device. The head comes in x's dtype, and targets count the columns of this
    device's slice of the vocabulary."""

    x_MD: jax.Array
    head_DV: jax.Array
    bias_V: jax.Array | None
    targets_M: jax.Array
    weights_M: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments of a backend."""

    request: Request
    axes: tuple[str, ...] = ()
    """Mesh axes along which the other slices of the vocabulary lie."""
    blocks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Measured block sizes; a backend has a default for each that is missing."""
    interpret: bool = False
    """Runs kernels without their hardware, for tests."""


Scores = tuple[jax.Array, jax.Array]
"""(nll [M], log Z [M])."""


class Losses(NamedTuple):
    """float32, or float64 where x is."""

    total: jax.Array
    """Sum of weights * loss, the only differentiable part."""
    nll: jax.Array
    """-log p(target) in nats, in the shape of the targets."""
    log_z: jax.Array
    """Log of the sum over the vocabulary of exp(logits), in the shape of the targets."""


class Gradients(NamedTuple):
    """Gradients of `Losses.total` on one device. Where the vocabulary is split, x's is a part of a
    sum over devices."""

    x: jax.Array
    """In x's dtype."""
    head: jax.Array
    """float32."""
    bias: jax.Array | None
    """float32."""
