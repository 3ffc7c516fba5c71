"""Ring attention over a sequence that is split over devices (Liu et al. 2023, arXiv:2310.01889).

Queries stay; keys and values go around the ring, and each device adds what its queries read of them
(blockwise.py). Parts in natural order would leave the first devices idle under a causal mask, so a
sequence is cut into 2C chunks for C devices, of which device i holds chunks i and 2C-1-i: each step
then computes two pairs of chunks on every device (Llama 3, arXiv:2407.21783, section 3.3.2).
kernels/sequences.py makes that order once a step. With a window, keys go only as far as it reaches,
in both directions. In the backward pass, gradients of keys and values travel with them, one step
behind, and return home at the end.

All but `chunk_pairs` and `routes` runs on one device's part, inside `sharding.per_device`. Shapes:
B batch  T query time, of one device  S key time, of one device  N heads  K kv heads  G heads / kv
heads  H head dim  V value head dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxstack.kernels.attention import blockwise as blocks
from maxstack.kernels.attention.blockwise import Gradients, Keys, Numbers, Output, Tiles, zeros
from maxstack.kernels.attention.request import Inputs, Request, differentiable
from maxstack.kernels.sequences import Axes, gather_sequences

Call = tuple[Request, Axes]
Step = Any
"""An int, or a traced one."""
_sum = functools.partial(jax.tree.map, jnp.add)


def chunk_pairs(
    parts: int, device: Step, shift: Step, causal: bool = True
) -> list[tuple[Step, Step]]:
    """(chunk of queries, chunk of keys), 0 or 1 each, that `device` computes with the keys of the
    device `shift` != 0 before it on the ring: the two pairs whose keys are earlier, or all four
    without a causal mask."""
    if not causal:
        # Every pair of chunks may have keys that are seen,
        # so all devices have equal work without a choice.
        return [(0, 0), (0, 1), (1, 0), (1, 1)]
    # Keys of a later device: of its chunks, the second is earlier than the queries' second one.
    # An earlier device's first chunk is earlier than both.
    later = jnp.where((device - shift) % parts > device, 1, 0)
    return [(1, 0), (later, later)]


def routes(parts: int, chunk: int, window: int | None) -> list[tuple[int, int]]:
    """(direction, steps) of the routes that keys take around the ring: one whole round, or as far
    as a window reaches in both directions."""
    if window is None:
        return [(1, parts - 1)]
    # The furthest key lies window - 1 positions back, so the
    # first query of a chunk reaches so many chunks back.
    reach = (window - 2) // chunk + 1 if window > 1 else 0
    # Two routes would then send no less than one whole round.
    if 2 * reach >= parts - 1:
        return [(1, parts - 1)] if reach else []
    # In both directions: the chunk before i lies on the device before, but that before 2C-1-i on
    # the device after.
    return [(1, reach), (-1, reach)] if reach else []


def ring_attention(inputs: Inputs, request: Request, axes: Axes) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] for this device's part of sequences that lie in the order
    of `sequences.zigzag` over mesh axes `axes`. `inputs.same`: int32 [B or 1, T] each, the part's
    numbers of documents and chunks."""
    return _attention(inputs, (request, axes))


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

    def own_tiles(self) -> list[Tiles]:
        """Tiles of the device's queries and its own keys."""
        length = 2 * self.chunk
        return blocks.make_tiles(length, length, self.request, blocks.tile_sizes())

    def remote_tiles(self, shift: Step) -> list[Tiles]:
        """Tiles of the device's queries and the keys of the device `shift` before it: whole chunks,
        or with a causal window as many of their last keys as it sees."""
        chunk, causal = self.chunk, self.request.causal
        # Behind a causal mask a chunk's last `window` - 1 keys are all that a later chunk can see.
        window = self.request.window
        width = min(chunk, max(1, window - 1)) if window and causal else chunk
        most_rows, most_keys = blocks.tile_sizes()
        tiles = []
        for rows in blocks.spans(chunk, most_rows):
            for keys in blocks.spans(width, most_keys):
                start, first = blocks.corners(rows, keys)
                pairs = [
                    (start + mine * chunk, first + (theirs + 1) * chunk - width)
                    for mine, theirs in chunk_pairs(self.parts, self.device, shift, causal)
                ]
                starts, firsts = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
                # All keys of these pairs are earlier than
                # the queries, so only a window needs a mask.
                tiles.append(Tiles(starts, firsts, rows[2], keys[2], bool(window), not window))
        return tiles

    def numbers(self, shift: Step) -> blocks.Pair:
        """Numbers of the queries, and of the keys of the device `shift` before this one."""
        return self._of(self.device), self._of((self.device - shift) % self.parts)

    def _of(self, device: jax.Array) -> Numbers:
        # Positions follow from the device's number, so they need not travel.
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

    def circulate(self, visit: Callable[..., Any], state: Any, own: Keys, cargo: Any) -> Any:
        """Send keys around -> (state after the keys of all other devices, this device's cargo with
        what the others added).

        `visit(state, keys, shift)` gives (state, what to add to the cargo of these keys). The cargo
        follows its keys one step behind, so that no device waits for it before its own work.
        """
        # One's own cargo stays at home; what travels begins at zero.
        total, empty = cargo, jax.tree.map(jnp.zeros_like, cargo)
        ways = routes(self.parts, self.chunk, self.request.window)
        arriving = [self.send(own, direction) for direction, _ in ways]
        for (direction, steps), kv in zip(ways, arriving, strict=True):
            added = empty

            def step(carry: Any, shift: Step, direction: int = direction) -> tuple[Any, None]:
                state, kv, cargo = carry
                # Both leave before the visit, so that they travel during its work.
                onward, cargo = self.send(kv, direction), self.send(cargo, direction)
                state, added = visit(state, kv, shift)
                return (state, onward, _sum(cargo, added)), None

            # The last stop is outside of the scan, since its keys go no further.
            if steps > 1:
                shifts = direction * jnp.arange(1, steps)
                (state, kv, added), _ = jax.lax.scan(step, (state, kv, empty), shifts)
                added = self.send(added, direction)
            state, last = visit(state, kv, direction * steps)
            total = _sum(total, self.send(_sum(added, last), -direction * steps))
        return state, total


def _ring(inputs: Inputs, call: Call) -> Ring:
    request, axes = call
    return Ring(
        axes,
        jax.lax.axis_size(axes),
        jax.lax.axis_index(axes),
        inputs.q_BTNH.shape[1] // 2,
        request,
        # Gathered once instead of sent around: they are one integer a position.
        tuple(gather_sequences(x, axes) for x in inputs.same),
    )


def _forward(inputs: Inputs, call: Call) -> Output:
    ring = _ring(inputs, call)
    q_BKGTH, own = blocks.group_heads(inputs)

    def visit(output: Output, kv: Keys, shift: Step) -> tuple[Output, tuple[()]]:
        numbers, tiles = ring.numbers(shift), ring.remote_tiles(shift)
        return blocks.attend(output, q_BKGTH, kv, numbers, tiles, ring.request), ()

    before = blocks.initial(q_BKGTH, own, inputs.sinks_N)
    output = blocks.attend(before, q_BKGTH, own, ring.numbers(0), ring.own_tiles(), ring.request)
    output, _ = ring.circulate(visit, output, own, ())
    return blocks.as_output(output, inputs)


def _backward(
    call: Call, inputs: Inputs, log_BNT: jax.Array, mean_BNT: jax.Array, do_BTNV: jax.Array
) -> list[jax.Array]:
    ring = _ring(inputs, call)
    q_BKGTH, own = blocks.group_heads(inputs)
    queries = blocks.backward_queries(q_BKGTH, do_BTNV, mean_BNT, log_BNT)
    none = jax.tree.map(zeros, own)

    def visit(dq: jax.Array, kv: Keys, shift: Step) -> Gradients:
        return blocks.add_gradients(
            # The gradients of these keys start at zero here; `circulate` adds them to those of
            # other devices.
            (dq, none),
            queries,
            kv,
            ring.numbers(shift),
            ring.remote_tiles(shift),
            ring.request,
        )

    dq, of_own = blocks.add_gradients(
        (zeros(q_BKGTH), none), queries, own, ring.numbers(0), ring.own_tiles(), ring.request
    )
    return blocks.as_arguments(ring.circulate(visit, dq, own, of_own))


_attention = differentiable(_forward, _backward)
