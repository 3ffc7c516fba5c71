"""What is asked of attention, and what a backend looks at to say whether it can serve."""

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
    """Scores are q.k * scale, soft-capped. Query i stands at place i + offset among the keys, key j
    at place j.

    A causal query sees places up to its own, the last `window` of them; another query sees places
    less than `window` away. Both see their own document and their own `chunk` of it alone. A query
    that sees no key gives zeros.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None
    causal: bool = True
    offset: int = 0

    @property
    def reach(self) -> int | None:
        """Keys further away than this, its own place counted, are seen by no query; None: all may
        be."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=None)


@dataclasses.dataclass(frozen=True)
class Case:
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
        """How many pairs of numbers (of documents, of chunks) tell who sees whom."""
        return self.packed + bool(self.request.chunk)

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """What tuned sizes hang on."""
        span = min(self.keys, self.request.reach or self.keys)
        return {
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "groups": self.heads // self.kv_heads,
            "span": 1 << (span - 1).bit_length(),
        }


def visible(request: Request, places_T: jax.Array, places_S: jax.Array, same: Same) -> jax.Array:
    """bool [B or 1, T, S] of queries and keys at these places, `same` being theirs: the definition
    of who sees whom."""
    distance_TS = places_T[:, None] + request.offset - places_S[None, :]
    seen_BTS = (distance_TS >= 0 if request.causal else jnp.ones_like(distance_TS, bool))[None]
    if request.window:
        seen_BTS = seen_BTS & (jnp.abs(distance_TS) < request.window)
    for mine, theirs in same:
        seen_BTS = seen_BTS & (mine[:, :, None] == theirs[:, None, :])
    return seen_BTS
