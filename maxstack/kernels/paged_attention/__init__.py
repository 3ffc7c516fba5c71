"""Paged attention: single tokens attend over the keys and values of their requests, which lie in
pages of a cache (Kwon et al. 2023, arXiv:2309.06180).

A row's bits do not depend on other requests, nor on how many rows a step has: each backend walks a
request's keys in blocks at fixed positions, and blocks that a row does not see change nothing.

Shapes: R rows  S slots  W pages of a request at most  P pages  L tokens of a page  N heads  K kv
heads  C arrays of a token (2K: keys and values in turn; 1: a key whose first V numbers are the
value)  H head dim  V value dim.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.kernels import sequences
from maxstack.kernels.attention.request import Request
from maxstack.kernels.backends import Backend, Device, Op

OP = Op(
    "paged_attention",
    (
        Backend("tiles", f"{__name__}.tiles", ("cpu",)),
        Backend("pallas_tpu", f"{__name__}.pallas_tpu", ("tpu",)),
        Backend("blockwise", f"{__name__}.blockwise"),
        Backend("reference", f"{__name__}.reference"),
    ),
)


BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""Types whose numbers pages on CPUs hold as integers of the same bits: XLA on a CPU would convert
the whole cache, there and back, around each gather and scatter of such numbers (164 ms a layer and
step with 8,193 pages of bfloat16, 2 ms by their bits)."""


class Quantized(NamedTuple):
    """Pages in low precision: numbers and their scales."""

    numbers_PLCH: jax.Array
    """int8 or float8_e4m3fn, that on CPUs by `BITS`."""
    scales_PLC: jax.Array
    """float32: of each token's each array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, L, C, H]."""
        return self.numbers_PLCH.shape


class Inputs(NamedTuple):
    """Arrays of one call on one device, for a backend's `run(inputs, request, value_dim)`."""

    q_RNH: jax.Array
    pages_PLCH: jax.Array
    tables_RW: jax.Array
    """Pages of each row's request."""
    positions_R: jax.Array
    sinks_N: jax.Array | None
    kv_heads: jax.Array | None
    """Numbers of the kv heads that the queries read; None: all in their order."""
    scales_PLC: jax.Array | None = None
    """Scales of `Quantized` pages; None: pages are not quantized."""


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """One call on one device."""

    request: Request
    rows: int
    keys: int
    """Most keys of a request."""
    page: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    cache_dtype: str
    latent: bool
    sinks: bool
    device: Device
    numbered: bool = False
    """The queries read some of the kv heads, by their numbers."""

    @property
    def unlike_pages(self) -> str | None:
        """Why kernels that multiply pages as they are cannot serve; None if they can."""
        if self.cache_dtype == self.dtype:
            return None
        return f"pages are {self.cache_dtype}, and the queries {self.dtype}"

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """Empty: no backend has block sizes to measure."""
        return {}


def paged_attention(
    q_RNH: jax.Array,
    new_RCH: jax.Array | None,
    pages_PLCH: jax.Array | Quantized,
    tables_SW: jax.Array,
    slots_R: jax.Array,
    positions_R: jax.Array,
    request: Request,
    backend: str = "auto",
    *,
    sinks_N: jax.Array | None = None,
    value_dim: int | None = None,
) -> tuple[jax.Array, Any]:
    """(softmax(scores) v [R, N, V] in q's dtype, the pages with `new_RCH` at its places).

    Row r is the token at `positions_R[r]` (-1: unused, gives zeros) of the request whose pages are
    `tables_SW[slots_R[r]]`: position p lies in the page at p // L. It sees the keys of its request
    that `Request` lets it see, those of other rows of this call too; None for `new_RCH` writes
    nothing. A row's result does not depend on other requests. `sinks_N` as in `attention`. On a
    mesh each device has its own rows, slots and pages, and its heads of these."""

    def local(q, new, pages, tables, slots, positions, sinks, kv_heads=None):
        # Written before they are read, since rows of one call see each other's keys.
        pages = pages if new is None else _write(new, pages, tables, slots, positions)
        # Keys and values lie in turn; the single array of a latent counts as one kv head.
        kv = kv_heads.shape[0] if kv_heads is not None else -(-pages.shape[2] // 2)
        latent = value_dim is not None
        kept, scales = pages if isinstance(pages, Quantized) else (pages, None)
        case = PagedCase(
            request,
            q.shape[0],
            tables.shape[1] * pages.shape[1],
            pages.shape[1],
            q.shape[1],
            kv,
            pages.shape[3],
            value_dim or pages.shape[3],
            q.dtype.name,
            number_type(kept).name,
            latent,
            sinks is not None,
            Device.here(),
            kv_heads is not None,
        )
        run = OP[OP.choose(case, backend).backend].run
        inputs = Inputs(q, kept, tables[slots], positions, sinks, kv_heads, scales)
        return run(inputs, request, value_dim), pages

    with jax.named_scope("paged_attention"):
        if sharding.current() is None:
            return local(q_RNH, new_RCH, pages_PLCH, tables_SW, slots_R, positions_R, sinks_N)
        kv = -(-pages_PLCH.shape[2] // 2)
        batch = sharding.here("batch")[0]
        heads, keys, inner = sequences.head_axes(q_RNH.shape[1], kv)
        # All heads read the same latent, so every device holds it whole.
        if value_dim is not None:
            keys, inner = None, ()
        groups = q_RNH.shape[1] // kv

        def own(q, new, pages, tables, slots, positions, sinks):
            others = tables, slots, positions, sinks
            if not inner:
                return local(q, new, pages, *others)
            # Pages cannot be cut by head for one device, so
            # it reads the kv heads of its queries by number.
            numbers = sequences.kv_head_numbers(q.shape[1], groups, inner)
            return local(q, new, pages, *others, numbers)

        rows, tokens = PartitionSpec(batch, heads), PartitionSpec(batch)
        pages = PartitionSpec(batch, None, keys)
        new = None if new_RCH is None else PartitionSpec(batch, keys)
        specs = rows, new, pages, tokens, tokens, tokens, PartitionSpec(heads)
        return sharding.per_device(own, specs, (rows, pages))(
            q_RNH, new_RCH, pages_PLCH, tables_SW, slots_R, positions_R, sinks_N
        )


def _write(
    new_RCH: jax.Array,
    pages_PLCH: jax.Array | Quantized,
    tables_SW: jax.Array,
    slots_R: jax.Array,
    positions_R: jax.Array,
) -> jax.Array | Quantized:
    """Write the rows' arrays into pages; those of unused rows go to page 0 as zeros.

    Numbers that are not finite become 0: the next owner of a page may read it, masked, before it is
    written again, and 0 times infinity is not 0. The row itself keeps it in its residual stream."""
    length, real_R = pages_PLCH.shape[1], positions_R >= 0
    # -1, of an unused row, would count from the end.
    at_R = jnp.maximum(positions_R, 0)
    # Page 0 belongs to no request, so unused rows may all write there.
    where = jnp.where(real_R, tables_SW[slots_R, at_R // length], 0), at_R % length

    def finite(x_RCH: jax.Array) -> jax.Array:
        return jnp.where(real_R[:, None, None] & jnp.isfinite(x_RCH), x_RCH, 0)

    if not isinstance(pages_PLCH, Quantized):
        # Rounded to the cache's type before its bits are taken.
        new_RCH = _bitcast_as_kept(finite(new_RCH.astype(number_type(pages_PLCH))), pages_PLCH)
        return pages_PLCH.at[where].set(new_RCH)
    numbers_PLCH, scales_PLC = pages_PLCH
    numbers_RCH, scales_RC = quantize(finite(new_RCH), number_type(numbers_PLCH))
    numbers_PLCH = numbers_PLCH.at[where].set(_bitcast_as_kept(numbers_RCH, numbers_PLCH))
    return Quantized(numbers_PLCH, scales_PLC.at[where].set(scales_RC))


def number_type(pages_PLCH: jax.Array) -> Any:
    """Type of the numbers that pages hold, as they are or as `BITS`."""
    name = pages_PLCH.dtype.name
    return jnp.dtype({bits: number for number, bits in BITS.items()}.get(name, name))


def _bitcast_as_kept(x: jax.Array, pages_PLCH: jax.Array) -> jax.Array:
    same = x.dtype == pages_PLCH.dtype
    return x if same else jax.lax.bitcast_convert_type(x, pages_PLCH.dtype)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Numbers of `dtype` [.., H] and float32 scales [..], whose products are nearly `x`: the
    largest number of each row becomes that of the type."""
    x, whole = x.astype(jnp.float32), jnp.issubdtype(dtype, jnp.integer)
    # Symmetric: -128 is not used, so the scale alone inverts it.
    most = jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max
    # A row of zeros would be divided by 0.
    scales = jnp.maximum(jnp.abs(x).max(-1), 1e-30) / float(most)
    numbers = x / scales[..., None]
    return (jnp.round(numbers) if whole else numbers).astype(dtype), scales


def read_pages(inputs: Inputs, ids: jax.Array, dtype: Any) -> jax.Array:
    """Pages with these numbers [.., L, C, H] in `dtype`."""
    kept, own = inputs.pages_PLCH[ids], number_type(inputs.pages_PLCH)
    kept = kept if kept.dtype == own else jax.lax.bitcast_convert_type(kept, own)
    if inputs.scales_PLC is not None:
        # In float32, and rounded to `dtype` once.
        kept = kept.astype(jnp.float32) * inputs.scales_PLC[ids][..., None]
    return kept.astype(dtype)


def split_keys_values(
    kept: jax.Array, value_dim: int | None, kv_heads: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cached arrays [.., C, H] -> keys [.., K, H] and values [.., K, V]; of the kv heads with these
    numbers, None: all."""
    if value_dim is not None:
        return kept, kept[..., :value_dim]
    kept = kept.reshape(*kept.shape[:-2], -1, 2, kept.shape[-1])
    if kv_heads is not None:
        # A gather, since which heads these are depends on the device.
        kept = jnp.take(kept, kv_heads, axis=-3)
    return kept[..., 0, :], kept[..., 1, :]
