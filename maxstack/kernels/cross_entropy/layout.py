"""Linear cross-entropy on a mesh: each device has its own rows and, over the axes of `vocab`, its
slice of the vocabulary.

All collectives are by hand. The head is gathered for the call, and its gradient is scattered back
to the head's shards before anything keeps it. Shapes: B batch  T time  D embed  V vocab  M rows of
a device.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels.cross_entropy.request import Gradients, Inputs, Losses, Request, Scores

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes, without those of size 1; none on one device."""

    batch: Names = ()
    seq: Names = ()
    vocab: Names = ()
    embed: Names = ()
    """Axes along which the head's rows are gathered."""
    columns: Names = ()
    """Axes beside `vocab` along which the head's columns are gathered."""
    scatter: bool = False
    """True where the residual stream's time is split over `vocab` too, so that its gradient is
    scattered instead of summed."""

    @classmethod
    def of(cls, shape: tuple[int, ...], vocab: int, kept: str) -> "Layout":
        """The layout for x [B, T, D] and a head whose weight has the logical axes `kept`."""
        batch, seq, columns = (sharding.split(part) for part in sharding.here("batch seq vocab"))
        # A vocabulary that does not divide is computed whole by every device.
        columns = columns if vocab % sharding.size_of(*columns) == 0 else ()
        parts = dict(zip(kept.split(), sharding.here(kept), strict=True))
        embed, own = sharding.split(parts["embed"]), sharding.split(parts["vocab"])
        # A device's columns are consecutive only if the
        # shards of the weight begin with the axes of `vocab`.
        more = own[len(columns) :] if own[: len(columns)] == columns else ()
        rows = {*batch, *seq}
        # The head's gradient is summed and scattered along
        # these axes at once, so they must split tokens.
        embed = embed if rows >= {*embed} and shape[2] % sharding.size_of(*embed) == 0 else ()
        more = more if rows >= {*more} and vocab % sharding.size_of(*columns, *more) == 0 else ()
        length = shape[1] // sharding.size_of(*seq)
        # Only where the residual stream is split so anyway;
        # the scatter then is the first half of the sum.
        scatter = (
            bool(columns)
            and sharding.split(sharding.here("batch residual norm")[1]) == (*seq, *columns)
            and length % sharding.size_of(*columns) == 0
        )
        return cls(batch, seq, columns, embed, more, scatter)

    @property
    def rows(self) -> Names:
        """Axes that split the tokens."""
        return *self.batch, *self.seq

    @property
    def specs(self) -> Any:
        """Shardings of (x, head, bias, targets, weights), of Losses and of Gradients."""
        tokens: Any = PartitionSpec(self.batch, self.seq)
        head: Any = PartitionSpec(self.embed, (*self.vocab, *self.columns))
        bias: Any = PartitionSpec(self.vocab)
        x: Any = PartitionSpec(self.batch, (*self.seq, *self.vocab) if self.scatter else self.seq)
        losses = Losses(PartitionSpec(), tokens, tokens)  # type: ignore[arg-type]
        return (tokens, head, bias, tokens, tokens), losses, Gradients(x, head, bias)

    def inputs(
        self,
        x: jax.Array,
        head: jax.Array,
        bias: jax.Array | None,
        targets: jax.Array,
        weights: jax.Array,
    ) -> Inputs:
        """The inputs of one device, its slice of the head gathered."""
        # Cast first, so that the gather moves x's dtype.
        gathered = _gather(_gather(head.astype(x.dtype), self.embed, 0), self.columns, 1)
        first = jax.lax.axis_index(self.vocab) * gathered.shape[1] if self.vocab else 0
        rows, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1) - first
        return Inputs(rows, gathered, bias, targets, weights.reshape(-1))

    def losses(self, scores: Scores, weights: jax.Array, request: Request) -> Losses:
        """Losses in the shape of the weights, with the total over all devices."""
        nll, log_z = (rows.reshape(weights.shape) for rows in scores)
        return Losses(_sum(total(nll, log_z, weights, request), self.rows), nll, log_z)

    def reduce_gradients(self, gradients: Gradients, x: jax.Array) -> Gradients:
        """Gradients over all devices; the head's is added up in x's dtype, as those of other
        weights are."""
        d_x, d_head, d_bias = gradients
        d_x = d_x.reshape(x.shape)
        d_x = _scatter(d_x, self.vocab, 1) if self.scatter else _sum(d_x, self.vocab)
        d_head = _scatter(_scatter(d_head.astype(x.dtype), self.embed, 0), self.columns, 1)
        scattered = (*self.embed, *self.columns)
        # The scatters have summed over their axes already.
        d_head = _sum(d_head, tuple(axis for axis in self.rows if axis not in scattered))
        return Gradients(d_x, d_head, None if d_bias is None else _sum(d_bias, self.rows))


def total(nll: jax.Array, log_z: jax.Array, weights: jax.Array, request: Request) -> jax.Array:
    """The sum of weights * loss over these rows."""
    loss = nll + request.z_loss * jnp.square(log_z) if request.z_loss else nll
    return (weights.astype(loss.dtype) * loss).sum()


def _gather(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def _sum(x: jax.Array, axes: Names) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
