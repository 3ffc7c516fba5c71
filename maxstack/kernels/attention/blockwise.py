"""Attention a tile at a time, some queries against some keys, in plain XLA: tiles that the mask
hides are skipped, and no score outlives its tile.

The backward pass recomputes the scores from the saved log-sum-exp (FlashAttention, Dao et al. 2022,
arXiv:2205.14135). Shapes: B batch  T query time  S key time  N heads  K kv heads  G heads / kv
heads  H head dim  V value head dim  Q rows of a tile, G x queries.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels.attention.request import Case, Request, Same
from maxstack.kernels.backends import Device, multiplied

MASKED, NOTHING = -1e30, -5e29
"""The score of a key that is not seen, and the log-sum-exp of a query that has seen none: between
the first and every score, so that a query that never sees a key gathers exp(MASKED - NOTHING) = 0
of each."""
SIZES = {"cpu": (256, 256)}
"""Queries and keys of a tile by platform: on a CPU they stay in the cache."""
OTHER_SIZES = (512, 1024)
MANY = 3
"""Beyond as many tiles that need no mask they have a loop of their own."""
OTHERS = (
    (64, 64),
    (128, 128),
    (128, 256),
    (256, 256),
    (256, 512),
    (512, 512),
    (512, 1024),
    (1024, 1024),
)
"""What else is worth measuring."""
_cut, _dot = (
    jax.lax.dynamic_slice_in_dim,
    functools.partial(jnp.einsum, preferred_element_type=jnp.float32),
)


def supports(case: Case) -> str | None:
    """It serves everything on one device."""
    if case.ring and (case.request.offset or case.queries != case.keys):
        return (
            "around a ring of devices it serves self-attention alone; "
            "mesh.context_kind: ulysses would give it whole sequences"
        )
    return None


def candidates(case: Case) -> list[dict[str, int]]:
    """Sizes of a tile, the default first; of those that a short sequence makes equal one alone."""
    span = int(case.shape_class["span"])
    found: dict[tuple[int, int], dict[str, int]] = {}
    for rows, keys in (SIZES.get(case.device.platform, OTHER_SIZES), *OTHERS):
        found.setdefault((min(rows, case.queries), min(keys, span)), {"rows": rows, "keys": keys})
    return list(found.values())


def run(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    request: Request,
    blocks: Mapping[str, int] | None = None,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype, by tiles of at most blocks["rows"] queries
    and blocks["keys"] keys."""
    scoring = Scoring(
        request.scale, request.reach, request.soft_cap, request.causal, request.offset
    )
    return blockwise_attention(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        sinks_N,
        same,
        scoring,
        (blocks["rows"], blocks["keys"]) if blocks else sizes(),
    )


class Scoring(NamedTuple):
    """Scores are q.k * scale, soft-capped. Query i stands at place i + offset among the keys; a
    causal one sees the last `window` places, its own included, another the places less than
    `window` away. None: neither."""

    scale: float
    window: int | None
    soft_cap: float | None
    causal: bool = True
    offset: int = 0


class Numbers(NamedTuple):
    """What tells which queries see which keys, int32 [B or 1, T or S] each."""

    place: jax.Array
    """In the sequence, rising."""
    same: tuple[jax.Array, ...]
    """A query sees keys with equal numbers in each; of the queries or of the keys."""


class Tiles(NamedTuple):
    """Tiles of one size."""

    starts: np.ndarray | jax.Array
    """Where the queries of each begin."""
    firsts: np.ndarray | jax.Array
    """Where its keys begin."""
    rows: int
    keys: int
    elsewhere: bool = False
    """Keys of another chunk of the sequence, all before the queries where the mask is causal; they
    may lie outside every query's window."""
    clear: bool = False
    """Every query sees every key, as far as places go."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blockwise_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    same: Same,
    scoring: Scoring,
    most: tuple[int, int],
) -> jax.Array:
    """`run`, with `most` queries and keys a tile. No score array has more than one tile a head,
    whatever T."""
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scoring, most)[0]


def _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scoring, most):
    q_BKGTH, given = by_head(q_BTNH, k_BSKH, v_BSKV)
    tiles, numbers = (
        tiled(q_BTNH.shape[1], k_BSKH.shape[1], scoring, most),
        _natural(q_BTNH, k_BSKH, same, scoring),
    )
    o_BKGTV, log_BKGT = gather(
        nothing(q_BKGTH, given, sinks_N), q_BKGTH, given, numbers, tiles, scoring
    )
    o_BTNV = by_time(o_BKGTV).astype(q_BTNH.dtype)
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BKGT)


def _backward(scoring, most, saved, do_BTNV):
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BKGT = saved
    q_BKGTH, given = by_head(q_BTNH, k_BSKH, v_BSKV)
    tiles, numbers = (
        tiled(q_BTNH.shape[1], k_BSKH.shape[1], scoring, most),
        _natural(q_BTNH, k_BSKH, same, scoring),
    )
    asked = ask(q_BKGTH, o_BTNV, do_BTNV, log_BKGT)
    dq, dkv = spread(
        (zeros(q_BKGTH), (zeros(given[0]), zeros(given[1]))), asked, given, numbers, tiles, scoring
    )
    return (
        by_time(dq).astype(q_BTNH.dtype),
        *(by_time(x[:, :, None]).astype(k_BSKH.dtype) for x in dkv),
        of_sinks(sinks_N, asked),
        None,
    )


blockwise_attention.defvjp(_forward, _backward)


def _natural(q_BTNH: jax.Array, k_BSKH: jax.Array, same: Same, scoring: Scoring) -> "Pair":
    of_q, of_k = (tuple(pair[side] for pair in same) for side in (0, 1))
    return Numbers(jnp.arange(q_BTNH.shape[1])[None] + scoring.offset, of_q), Numbers(
        jnp.arange(k_BSKH.shape[1])[None], of_k
    )


def sizes() -> tuple[int, int]:
    """Queries and keys of a tile."""
    return SIZES.get(Device.here().platform, OTHER_SIZES)


def spans(t: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, size) of whole tiles along t, and of a remainder."""
    whole = t - t % size
    yield from (
        (begin, end, size)
        for begin, end, size in ((0, whole, size), (whole, t, t - whole))
        if begin < end
    )


def tiled(t: int, s: int, scoring: Scoring, most: tuple[int, int]) -> list[Tiles]:
    """All of t queries against the keys of s that places let them see."""
    most_rows, most_keys = most
    window, offset, ahead = (
        scoring.window,
        scoring.offset,
        0 if scoring.causal else s + t + abs(scoring.offset),
    )
    if window:
        back, ahead = window - 1, min(ahead, window - 1)
        if (
            back + ahead < 4 * most_keys
            # one tile, of as many keys as its queries see: half the rows, so that fewer of them are
            # masked
        ):
            keys_of = {
                span: min(s, span[2] + back + ahead) for span in spans(t, max(1, most_rows // 2))
            }
            return [
                Tiles(at, np.clip(at + offset - back, 0, s - keys), span[2], keys)
                for span, keys in keys_of.items()
                for at in [np.arange(*span)]
            ]
    found = []
    for begin, end, rows in spans(t, most_rows):
        for first, last, keys in spans(s, most_keys):
            start, key = (
                x.reshape(-1)
                for x in np.meshgrid(
                    np.arange(begin, end, rows), np.arange(first, last, keys), indexing="ij"
                )
            )
            place = start + offset
            seen = (key - (place + rows - 1) <= ahead) & (
                (place - (key + keys - 1) < window) if window else True
            )
            clear = seen & (key + keys - 1 - place <= ahead) & (not window)
            split = (
                [(seen & ~clear, False), (clear, True)]
                if clear.sum() > MANY
                else [(seen, bool(seen.any() and clear[seen].all()))]
            )
            found += [
                Tiles(start[these], key[these], rows, keys, clear=whole)
                for these, whole in split
                if these.any()
            ]
    return found


Keys = tuple[jax.Array, jax.Array]
"""Keys [B, K, S, H] and values [B, K, S, V]."""


def by_head(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array) -> tuple[jax.Array, Keys]:
    """[B, K, G, T, H] and keys and values, in the type that products are made in."""
    q_BTNH, k_BSKH, v_BSKV = (x.astype(multiplied(x.dtype)) for x in (q_BTNH, k_BSKH, v_BSKV))
    return _grouped(q_BTNH, k_BSKH.shape[2]), (
        k_BSKH.transpose(0, 2, 1, 3),
        v_BSKV.transpose(0, 2, 1, 3),
    )


def by_time(x_BKGTH: jax.Array) -> jax.Array:
    """[B, T, N, H]."""
    b, k, g, t, h = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


def _grouped(x_BTNH: jax.Array, kv: int) -> jax.Array:
    b, t, n, h = x_BTNH.shape
    return x_BTNH.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)


def zeros(x: jax.Array) -> jax.Array:
    """The gradient of x before the first tile: float32."""
    return jnp.zeros(x.shape, jnp.float32)


Pair = tuple[Numbers, Numbers]
"""Of the queries, and of the keys."""
Gathered = tuple[jax.Array, jax.Array]
"""What queries have gathered from the keys so far [B, K, G, T, V], and the log-sum-exp of their
scores [B, K, G, T], both float32."""


def nothing(q_BKGTH: jax.Array, given: Keys, sinks_N: jax.Array | None) -> Gathered:
    """What queries have gathered before the first key: the sinks give nothing, but take their share
    of the softmax."""
    k, g = q_BKGTH.shape[1:3]
    log = (
        jnp.asarray(NOTHING, jnp.float32)
        if sinks_N is None
        else sinks_N.astype(jnp.float32).reshape(1, k, g, 1)
    )
    return jnp.zeros((*q_BKGTH.shape[:4], given[1].shape[3]), jnp.float32), jnp.broadcast_to(
        log, q_BKGTH.shape[:4]
    )


def gather(
    before: Gathered,
    q_BKGTH: jax.Array,
    given: Keys,
    numbers: Pair,
    tiles: list[Tiles],
    scoring: Scoring,
) -> Gathered:
    """What queries have gathered after the keys of `tiles` too."""
    k_BKSH, v_BKSV = given
    q_BKGTH = q_BKGTH * jnp.asarray(scoring.scale, q_BKGTH.dtype)

    def tile(size: Tiles, state: Gathered, start: jax.Array, first: jax.Array) -> Gathered:
        near = _near(numbers, start, first, size)
        had_BKQV, had_BKQ = (_rows(x, start, size.rows) for x in state)

        def seen() -> Gathered:
            s_BKQS, _ = _scores(
                _rows(q_BKGTH, start, size.rows),
                _cut(k_BKSH, first, size.keys, 2),
                near,
                size,
                scoring,
            )
            top_BKQ = jnp.maximum(s_BKQS.max(axis=-1), had_BKQ)
            p_BKQS, kept_BKQ = jnp.exp(s_BKQS - top_BKQ[..., None]), jnp.exp(had_BKQ - top_BKQ)
            total_BKQ = p_BKQS.sum(axis=-1) + kept_BKQ
            o_BKQV = _dot(
                "BKQS,BKSV->BKQV", p_BKQS.astype(v_BKSV.dtype), _cut(v_BKSV, first, size.keys, 2)
            )
            return (o_BKQV + had_BKQV * kept_BKQ[..., None]) / total_BKQ[
                ..., None
            ], top_BKQ + jnp.log(total_BKQ)

        o_BKQV, log_BKQ = _unless_past(
            scoring.window, near, size, seen, lambda: (had_BKQV, had_BKQ)
        )
        return _put(state[0], start, o_BKQV), _put(state[1], start, log_BKQ)

    return _over(tiles, tile, before)


class Asked(NamedTuple):
    """Queries, the gradient of what they gathered, its product with that summed over V, and the
    log-sum-exp of their scores."""

    q_BKGTH: jax.Array
    do_BKGTV: jax.Array
    mean_BKGT: jax.Array
    log_BKGT: jax.Array


def ask(q_BKGTH: jax.Array, o_BTNV: jax.Array, do_BTNV: jax.Array, log_BKGT: jax.Array) -> Asked:
    """What the backward pass needs to know of the queries."""
    mean_BTN = (do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32)).sum(axis=-1)
    kv = q_BKGTH.shape[1]
    return Asked(
        q_BKGTH,
        _grouped(do_BTNV.astype(q_BKGTH.dtype), kv),
        _grouped(mean_BTN[..., None], kv)[..., 0],
        log_BKGT,
    )


Grads = tuple[jax.Array, Keys]
"""Of queries [B, K, G, T, H], and of keys and values: float32."""


def spread(
    before: Grads, asked: Asked, given: Keys, numbers: Pair, tiles: list[Tiles], scoring: Scoring
) -> Grads:
    """`before` and the gradients of what was gathered in `tiles`."""
    (k_BKSH, v_BKSV), dtype = given, given[0].dtype
    q_BKGTH = asked.q_BKGTH * jnp.asarray(scoring.scale, dtype)

    def tile(size: Tiles, grads: Grads, start: jax.Array, first: jax.Array) -> Grads:
        near = _near(numbers, start, first, size)
        q, do, mean, log = (_rows(x, start, size.rows) for x in (q_BKGTH, *asked[1:]))
        k, v = _cut(k_BKSH, first, size.keys, 2), _cut(v_BKSV, first, size.keys, 2)

        def seen() -> Grads:
            s_BKQS, raw = _scores(q, k, near, size, scoring)
            p_BKQS = jnp.exp(s_BKQS - log[..., None])
            dv = _dot("BKQS,BKQV->BKSV", p_BKQS.astype(dtype), do)
            ds = p_BKQS * (_dot("BKQV,BKSV->BKQS", do, v) - mean[..., None])
            if scoring.soft_cap:
                ds = ds * (1 - jnp.square(raw / scoring.soft_cap))
            ds = ds.astype(dtype)
            return _dot("BKQS,BKSH->BKQH", ds, k) * scoring.scale, (
                _dot("BKQS,BKQH->BKSH", ds, q),
                dv,
            )

        dq, dkv = _unless_past(
            scoring.window, near, size, seen, lambda: (zeros(q), (zeros(k), zeros(v)))
        )
        dq = _put(grads[0], start, dq + _rows(grads[0], start, size.rows))
        return dq, (_add(grads[1][0], first, dkv[0]), _add(grads[1][1], first, dkv[1]))

    return _over(tiles, tile, before)


def of_sinks(sinks_N: jax.Array | None, asked: Asked) -> jax.Array | None:
    """A sink gives nothing, so its gradient is minus its share of the softmax times what the others
    give."""
    if sinks_N is None:
        return None
    share_BKGT = jnp.exp(
        sinks_N.astype(jnp.float32).reshape(1, *asked.log_BKGT.shape[1:3], 1) - asked.log_BKGT
    )
    return -(share_BKGT * asked.mean_BKGT).sum(axis=(0, 3)).reshape(-1).astype(sinks_N.dtype)


def _scores(
    q_BKQH: jax.Array, k_BKSH: jax.Array, near: Pair, size: Tiles, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    """Masked scores, and the scores before the mask."""
    raw = _dot("BKQH,BKSH->BKQS", q_BKQH, k_BKSH)
    if scoring.soft_cap:
        raw = scoring.soft_cap * jnp.tanh(raw / scoring.soft_cap)
    of_q, of_k = near
    distance = of_q.place[:, :, None] - of_k.place[:, None, :]
    masks = [distance >= 0] if scoring.causal and not (size.elsewhere or size.clear) else []
    if scoring.window and not size.clear:
        masks.append((distance if scoring.causal else jnp.abs(distance)) < scoring.window)
    masks += [
        mine[:, :, None] == theirs[:, None, :]
        for mine, theirs in zip(of_q.same, of_k.same, strict=True)
    ]
    if not masks:
        return raw, raw
    seen = functools.reduce(jnp.logical_and, masks)
    return jnp.where(
        jnp.tile(seen, (1, q_BKQH.shape[2] // size.rows, 1))[:, None], raw, MASKED
    ), raw


def _near(numbers: Pair, start: jax.Array, first: jax.Array, size: Tiles) -> Pair:
    """The numbers of one tile's queries and keys."""
    of_q, of_k = numbers
    return jax.tree.map(lambda x: _cut(x, start, size.rows, 1), of_q), jax.tree.map(
        lambda x: _cut(x, first, size.keys, 1), of_k
    )


def _unless_past(
    window: int | None, near: Pair, size: Tiles, seen: Callable[[], Any], passed: Callable[[], Any]
) -> Any:
    """`seen`, or `passed` where the nearest of the keys lies outside every query's window."""
    if not window or not size.elsewhere:
        return seen()
    of_q, of_k = (numbers.place[0] for numbers in near)
    gap = jnp.maximum(of_q[0] - of_k[-1], of_k[0] - of_q[-1])
    return jax.lax.cond(gap < window, seen, passed)


def _over(tiles: list[Tiles], tile: Callable[..., Any], state: Any) -> Any:
    """The state after every tile: a loop for each size.

    No scan: differentiating a scan over layers takes what is the same for all of them out of a scan
    inside, and would keep the masks of all tiles.
    """
    for size in tiles:
        if len(size.starts) == 1:
            state = tile(size, state, size.starts[0], size.firsts[0])
            continue
        starts, firsts = jnp.asarray(size.starts, jnp.int32), jnp.asarray(size.firsts, jnp.int32)

        def next_tile(
            at: tuple[jax.Array, Any],
            size: Tiles = size,
            starts: jax.Array = starts,
            firsts: jax.Array = firsts,
        ) -> Any:
            return at[0] + 1, tile(size, at[1], starts[at[0]], firsts[at[0]])

        _, state = jax.lax.while_loop(
            functools.partial(_before, len(size.starts)),
            next_tile,
            (jnp.zeros((), jnp.int32), state),
        )
    return state


def _before(last: int, at: tuple[jax.Array, Any]) -> jax.Array:
    return at[0] < last


def _rows(x_BKGTH: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    b, k, g, _, *h = x_BKGTH.shape
    return _cut(x_BKGTH, start, rows, 3).reshape(b, k, g * rows, *h)


def _put(x_BKGTH: jax.Array, start: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(
        x_BKGTH, part.reshape(*x_BKGTH.shape[:3], -1, *x_BKGTH.shape[4:]), start, 3
    )


def _add(x_BKSH: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(
        x_BKSH, _cut(x_BKSH, first, part.shape[2], 2) + part, first, 2
    )
