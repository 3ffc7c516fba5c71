"""Linear cross-entropy on a mesh: each device has its own rows and, over the axes of `vocab`, its
slice of the vocabulary.

All collectives are by hand. The head is gathered for the call and its gradient scattered back to
where it lies before anything keeps it. Shapes: B batch  T time  D embed  V vocab  M rows of a
device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels.cross_entropy.differentiable import differentiable, in_dtypes_of, summed
from maxstack.kernels.cross_entropy.request import Gradients, Losses, Request
from maxstack.schema.mesh import names

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes, those of one device left out."""

    batch: Names
    seq: Names
    vocab: Names
    embed: Names
    """Of the head's rows, along which it is gathered."""
    columns: Names
    """Of the head's columns beside `vocab`, along which it is gathered."""
    scatter: bool
    """The stream's time is split over `vocab` too, so that the sum of its gradient is."""

    @classmethod
    def of(cls, shape: tuple[int, ...], vocab: int, kept: str) -> "Layout":
        """Of x [B, T, D] and a head that is kept by the logical axes `kept`."""
        batch, seq, columns = (_axes(part) for part in sharding.here("batch seq vocab"))
        columns = columns if vocab % sharding.size_of(*columns) == 0 else ()
        place = dict(zip(kept.split(), sharding.here(kept), strict=True))
        embed, own = _axes(place["embed"]), _axes(place["vocab"])
        more = own[len(columns) :] if own[: len(columns)] == columns else ()
        rows = {*batch, *seq}
        embed = embed if rows >= {*embed} and shape[2] % sharding.size_of(*embed) == 0 else ()
        more = more if rows >= {*more} and vocab % sharding.size_of(*columns, *more) == 0 else ()
        length = shape[1] // sharding.size_of(*seq)
        scatter = (
            _axes(sharding.here("batch residual norm")[1]) == (*seq, *columns)
            and length % sharding.size_of(*columns) == 0
        )
        return cls(batch, seq, columns, embed, more, scatter and bool(columns))

    @property
    def rows(self) -> Names:
        """Axes that split the tokens."""
        return *self.batch, *self.seq


def _axes(part: Any) -> Names:
    return tuple(axis for axis in names(part) if sharding.size_of(axis) > 1)


def on_mesh(
    forward: Callable[..., Any],
    graded: Callable[..., Any],
    layout: Layout,
    request: Request,
    blocks: Mapping[str, int] | None,
) -> Callable[..., Losses]:
    """op(x_BTD, head_DV, bias_V, targets_BT, weights_BT) -> Losses, of a backend's `forward` and
    `graded`."""
    tokens, head = (
        PartitionSpec(layout.batch, layout.seq),
        PartitionSpec(layout.embed, (*layout.vocab, *layout.columns)),
    )
    of_bias, of_x = (
        PartitionSpec(layout.vocab),
        PartitionSpec(layout.batch, (*layout.seq, *(layout.vocab if layout.scatter else ()))),
    )
    places: list[Any] = [PartitionSpec(), tokens, tokens]
    of_gradients: list[Any] = [of_x, head, of_bias]
    specs, losses = (tokens, head, of_bias, tokens, tokens), Losses(*places)
    local = functools.partial(_local, layout=layout, request=request, blocks=blocks)
    return differentiable(
        sharding.per_device(functools.partial(local, forward, False), specs, losses),
        sharding.per_device(
            functools.partial(local, graded, True), specs, (losses, Gradients(*of_gradients))
        ),
    )


def _local(
    backend: Callable[..., Any],
    with_gradients: bool,
    x: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    layout: Layout,
    request: Request,
    blocks: Mapping[str, int] | None,
) -> Any:
    """One device's part."""
    whole = _gathered(_gathered(head.astype(x.dtype), layout.embed, 0), layout.columns, 1)
    first = jax.lax.axis_index(layout.vocab) * whole.shape[1] if layout.vocab else 0
    given = x.reshape(-1, x.shape[-1]), whole, bias, targets.reshape(-1) - first
    more = (weights.reshape(-1),) if with_gradients else ()
    found = backend(*given, *more, request, axes=layout.vocab, blocks=blocks)
    nll, log_z = (rows.reshape(targets.shape) for rows in (found[0] if with_gradients else found))
    losses = summed(nll, log_z, weights, request)
    losses = losses._replace(total=_sum(losses.total, layout.rows))
    if not with_gradients:
        return losses
    of_x, of_head, of_bias = found[1]
    of_x = of_x.reshape(x.shape)
    of_x = _scattered(of_x, layout.vocab, 1) if layout.scatter else _sum(of_x, layout.vocab)
    of_head = _scattered(
        _scattered(of_head.astype(x.dtype), layout.embed, 0), layout.columns, 1
    )  # in x's dtype, as gradients of other weights are
    of_head = _sum(
        of_head, tuple(axis for axis in layout.rows if axis not in (*layout.embed, *layout.columns))
    )
    of_bias = None if of_bias is None else _sum(of_bias, layout.rows)
    return losses, in_dtypes_of(Gradients(of_x, of_head, of_bias), x, head, bias)


def _gathered(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scattered(x: jax.Array, axes: Names, dim: int) -> jax.Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def _sum(x: jax.Array, axes: Names) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
