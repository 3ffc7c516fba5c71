"""Dispatch of tokens to their experts and back; run by each device on its own tokens, inside
`sharding.per_device` where there is a mesh.

The experts are split over P peers, L on each. A device sorts its tokens' choices by expert, and so
by peer, and sends each peer a window of R rows of that peer's list, by one all-to-all of P x R = S
slots. The receiver sorts the rows that arrived by expert, multiplies, and sends the rows back.
Choices that do not fit follow in smaller windows, so that memory does not depend on where the
tokens go: buffers for the worst case would be P times as large. All devices take as many windows as
the fullest list of any, because a collective that only some enter never ends. The first window is
differentiated as it stands; the further ones run in a loop that the backward pass computes again.
With a capacity, the first window always holds everything.

Shapes: N tokens  C chosen experts of a token  M tokens x chosen  D embed  E experts  P peers  L
experts of a peer  S slots.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxstack import sharding

Run = Callable[[Any, Array, Array], Array]
"""(weights of the experts that are here, rows sorted by expert [S, D], rows of each [L]) -> [S, D];
rows of no expert give zeros."""
FURTHER = 4
"""A window after the first is this many times smaller."""
TILE = 8
FURTHER_SCOPE = "further_windows"
"""Named scope of the operations that a compiled program skips under an even load."""


class Travel(NamedTuple):
    """Sizes of a dispatch, fixed when a program is compiled."""

    experts: int
    axes: tuple[str, ...]
    """Mesh axes that split the experts; empty: this device has all."""
    first: int
    """Rows for each peer in the first window."""
    further: int
    """Rows for each peer in later windows; 0: the first always holds everything."""
    scale_input: bool
    """Router weights multiply an expert's input, not its output."""


class Lists(NamedTuple):
    """The choices of this device's tokens by peer."""

    sorted_M: Array
    """Choices by expert; those of no expert come last."""
    peer_NC: Array
    place_NC: Array
    """Index in the peer's list; -1: of no expert."""
    start_P: Array
    """Start of each peer's list in `sorted_M`."""
    length_P: Array
    coming_PL: Array
    """Number of rows that each peer has for each expert of this device."""


class Slots(NamedTuple):
    """The choice in each slot of a window, and the slot of each choice."""

    choice_S: Array
    filled_S: Array
    slot_NC: Array
    here_NC: Array


def plan_travel(
    experts: int,
    axes: tuple[str, ...],
    tokens: int,
    chosen: int,
    slack: float,
    taken: int | None,
    scale_input: bool,
) -> Travel:
    """`tokens` of a device choose `chosen` experts each; an expert takes `taken` of them at most,
    if that is not None."""
    peers = sharding.size_of(*axes)
    each = experts // peers
    # A token chooses an expert once, so a peer has at most so many of its choices.
    most = tokens * min(chosen, each)
    if taken is not None:
        return Travel(experts, axes, min(most, taken * each), 0, scale_input)
    # An even load is tokens x chosen / peers rows; the first window holds `slack` times as many.
    first = min(most, _tiles(slack * tokens * chosen / peers)) if peers > 1 else most
    return Travel(
        experts, axes, first, 0 if first == most else _tiles(first / FURTHER), scale_input
    )


def _tiles(rows: float) -> int:
    return math.ceil(rows / TILE) * TILE


def mix_experts(
    run: Run, how: Travel, weights: Any, x_ND: Array, weight_NC: Array, expert_NC: Array
) -> tuple[Array, Array]:
    """Send tokens to their experts and sum the results -> (the weighted sum over each token's
    experts, float32 [N, D]; the number of windows, the same on all devices).

    A choice of expert number E is of none.
    """
    lists = _list_by_peer(expert_NC, how)
    window = functools.partial(_window, run, how)
    if not how.further:
        # Everything fits: no loop, and no collective to agree on its turns.
        return window(how.first, 0, weights, x_ND, weight_NC, lists), jnp.ones((), jnp.int32)
    more = jnp.maximum(-(-(lists.length_P.max() - how.first) // how.further), 0)
    # The most of all devices: one that entered a window alone would wait for the others for ever.
    more = jax.lax.pmax(more, tuple(jax.sharding.get_abstract_mesh().manual_axes))
    return _windows(window, how, weights, x_ND, weight_NC, lists, more), 1 + more


# jax cannot reverse a loop whose number of turns is known only when it runs.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _windows(
    window: Callable[..., Array],
    how: Travel,
    weights: Any,
    x_ND: Array,
    weight_NC: Array,
    lists: Lists,
    more: Array,
) -> Array:
    """The first window, and a loop over further ones, which the backward pass computes again."""
    return _forward(window, how, weights, x_ND, weight_NC, lists, more)[0]


def _forward(window, how, weights, x_ND, weight_NC, lists, more):
    operands = weights, x_ND, weight_NC
    # jax keeps what the first window needs; further ones, of which an even load has none, are
    # computed again.
    out_ND, pull = jax.vjp(lambda *operands: window(how.first, 0, *operands, lists), *operands)
    with jax.named_scope(FURTHER_SCOPE):
        out_ND = jax.lax.fori_loop(
            0,
            more,
            lambda i, out_ND: out_ND + window(how.further, _begin(how, i), *operands, lists),
            out_ND,
        )
    return out_ND, (pull, operands, lists, more)


def _backward(window, how, saved, dout_ND):
    pull, operands, lists, more = saved

    def add(i, grads):
        again = jax.vjp(
            lambda *operands: window(how.further, _begin(how, i), *operands, lists), *operands
        )[1]
        return jax.tree.map(jnp.add, grads, again(dout_ND))

    # The gradients add up over windows, since each holds other entries of the lists.
    grads = pull(dout_ND)
    with jax.named_scope(FURTHER_SCOPE):
        grads = jax.lax.fori_loop(0, more, add, grads)
    return *grads, None, None


_windows.defvjp(_forward, _backward)


def _begin(how: Travel, i: Array) -> Array:
    return how.first + i * how.further


def _window(
    run: Run,
    how: Travel,
    rows: int,
    begin: Array | int,
    weights: Any,
    x_ND: Array,
    weight_NC: Array,
    lists: Lists,
) -> Array:
    """Sum of the entries `begin` to `begin + rows` of the lists, float32 [N, D]."""
    slots = _slots(lists, begin, rows)
    x_SD = _fill_slots(x_ND, weight_NC if how.scale_input else None, slots)
    # Where this device has all experts, its one list is sorted by expert already.
    sizes_L, order_S = lists.coming_PL.sum(axis=0), None
    if how.axes:
        expert_S, sizes_L = _arrivals(lists, begin, rows)
        order_S = jnp.argsort(expert_S)
        inverse_S = _inverse(order_S)
        x_SD = _reorder(_exchange(x_SD, how.axes), order_S, inverse_S)
    y_SD = run(weights, x_SD, sizes_L)
    if how.axes:
        y_SD = _exchange(_reorder(y_SD, inverse_S, order_S), how.axes)
    return _combine(y_SD, None if how.scale_input else weight_NC, slots)


def _exchange(x: Array, axes: tuple[str, ...]) -> Array:
    """Send an equal part of the first dimension to each peer, and receive one from each."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True) if axes else x


def _list_by_peer(expert_NC: Array, how: Travel) -> Lists:
    peers = sharding.size_of(*how.axes)
    expert_M = expert_NC.reshape(-1)
    sorted_M = jnp.argsort(expert_M)
    counts_PL = (
        (expert_M[:, None] == jnp.arange(how.experts))
        .sum(axis=0, dtype=jnp.int32)
        .reshape(peers, -1)
    )
    length_P = counts_PL.sum(axis=1)
    start_P = jnp.cumsum(length_P) - length_P
    # Number E stands for no expert: it gets the last peer here, and a place in no window below.
    peer_NC = jnp.minimum(expert_NC // (how.experts // peers), peers - 1)
    # The position of a choice in the sort, less the start of its peer's list.
    place_NC = _inverse(sorted_M).reshape(expert_NC.shape) - start_P[peer_NC]
    place_NC = jnp.where(expert_NC < how.experts, place_NC, -1)
    return Lists(sorted_M, peer_NC, place_NC, start_P, length_P, _exchange(counts_PL, how.axes))


def _inverse(order: Array) -> Array:
    """Inverse of a permutation."""
    return (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )


def _slots(lists: Lists, begin: Array | int, rows: int) -> Slots:
    place_PR = begin + jnp.broadcast_to(jnp.arange(rows), (lists.start_P.size, rows))
    filled_PR = place_PR < lists.length_P[:, None]
    # Free slots read the first choice, and become zeros where they are filled.
    choice_PR = lists.sorted_M[jnp.where(filled_PR, lists.start_P[:, None] + place_PR, 0)]
    here_NC = (lists.place_NC >= begin) & (lists.place_NC < begin + rows)
    slot_NC = jnp.where(here_NC, lists.peer_NC * rows + lists.place_NC - begin, 0)
    return Slots(choice_PR.reshape(-1), filled_PR.reshape(-1), slot_NC, here_NC)


def _arrivals(lists: Lists, begin: Array | int, rows: int) -> tuple[Array, Array]:
    """Experts of this device that the rows coming in a window are for (L: none), and the number of
    rows of each."""
    # Each peer sends its list in the order of experts, so counts tell whose each row is: no numbers
    # of experts travel.
    ends_PL = jnp.cumsum(lists.coming_PL, axis=1)
    # The part of each expert's rows that falls into this window.
    inside_PL = jnp.clip(
        jnp.minimum(ends_PL, begin + rows) - jnp.maximum(ends_PL - lists.coming_PL, begin), 0
    )
    expert_PR = (begin + jnp.arange(rows)[:, None] >= ends_PL[:, None]).sum(axis=-1)
    return expert_PR.reshape(-1), inside_PL.sum(axis=0)


# The two below are each other's gradient, and each is a gather: a scatter is slow, and adds in an
# order that is not fixed.
@jax.custom_vjp
def _fill_slots(x_ND: Array, weight_NC: Array | None, slots: Slots) -> Array:
    """The token of each slot's choice, times its weight if there is one [S, D]; zeros in free
    slots."""
    x_SD = x_ND[slots.choice_S // slots.slot_NC.shape[1]]
    if weight_NC is not None:
        x_SD = x_SD * weight_NC.reshape(-1)[slots.choice_S][:, None]
    return jnp.where(slots.filled_S[:, None], x_SD, 0).astype(x_ND.dtype)


def _spread_forward(x_ND, weight_NC, slots):
    return _fill_slots(x_ND, weight_NC, slots), (x_ND, weight_NC, slots)


def _spread_backward(saved, dx_SD):
    x_ND, weight_NC, slots = saved
    dweight_NC = None if weight_NC is None else _products(x_ND, dx_SD, slots)
    return _combine(dx_SD, weight_NC, slots).astype(x_ND.dtype), dweight_NC, None


@jax.custom_vjp
def _combine(y_SD: Array, weight_NC: Array | None, slots: Slots) -> Array:
    """The sum of the rows of each token's choices, times their weights if there are any, float32
    [N, D]."""
    y_CND = _rows(y_SD, slots)
    return (y_CND if weight_NC is None else y_CND * weight_NC.T[:, :, None]).sum(axis=0)


def _combine_forward(y_SD, weight_NC, slots):
    return _combine(y_SD, weight_NC, slots), (y_SD, weight_NC, slots)


def _combine_backward(saved, dout_ND):
    y_SD, weight_NC, slots = saved
    dweight_NC = None if weight_NC is None else _products(dout_ND, y_SD, slots)
    return _fill_slots(dout_ND.astype(y_SD.dtype), weight_NC, slots), dweight_NC, None


def _rows(y_SD: Array, slots: Slots) -> Array:
    """The row of each choice, zeros where it is not in this window; float32 [C, N, D]: C comes
    first because a TPU pads the last two dimensions."""
    return jnp.where(slots.here_NC.T[:, :, None], y_SD[slots.slot_NC.T], 0).astype(jnp.float32)


def _products(x_ND: Array, y_SD: Array, slots: Slots) -> Array:
    return (x_ND.astype(jnp.float32) * _rows(y_SD, slots)).sum(axis=-1).T


@jax.custom_vjp
def _reorder(x_SD: Array, order_S: Array, inverse_S: Array) -> Array:
    """Rows in the order of a permutation; its gradient is a gather by the inverse, not a
    scatter."""
    return x_SD[order_S]


_fill_slots.defvjp(_spread_forward, _spread_backward)
_combine.defvjp(_combine_forward, _combine_backward)
_reorder.defvjp(
    lambda x_SD, order_S, inverse_S: (x_SD[order_S], inverse_S),
    lambda inverse_S, dy_SD: (dy_SD[inverse_S], None, None),
)
