"""The request that attention serves, and the case by which a backend decides whether it can."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels.backends import Device

Same = tuple[Any, ...]
"""Pairs of numbers of queries [B or 1, T] and of keys [B or 1, S], int32: a query sees keys with
equal numbers in each. In a ring an item is the numbers of one device's positions."""


class Inputs(NamedTuple):
    """Arrays of one call."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKV: jax.Array
    sinks_N: jax.Array | None = None
    same: Same = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """Scores are q.k * scale, soft-capped. Query i is at position i + offset among the keys,
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
    def with_narrow_window(self) -> "Request":
        """The same request with a window no wider than a chunk, so that backends skip keys beyond
        it."""
        # A chunk's keys are nearer than its length, so this hides nothing more.
        limits = [limit for limit in (self.window, self.chunk) if limit]
        return dataclasses.replace(self, window=min(limits, default=None))

    @property
    def min_distance(self) -> int | None:
        """Least distance (position of a query minus that of a key) at which the key is seen; None:
        no limit."""
        if self.causal:
            return 0
        return 1 - self.window if self.window else None

    @property
    def max_distance(self) -> int | None:
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
    """The dtype of queries, keys and values: bfloat16 or float32."""
    packed: bool
    """Rows hold several documents."""
    sinks: bool
    device: Device
    ring: bool = False
    """Keys and values go around a ring of devices."""

    @classmethod
    def of(
        cls, inputs: Inputs, request: Request, device: Device, ring: bool = False
    ) -> "AttentionCase":
        """The case of a call."""
        q_BTNH, k_BSKH, v_BSKV, sinks_N, same = inputs
        return cls(
            request,
            queries=q_BTNH.shape[1],
            keys=k_BSKH.shape[1],
            heads=q_BTNH.shape[2],
            kv_heads=k_BSKH.shape[2],
            head_dim=q_BTNH.shape[3],
            value_dim=v_BSKV.shape[3],
            dtype=q_BTNH.dtype.name,
            # Chunks are a pair of numbers of their own; one pair more means documents.
            packed=len(same) > (1 if request.chunk else 0),
            sinks=sinks_N is not None,
            device=device,
            ring=ring,
        )

    @property
    def groups(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def numbered(self) -> int:
        """Pairs of numbers (of documents, of chunks) in `Same`."""
        return (1 if self.packed else 0) + (1 if self.request.chunk else 0)

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """Properties by which measured block sizes are stored."""
        span = min(self.keys, self.request.with_narrow_window.window or self.keys)
        return {
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "groups": self.groups,
            # A power of two, so that sizes measured for one length serve its neighbours.
            "span": 1 << (span - 1).bit_length(),
        }


def distance_masks(request: Request, distance: jax.Array) -> list[jax.Array]:
    """Masks, in the shape of `distance`, of the distances at which a query sees a key; empty where
    it sees all."""
    masks = [] if request.min_distance is None else [distance >= request.min_distance]
    return masks if request.max_distance is None else [*masks, distance <= request.max_distance]


def visibility_mask(request: Request, at_T: jax.Array, at_S: jax.Array, same: Same) -> jax.Array:
    """bool [B or 1, T, S] for queries with these indices and keys at these positions, `same` being
    theirs: the definition of which query sees which key."""
    distance_TS = at_T[:, None] + request.offset - at_S[None, :]
    seen_BTS = jnp.ones_like(distance_TS, bool)[None]
    for mask_TS in distance_masks(request, distance_TS):
        seen_BTS = seen_BTS & mask_TS
    for mine, theirs in same:
        seen_BTS = seen_BTS & (mine[:, :, None] == theirs[:, None, :])
    return seen_BTS


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], unit: float = 1.0
) -> Callable[[Inputs, Any], jax.Array]:
    """attention(inputs, call) -> [B, T, N, V] in q's dtype, whose backward pass recomputes the
    scores from the saved log-sum-exp (FlashAttention, Dao et al. 2022, arXiv:2205.14135).

    `forward(inputs, call)` gives the output and the log-sum-exp [B, N, T] in units of `unit` nats,
    `backward(call, inputs, log, mean, do)` the gradients of q, k and v; `mean` [B, N, T] is the
    output times its gradient `do`, summed over V. A sink gives nothing, so its gradient is minus
    its share of the softmax times `mean`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def attention(inputs: Inputs, call: Any) -> jax.Array:
        return forward(inputs, call)[0]

    def save(inputs: Inputs, call: Any) -> Any:
        o_BTNV, log_BNT = forward(inputs, call)
        return o_BTNV, (inputs, o_BTNV, log_BNT)

    def gradients(call: Any, saved: Any, do_BTNV: jax.Array) -> Any:
        inputs, o_BTNV, log_BNT = saved
        # The sum over keys of p dp equals do . o, so the
        # backward pass needs no walk of its own for it.
        products_BTNV = do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32)
        mean_BNT = products_BTNV.sum(axis=-1).swapaxes(1, 2)
        floats: list[Any] = [*backward(call, inputs, log_BNT, mean_BNT, do_BTNV), None]
        if inputs.sinks_N is not None:
            share_BNT = jnp.exp(inputs.sinks_N.astype(jnp.float32)[:, None] - log_BNT * unit)
            # In plain XLA for every backend: none needs to know the gradient of a sink.
            floats[3] = -(share_BNT * mean_BNT).sum(axis=(0, 2))
        pairs = zip(floats, inputs[:4], strict=True)
        cast = [None if d is None else d.astype(x.dtype) for d, x in pairs]
        return (Inputs._make([*cast, None]),)

    attention.defvjp(save, gradients)
    return attention
