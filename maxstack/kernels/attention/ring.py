"""Attention over a sequence that is split over devices: keys and values go around, queries stay
(Liu et al. 2023, arXiv:2310.01889).

Sequences lie in the order of kernels/sequences.py, so that every device has the same work at every
step (after Llama 3, arXiv:2407.21783, section 3.3.2). All but `halves` and `routes` runs on one
device's part, inside `sharding.per_device`. Shapes: B batch  T query time, of one device  S key
time, of one device  N heads  K kv heads  G heads / kv heads  H head dim  V value head dim.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.attention import blockwise as blocks
from maxstack.kernels.attention.blockwise import Gradients, Keys, Numbers, Output, Tiles, zeros
from maxstack.kernels.attention.request import Request
from maxstack.kernels.sequences import Axes, whole

Step = Any
"""An int, or a traced one."""
_sum = functools.partial(jax.tree.map, jnp.add)


def halves(parts: int, device: Step, shift: Step, causal: bool = True) -> list[tuple[Step, Step]]:
    """(chunk of queries, chunk of keys), 0 or 1 each, that `device` computes with the keys of the
    device `shift` != 0 before it on the ring: the two pairs whose keys are earlier, or all four
    without a causal mask."""
    if not causal:
        return [(0, 0), (0, 1), (1, 0), (1, 1)]
    half = ((device - shift) % parts > device) * 1
    return [(1, 0), (half, half)]


def routes(parts: int, chunk: int, window: int | None) -> list[tuple[int, int]]:
    """(direction, steps) of the routes that keys take around the ring: one whole round, or as far
    as a window reaches in both directions."""
    reach = 2 * parts if window is None else 0 if window < 2 else (window - 2) // chunk + 1
    if 2 * reach >= parts - 1:
        return [(1, parts - 1)] if reach else []
    return [(1, reach), (-1, reach)] if reach else []


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def ring_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    numbers: tuple[jax.Array, ...],
    request: Request,
    axes: Axes,
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] for this device's part of sequences that lie in the order
    of `sequences.zigzag` over mesh axes `axes`. `numbers`: int32 [B or 1, T], the part's numbers of
    documents and chunks."""
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, numbers, request, axes)[0]


@dataclasses.dataclass(frozen=True)
class Ring:
    """A device's place in the ring, and the numbers of all devices."""

    axes: Axes
    parts: int
    device: jax.Array
    chunk: int
    request: Request
    everyones: tuple[jax.Array, ...]
    """`Numbers.same` of all positions, in the order of the devices."""

    @property
    def routes(self) -> list[tuple[int, int]]:
        """(direction, steps)."""
        return routes(self.parts, self.chunk, self.request.window)

    def own(self) -> list[Tiles]:
        """The device's queries against its own keys."""
        return blocks.tiled(2 * self.chunk, 2 * self.chunk, self.request, blocks.tile_sizes())

    def visited(self, shift: Step) -> list[Tiles]:
        """The device's queries against the keys of the device `shift` before it: whole chunks, or
        with a causal window as many of their last keys as it sees."""
        chunk, window, causal = self.chunk, self.request.window, self.request.causal
        width = min(chunk, max(1, window - 1)) if window and causal else chunk
        most_rows, most_keys = blocks.tile_sizes()
        tiles = []
        for rows in blocks.spans(chunk, most_rows):
            for keys in blocks.spans(width, most_keys):
                start, first = blocks.corners(rows, keys)
                pairs = [
                    (start + mine * chunk, first + (theirs + 1) * chunk - width)
                    for mine, theirs in halves(self.parts, self.device, shift, causal)
                ]
                starts, firsts = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
                tiles.append(Tiles(starts, firsts, rows[2], keys[2], bool(window), not window))
        return tiles

    def numbers(self, shift: Step) -> blocks.Pair:
        """Numbers of the queries, and of the keys of the device `shift` before this one."""
        return self._of(self.device), self._of((self.device - shift) % self.parts)

    def _of(self, device: jax.Array) -> Numbers:
        within, size = jnp.arange(self.chunk), 2 * self.chunk
        position = jnp.concatenate(
            [device * self.chunk + within, (2 * self.parts - 1 - device) * self.chunk + within]
        )
        return Numbers(
            position[None],
            tuple(jax.lax.dynamic_slice_in_dim(x, device * size, size, 1) for x in self.everyones),
        )

    def send(self, x: Any, steps: int) -> Any:
        """Every device's `x` to the device `steps` after it."""
        return jax.lax.ppermute(
            x, self.axes, [(i, (i + steps) % self.parts) for i in range(self.parts)]
        )


def _ring(q_BTNH: jax.Array, numbers: tuple[jax.Array, ...], request: Request, axes: Axes) -> Ring:
    return Ring(
        axes,
        jax.lax.axis_size(axes),
        jax.lax.axis_index(axes),
        q_BTNH.shape[1] // 2,
        request,
        tuple(whole(x, axes) for x in numbers),
    )


def _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, numbers, request, axes):
    ring = _ring(q_BTNH, numbers, request, axes)
    q_BKGTH, own = blocks.by_head(q_BTNH, k_BSKH, v_BSKV)
    arriving = [ring.send(own, direction) for direction, _ in ring.routes]
    before = blocks.initial(q_BKGTH, own, sinks_N)
    output = blocks.attend(before, q_BKGTH, own, ring.numbers(0), ring.own(), request)

    def visit(output: Output, kv: Keys, shift: Step) -> Output:
        return blocks.attend(output, q_BKGTH, kv, ring.numbers(shift), ring.visited(shift), request)

    for (direction, steps), kv in zip(ring.routes, arriving, strict=True):

        def step(state: Any, shift: Step, direction: int = direction) -> tuple[Any, None]:
            output, kv = state
            onward = ring.send(kv, direction)
            return (visit(output, kv, shift), onward), None

        if steps > 1:
            (output, kv), _ = jax.lax.scan(step, (output, kv), direction * jnp.arange(1, steps))
        output = visit(output, kv, direction * steps)
    o_BTNV = blocks.by_time(output[0]).astype(q_BTNH.dtype)
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, numbers, o_BTNV, output[1])


def _backward(request, axes, saved, do_BTNV):
    """Gradients of keys and values go around with them, one step behind: no device waits for them
    before its own work."""
    q_BTNH, k_BSKH, v_BSKV, sinks_N, numbers, o_BTNV, log_BKGT = saved
    ring = _ring(q_BTNH, numbers, request, axes)
    q_BKGTH, own = blocks.by_head(q_BTNH, k_BSKH, v_BSKV)
    queries = blocks.with_gradient(q_BKGTH, o_BTNV, do_BTNV, log_BKGT)
    arriving = [ring.send(own, direction) for direction, _ in ring.routes]
    none = zeros(own[0]), zeros(own[1])
    dq, own_gradients = blocks.add_gradients(
        (zeros(q_BKGTH), none), queries, own, ring.numbers(0), ring.own(), request
    )

    def visit(dq: jax.Array, kv: Keys, shift: Step) -> Gradients:
        return blocks.add_gradients(
            (dq, none), queries, kv, ring.numbers(shift), ring.visited(shift), request
        )

    for (direction, steps), kv in zip(ring.routes, arriving, strict=True):

        def step(state: Any, shift: Step, direction: int = direction) -> tuple[Any, None]:
            dq, kv, dkv = state
            onward, dkv = ring.send(kv, direction), ring.send(dkv, direction)
            dq, added = visit(dq, kv, shift)
            return (dq, onward, _sum(dkv, added)), None

        dkv = none
        if steps > 1:
            (dq, kv, dkv), _ = jax.lax.scan(step, (dq, kv, dkv), direction * jnp.arange(1, steps))
            dkv = ring.send(dkv, direction)
        dq, added = visit(dq, kv, direction * steps)
        own_gradients = _sum(own_gradients, ring.send(_sum(dkv, added), -direction * steps))
    return blocks.as_arguments((dq, own_gradients), queries, q_BTNH, k_BSKH, sinks_N)


ring_attention.defvjp(_forward, _backward)
