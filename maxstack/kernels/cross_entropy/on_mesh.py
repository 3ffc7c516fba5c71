"""Linear cross-entropy on a mesh: each device has its own rows and, over the axes of `vocab`, its
slice of the vocabulary.

All collectives are by hand. The head is gathered for the call, and its gradient is scattered back
to the head's shards before anything keeps it. Shapes: B batch  T time  D embed  V vocab  M rows of
a device.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels.cross_entropy.differentiable import (
    Forward,
    Graded,
    Scores,
    differentiable,
    in_dtypes_of,
    summed,
)
from maxstack.kernels.cross_entropy.request import Call, Gradients, Inputs, Losses, Request

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes, without those of size 1."""

    batch: Names
    seq: Names
    vocab: Names
    embed: Names
    """Axes along which the head's rows are gathered."""
    columns: Names
    """Axes beside `vocab` along which the head's columns are gathered."""
    scatter: bool
    """True where the residual stream's time is split over `vocab` too, so that its gradient is
    scattered instead of summed."""

    @classmethod
    def of(cls, shape: tuple[int, ...], vocab: int, kept: str) -> "Layout":
        """The layout for x [B, T, D] and a head whose weight has the logical axes `kept`."""
        batch, seq, columns = (sharding.split(part) for part in sharding.here("batch seq vocab"))
        columns = columns if vocab % sharding.size_of(*columns) == 0 else ()
        parts = dict(zip(kept.split(), sharding.here(kept), strict=True))
        embed, own = sharding.split(parts["embed"]), sharding.split(parts["vocab"])
        more = own[len(columns) :] if own[: len(columns)] == columns else ()
        rows = {*batch, *seq}
        embed = embed if rows >= {*embed} and shape[2] % sharding.size_of(*embed) == 0 else ()
        more = more if rows >= {*more} and vocab % sharding.size_of(*columns, *more) == 0 else ()
        length = shape[1] // sharding.size_of(*seq)
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


def on_mesh(
    forward: Forward,
    graded: Graded,
    layout: Layout,
    request: Request,
    blocks: Mapping[str, int] | None,
) -> Callable[..., Losses]:
    """op(x_BTD, head_DV, bias_V, targets_BT, weights_BT) -> Losses, from a backend's `forward` and
    `graded`."""
    tokens: Any = PartitionSpec(layout.batch, layout.seq)
    head: Any = PartitionSpec(layout.embed, (*layout.vocab, *layout.columns))
    bias: Any = PartitionSpec(layout.vocab)
    time = (*layout.seq, *layout.vocab) if layout.scatter else layout.seq
    x: Any = PartitionSpec(layout.batch, time)
    total: Any = PartitionSpec()
    call = Call(request, layout.vocab, blocks or {})

    def plain(x, head, bias, targets, weights):
        scores = forward(_inputs(x, head, bias, targets, weights, layout), call)
        return _summed(scores, targets, weights, layout, request)

    def with_gradients(x, head, bias, targets, weights):
        scores, of_device = graded(_inputs(x, head, bias, targets, weights, layout), call)
        reduced = in_dtypes_of(_reduced(of_device, x, layout), x, head, bias)
        return _summed(scores, targets, weights, layout, request), reduced

    specs, losses = (tokens, head, bias, tokens, tokens), Losses(total, tokens, tokens)
    return differentiable(
        sharding.per_device(plain, specs, losses),
        sharding.per_device(with_gradients, specs, (losses, Gradients(x, head, bias))),
    )


def _inputs(
    x: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    layout: Layout,
) -> Inputs:
    """The inputs of one device, its slice of the head gathered."""
    gathered = _gathered(_gathered(head.astype(x.dtype), layout.embed, 0), layout.columns, 1)
    first = jax.lax.axis_index(layout.vocab) * gathered.shape[1] if layout.vocab else 0
    return Inputs(
        x.reshape(-1, x.shape[-1]), gathered, bias, targets.reshape(-1) - first, weights.reshape(-1)
    )


def _summed(
    scores: Scores, targets: jax.Array, weights: jax.Array, layout: Layout, request: Request
) -> Losses:
    nll, log_z = (rows.reshape(targets.shape) for rows in scores)
    losses = summed(nll, log_z, weights, request)
    return losses._replace(total=_sum(losses.total, layout.rows))


def _reduced(gradients: Gradients, x: jax.Array, layout: Layout) -> Gradients:
    """Gradients over all devices; the head's is added up in x's dtype, as those of other weights
    are."""
    d_x, d_head, d_bias = gradients
    d_x = d_x.reshape(x.shape)
    d_x = _scattered(d_x, layout.vocab, 1) if layout.scatter else _sum(d_x, layout.vocab)
    d_head = _scattered(_scattered(d_head.astype(x.dtype), layout.embed, 0), layout.columns, 1)
    scattered = (*layout.embed, *layout.columns)
    d_head = _sum(d_head, tuple(axis for axis in layout.rows if axis not in scattered))
    return Gradients(d_x, d_head, None if d_bias is None else _sum(d_bias, layout.rows))


def _gathered(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scattered(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def _sum(x: jax.Array, axes: Names) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
