"""Attention in plain XLA, one tile of queries by keys at a time.

As in FlashAttention (Dao et al. 2022, arXiv:2205.14135), a running output and log-sum-exp are
updated by each tile, so no score outlives its tile, and the backward pass recomputes the scores.
`make_tiles` lists, while the program is traced, the tiles that hold a key which a query sees, and
marks those that positions do not mask. Tiles of one size are one loop: XLA compiles its body once
and keeps the memory of one tile. A narrow window gets one tile for each block of queries, as wide
as its queries see. Documents and chunks are compared inside each tile. ring.py runs the same tiles
against keys of other devices.

Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv heads  H head dim
V value head dim  Q rows of a tile, G x queries.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.attention.request import (
    AttentionCase,
    Inputs,
    Request,
    differentiable,
    distance_masks,
)
from maxstack.kernels.backends import Device, product_dtype

MASKED = -1e30
"""Score of a masked key."""
UNSEEN = -5e29
"""Log-sum-exp of a query before its first key: between MASKED and every real score, so that a query
that never sees a key adds exp(MASKED - UNSEEN) = 0 for each."""
SIZES = {"cpu": (256, 256)}
"""Queries and keys of a tile by platform: on a CPU a tile stays in the cache (1 x 2,048 positions,
forward and backward: 93 ms; with 128 x 256 134, with 512 x 512 115)."""
OTHER_SIZES = (512, 1024)
MOST_MIXED = 3
"""Most unmasked tiles that share the loop of masked ones; more get a loop of their own."""
MOST_UNROLLED = 4
"""Most tiles of a size that are unrolled instead of looped over: XLA then knows the place and the
mask of each (reference step 545 -> 510 ms, its compilation 4.2 -> 4.6 s)."""
CANDIDATES = [(rows, keys) for rows in (64, 128, 256, 512) for keys in (rows, 2 * rows)]
"""Further sizes to measure."""
_cut = jax.lax.dynamic_slice_in_dim
_put = jax.lax.dynamic_update_slice_in_dim
_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Tile sizes to measure, the default first, without those that a short sequence makes equal."""
    span = int(case.shape_class["span"])
    sizes: dict[tuple[int, int], dict[str, int]] = {}
    for rows, keys in (SIZES.get(case.device.platform, OTHER_SIZES), *CANDIDATES):
        sizes.setdefault((min(rows, case.queries), min(keys, span)), {"rows": rows, "keys": keys})
    return list(sizes.values())


def run(inputs: Inputs, request: Request, blocks: Mapping[str, int] | None = None) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, by tiles of at most blocks["rows"] queries
    and blocks["keys"] keys. No score array has more than one tile a head, whatever T."""
    most = (blocks["rows"], blocks["keys"]) if blocks else tile_sizes()
    return _attention(inputs, (request.with_narrow_window, most))


class Numbers(NamedTuple):
    """Numbers that decide which queries see which keys, int32 [B or 1, T or S] each."""

    position: jax.Array
    """In the sequence, rising."""
    same: tuple[jax.Array, ...]
    """A query sees keys with equal numbers in each; of the queries or of the keys."""


class Tiles(NamedTuple):
    """Tiles of one size."""

    starts: np.ndarray | jax.Array
    """Index of each tile's first query."""
    firsts: np.ndarray | jax.Array
    """Index of its first key."""
    rows: int
    keys: int
    remote: bool = False
    """The keys are of another part of the sequence and may lie outside every query's window."""
    unmasked: bool = False
    """Positions mask no key of these tiles."""


Keys = tuple[jax.Array, jax.Array]
"""Keys [B, K, S, H] and values [B, K, S, V]."""
Pair = tuple[Numbers, Numbers]
"""Numbers of the queries, and of the keys."""
Output = tuple[jax.Array, jax.Array]
"""Output for the keys seen so far [B, K, G, T, V], and the log-sum-exp of their scores [B, K, G,
T], both float32."""
Gradients = tuple[jax.Array, Keys]
"""Gradients of queries [B, K, G, T, H], and of keys and values: float32."""
Call = tuple[Request, tuple[int, int]]
"""The request, and the most queries and keys of a tile."""


def _forward(inputs: Inputs, call: Call) -> Output:
    q_BKGTH, kv = group_heads(inputs)
    before = initial(q_BKGTH, kv, inputs.sinks_N)
    return as_output(attend(before, q_BKGTH, kv, *_whole(inputs, call), call[0]), inputs)


def _backward(
    call: Call, inputs: Inputs, log_BNT: jax.Array, mean_BNT: jax.Array, do_BTNV: jax.Array
) -> list[jax.Array]:
    q_BKGTH, kv = group_heads(inputs)
    queries = backward_queries(q_BKGTH, do_BTNV, mean_BNT, log_BNT)
    before = zeros(q_BKGTH), jax.tree.map(zeros, kv)
    return as_arguments(add_gradients(before, queries, kv, *_whole(inputs, call), call[0]))


def _whole(inputs: Inputs, call: Call) -> "tuple[Pair, list[Tiles]]":
    """Numbers and tiles of whole sequences."""
    request, most = call
    t, s = inputs.q_BTNH.shape[1], inputs.k_BSKH.shape[1]
    of_q = tuple(mine for mine, _ in inputs.same)
    of_k = tuple(theirs for _, theirs in inputs.same)
    # [1, T]: positions are the same in all rows of the batch, documents need not be.
    queries = Numbers(jnp.arange(t)[None] + request.offset, of_q)
    return (queries, Numbers(jnp.arange(s)[None], of_k)), make_tiles(t, s, request, most)


def tile_sizes() -> tuple[int, int]:
    """Queries and keys of a tile."""
    return SIZES.get(Device.here().platform, OTHER_SIZES)


Span = tuple[int, int, int]
"""Begin, end and size of tiles along one axis."""


def spans(t: int, size: int) -> Iterator[Span]:
    """Whole tiles along t, and a remainder."""
    # A remainder has tiles of its own size; padding it to a whole tile would need one more mask.
    whole = t - t % size
    yield from (span for span in ((0, whole, size), (whole, t, t - whole)) if span[0] < span[1])


def corners(rows: Span, keys: Span) -> tuple[np.ndarray, np.ndarray]:
    """First query and first key of each tile of two spans."""
    start, first = np.meshgrid(np.arange(*rows), np.arange(*keys), indexing="ij")
    return start.reshape(-1), first.reshape(-1)


def make_tiles(t: int, s: int, request: Request, most: tuple[int, int]) -> list[Tiles]:
    """The tiles of t queries and s keys in which some query sees some key."""
    most_rows, most_keys = most
    offset, back = request.offset, request.max_distance
    # Greater than every distance where nothing limits it, so that one comparison serves both cases.
    ahead = s + t + abs(offset) if request.min_distance is None else -request.min_distance
    tiles = []
    if back is not None and back + ahead < 4 * most_keys:
        # A narrow window: one tile of as many keys as its queries see, of half the rows, so that
        # fewer of its keys are masked.
        for span in spans(t, max(1, most_rows // 2)):
            keys, starts = min(s, span[2] + back + ahead), np.arange(*span)
            # Clipped into the sequence: tiles at its ends then hold keys that the mask hides.
            firsts = np.clip(starts + offset - back, 0, s - keys)
            tiles.append(Tiles(starts, firsts, span[2], keys))
        return tiles
    for row_span in spans(t, most_rows):
        for key_span in spans(s, most_keys):
            rows, keys = row_span[2], key_span[2]
            start, first = corners(row_span, key_span)
            position, last = start + offset, first + keys - 1
            # The first key with the last query is the pair that is nearest to being seen.
            seen = first - (position + rows - 1) <= ahead
            if back is not None:
                seen &= position - last <= back
            unmasked = seen & (last - position <= ahead) & (back is None)
            if unmasked.sum() > MOST_MIXED:
                # A loop of their own, whose body compares no positions.
                split = [(seen & ~unmasked, False), (unmasked, True)]
            else:
                split = [(seen, bool(unmasked[seen].all()))]
            for chosen, clear in split:
                if chosen.any():
                    tiles.append(Tiles(start[chosen], first[chosen], rows, keys, unmasked=clear))
    return tiles


def group_heads(inputs: Inputs) -> tuple[jax.Array, Keys]:
    """Group the query heads by kv head -> (queries [B, K, G, T, H], keys and values), in the dtype
    of products."""
    # Converted once a call: XLA on a CPU converts
    # bfloat16 operands around each product, here a tile.
    q_BTNH, k_BSKH, v_BSKV = (x.astype(product_dtype(x.dtype)) for x in inputs[:3])
    # Heads before time, so that a tile is one piece of each head.
    return _grouped(q_BTNH, k_BSKH.shape[2]), (k_BSKH.swapaxes(1, 2), v_BSKV.swapaxes(1, 2))


def merge_heads(x_BKGTH: jax.Array) -> jax.Array:
    """Merge grouped heads -> [B, T, N, H]."""
    b, k, g, t, h = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


def as_output(output: Output, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The output [B, T, N, V] in q's dtype, and the log-sum-exp [B, N, T]."""
    b, t, n, _ = inputs.q_BTNH.shape
    o_BKGTV, log_BKGT = output
    return merge_heads(o_BKGTV).astype(inputs.q_BTNH.dtype), log_BKGT.reshape(b, n, t)


def _grouped(x_BTNH: jax.Array, kv: int) -> jax.Array:
    b, t, n, h = x_BTNH.shape
    return x_BTNH.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)


def zeros(x: jax.Array) -> jax.Array:
    """The gradient of x before the first tile: float32."""
    return jnp.zeros(x.shape, jnp.float32)


def initial(q_BKGTH: jax.Array, kv: Keys, sinks_N: jax.Array | None) -> Output:
    """The output before the first key: sinks give nothing, but take their share of the softmax."""
    k, g = q_BKGTH.shape[1:3]
    log = jnp.asarray(UNSEEN, jnp.float32)
    if sinks_N is not None:
        log = sinks_N.astype(jnp.float32).reshape(1, k, g, 1)
    o_BKGTV = jnp.zeros((*q_BKGTH.shape[:4], kv[1].shape[3]), jnp.float32)
    return o_BKGTV, jnp.broadcast_to(log, q_BKGTH.shape[:4])


def attend(
    before: Output,
    q_BKGTH: jax.Array,
    kv: Keys,
    numbers: Pair,
    tiles: list[Tiles],
    request: Request,
) -> Output:
    """Update an output with the keys of `tiles`."""
    k_BKSH, v_BKSV = kv
    # Scale the queries, T x H numbers, rather than the scores, T x S.
    q_BKGTH = q_BKGTH * jnp.asarray(request.scale, q_BKGTH.dtype)

    def tile(size: Tiles, state: Output, start: jax.Array, first: jax.Array) -> Output:
        own = _numbers(numbers, start, first, size)
        old_BKQV, old_BKQ = (_rows(x, start, size.rows) for x in state)

        def seen() -> Output:
            s_BKQS, _ = _scores(
                _rows(q_BKGTH, start, size.rows),
                _cut(k_BKSH, first, size.keys, 2),
                own,
                size,
                request,
            )
            # The output stays normalised, so its log-sum-exp alone stands for all earlier keys: no
            # maximum and no sum are carried along.
            top_BKQ = jnp.maximum(s_BKQS.max(axis=-1), old_BKQ)
            # At most 1: both exponents are relative to the greater of the two.
            p_BKQS, share_BKQ = jnp.exp(s_BKQS - top_BKQ[..., None]), jnp.exp(old_BKQ - top_BKQ)
            total_BKQ = p_BKQS.sum(axis=-1) + share_BKQ
            # Shares are rounded to the type of the values; `_dot` sums in float32.
            o_BKQV = _dot(
                "BKQS,BKSV->BKQV", p_BKQS.astype(v_BKSV.dtype), _cut(v_BKSV, first, size.keys, 2)
            )
            o_BKQV = (o_BKQV + old_BKQV * share_BKQ[..., None]) / total_BKQ[..., None]
            return o_BKQV, top_BKQ + jnp.log(total_BKQ)

        o_BKQV, log_BKQ = _if_seen(own, size, request, seen, lambda: (old_BKQV, old_BKQ))
        return _put_rows(state[0], start, o_BKQV), _put_rows(state[1], start, log_BKQ)

    return _over(tiles, tile, before)


class Queries(NamedTuple):
    """Queries, the gradient of their output, its product with the output summed over V, and the
    log-sum-exp of their scores."""

    q_BKGTH: jax.Array
    do_BKGTV: jax.Array
    mean_BKGT: jax.Array
    log_BKGT: jax.Array


def backward_queries(
    q_BKGTH: jax.Array, do_BTNV: jax.Array, mean_BNT: jax.Array, log_BNT: jax.Array
) -> Queries:
    """Queries of the backward pass."""
    shape = q_BKGTH.shape[:4]
    do_BKGTV = _grouped(do_BTNV.astype(q_BKGTH.dtype), shape[1])
    return Queries(q_BKGTH, do_BKGTV, mean_BNT.reshape(shape), log_BNT.reshape(shape))


def add_gradients(
    before: Gradients,
    queries: Queries,
    kv: Keys,
    numbers: Pair,
    tiles: list[Tiles],
    request: Request,
) -> Gradients:
    """Add the gradients of the output in `tiles` to `before`."""
    k_BKSH, v_BKSV = kv
    dtype = k_BKSH.dtype
    q_BKGTH = queries.q_BKGTH * jnp.asarray(request.scale, dtype)

    def tile(size: Tiles, grads: Gradients, start: jax.Array, first: jax.Array) -> Gradients:
        own = _numbers(numbers, start, first, size)
        q, do, mean, log = (_rows(x, start, size.rows) for x in (q_BKGTH, *queries[1:]))
        k, v = _cut(k_BKSH, first, size.keys, 2), _cut(v_BKSV, first, size.keys, 2)

        def seen() -> Gradients:
            s_BKQS, raw = _scores(q, k, own, size, request)
            # The log-sum-exp of the forward pass makes this
            # the softmax, without a sum over all keys.
            p_BKQS = jnp.exp(s_BKQS - log[..., None])
            dv = _dot("BKQS,BKQV->BKSV", p_BKQS.astype(dtype), do)
            ds = p_BKQS * (_dot("BKQV,BKSV->BKQS", do, v) - mean[..., None])
            if request.soft_cap:
                # By the scores before the mask: MASKED squared
                # overflows, and 0 times infinity is NaN.
                ds = ds * (1 - jnp.square(raw / request.soft_cap))
            ds = ds.astype(dtype)
            # The queries here are scaled already, so dq needs the scale and dk does not.
            dq = _dot("BKQS,BKSH->BKQH", ds, k) * request.scale
            return dq, (_dot("BKQS,BKQH->BKSH", ds, q), dv)

        dq, (dk, dv) = _if_seen(own, size, request, seen, lambda: (zeros(q), (zeros(k), zeros(v))))
        # Added to what other tiles have given: rows of queries and of keys belong to several.
        dq = _put_rows(grads[0], start, dq + _rows(grads[0], start, size.rows))
        return dq, (_add_keys(grads[1][0], first, dk), _add_keys(grads[1][1], first, dv))

    return _over(tiles, tile, before)


def as_arguments(gradients: Gradients) -> list[jax.Array]:
    """Gradients of q, k and v, each [B, T or S, heads, ..]."""
    dq_BKGTH, dkv = gradients
    return [merge_heads(dq_BKGTH), *(x_BKSH.swapaxes(1, 2) for x_BKSH in dkv)]


def _scores(
    q_BKQH: jax.Array, k_BKSH: jax.Array, own: Pair, size: Tiles, request: Request
) -> tuple[jax.Array, jax.Array]:
    """Masked scores, and the scores before the mask."""
    raw = _dot("BKQH,BKSH->BKQS", q_BKQH, k_BKSH)
    if request.soft_cap:
        raw = request.soft_cap * jnp.tanh(raw / request.soft_cap)
    of_q, of_k = own
    distance = of_q.position[:, :, None] - of_k.position[:, None, :]
    masks = [] if size.unmasked else distance_masks(request, distance)
    masks += [
        mine[:, :, None] == theirs[:, None, :]
        for mine, theirs in zip(of_q.same, of_k.same, strict=True)
    ]
    if not masks:
        return raw, raw
    # Q counts the queries once for each of the G heads that share a kv head; they share a mask too.
    seen = jnp.tile(functools.reduce(jnp.logical_and, masks), (1, q_BKQH.shape[2] // size.rows, 1))
    return jnp.where(seen[:, None], raw, MASKED), raw


def _numbers(numbers: Pair, start: jax.Array, first: jax.Array, size: Tiles) -> Pair:
    """The numbers of one tile's queries and keys."""
    of_q, of_k = numbers
    return jax.tree.map(lambda x: _cut(x, start, size.rows, 1), of_q), jax.tree.map(
        lambda x: _cut(x, first, size.keys, 1), of_k
    )


def _if_seen(
    own: Pair, size: Tiles, request: Request, seen: Callable[[], Any], passed: Callable[[], Any]
) -> Any:
    """Run `seen`, or `passed` where all keys lie outside every query's window."""
    # `make_tiles` has left out the hidden tiles of own keys; where keys of other devices lie is
    # known only at run time.
    if not request.window or not size.remote:
        return seen()
    of_q, of_k = (numbers.position[0] for numbers in own)
    gap = jnp.maximum(of_q[0] - of_k[-1], of_k[0] - of_q[-1])
    return jax.lax.cond(gap < request.window, seen, passed)


def _over(tiles: list[Tiles], tile: Callable[..., Any], state: Any) -> Any:
    """Run every tile -> the state after the last one: a while loop for each size that has more than
    a few.

    Not a scan: differentiating a scan over layers hoists what all layers share out of an inner
    scan, and would keep the masks of all tiles in memory.
    """
    for size in tiles:
        if len(size.starts) > MOST_UNROLLED:
            state = _loop(functools.partial(tile, size), size, state)
        else:
            for start, first in zip(size.starts, size.firsts, strict=True):
                state = tile(size, state, start, first)
    return state


def _loop(tile: Callable[..., Any], size: Tiles, state: Any) -> Any:
    starts, firsts = jnp.asarray(size.starts, jnp.int32), jnp.asarray(size.firsts, jnp.int32)

    def next_tile(at: tuple[jax.Array, Any]) -> Any:
        n, state = at
        return n + 1, tile(state, starts[n], firsts[n])

    start = jnp.zeros((), jnp.int32), state
    # fori_loop would become a scan, since its number of turns is known.
    return jax.lax.while_loop(lambda at: at[0] < len(size.starts), next_tile, start)[1]


def _rows(x_BKGTH: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    b, k, g, _, *h = x_BKGTH.shape
    # The G heads of a kv head become rows of one product, since they multiply by the same keys.
    return _cut(x_BKGTH, start, rows, 3).reshape(b, k, g * rows, *h)


def _put_rows(x_BKGTH: jax.Array, start: jax.Array, part: jax.Array) -> jax.Array:
    part = part.reshape(*x_BKGTH.shape[:3], -1, *x_BKGTH.shape[4:])
    return _put(x_BKGTH, part, start, 3)


def _add_keys(x_BKSH: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
    return _put(x_BKSH, _cut(x_BKSH, first, part.shape[2], 2) + part, first, 2)


_attention = differentiable(_forward, _backward)
