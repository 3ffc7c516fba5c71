"""The request that attention serves, and the case by which a backend decides whether it can."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device

Same = tuple[tuple[jax.Array, jax.Array], ...]
"""Pairs of numbers of queries [B or 1, T] and of keys [B or 1, S], int32: a query sees keys with
equal numbers in each."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Scores are q.k * scale, soft-capped. Query i stands at position i + offset among the keys,
    key j at position j.

    A causal query sees positions up to its own, the last `window` of them; another query sees
    positions less than `window` away. Both see their own document and their own `chunk` of it
    alone. A query that sees no key gives zeros.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None
    causal: bool = True
    offset: int = 0

    @property
    def reach(self) -> int | None:
        """Positions on one side of a query that it can see, its own included; None: no limit."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=None)

    @property
    def narrowed(self) -> "Request":
        """The request with `reach` as its window: the same with the numbers of chunks, and a bound
        without them."""
        return dataclasses.replace(self, window=self.reach)

    @property
    def nearest(self) -> int | None:
        """Least distance (position of a query minus that of a key) at which the key is seen; None:
        no limit."""
        if self.causal:
            return 0
        return 1 - self.window if self.window else None

    @property
    def furthest(self) -> int | None:
        """Greatest distance at which a key is seen; None: no limit."""
        return self.window - 1 if self.window else None


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call on one device."""

    request: Request
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    """Of queries, keys and values: bfloat16 or float32."""
    packed: bool
    """Rows hold several documents."""
    sinks: bool
    device: Device
    ring: bool = False
    """Keys and values go around a ring of devices."""

    @property
    def numbered(self) -> int:
        """Pairs of numbers (of documents, of chunks) in `Same`."""
        return self.packed + bool(self.request.chunk)

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """Properties by which measured block sizes are stored."""
        span = min(self.keys, self.request.reach or self.keys)
        return {
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "groups": self.heads // self.kv_heads,
            "span": 1 << (span - 1).bit_length(),
        }


def needs_ampere(device: Device) -> str | None:
    """The reason of kernels for an A100 and later where the device is older."""
    if device.capability >= (8, 0):
        return None
    return (
        f"needs a GPU of compute capability 8.0 (A100) or later; {device.kind} has "
        f"{'.'.join(map(str, device.capability))}"
    )


def within(request: Request, distance: jax.Array) -> list[jax.Array]:
    """Masks of the distances at which keys are seen, like `distance`; none where all are."""
    masks = [] if request.nearest is None else [distance >= request.nearest]
    return masks if request.furthest is None else [*masks, distance <= request.furthest]


def visible(request: Request, at_T: jax.Array, at_S: jax.Array, same: Same) -> jax.Array:
    """bool [B or 1, T, S] for queries with these indices and keys at these positions, `same` being
    theirs: the definition of which query sees which key."""
    distance_TS = at_T[:, None] + request.offset - at_S[None, :]
    seen_BTS = jnp.ones_like(distance_TS, bool)[None]
    for mask_TS in within(request, distance_TS):
        seen_BTS = seen_BTS & mask_TS
    for mine, theirs in same:
        seen_BTS = seen_BTS & (mine[:, :, None] == theirs[:, None, :])
    return seen_BTS
