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
import numpy as np

from maxstack.kernels.attention import blockwise as blocks
from maxstack.kernels.attention.blockwise import (
    Gathered,
    Grads,
    Keys,
    Numbers,
    Scoring,
    Tiles,
    zeros,
)
from maxstack.kernels.sequences import Axes, whole

Step = Any


def halves(parts: int, device: Step, shift: Step, causal: bool = True) -> list[tuple[Step, Step]]:
    """(chunk of queries, chunk of keys), 0 or 1 each, that `device` computes with the keys of the
    device `shift` != 0 places before it on the ring: the two pairs whose keys are earlier, or all
    four without a causal mask. Numbers or traced numbers."""
    if not causal:
        return [(0, 0), (0, 1), (1, 0), (1, 1)]
    half = ((device - shift) % parts > device) * 1
    return [(1, 0), (half, half)]


def routes(parts: int, chunk: int, window: int | None) -> list[tuple[int, int]]:
    """(direction, steps) of the ways that keys take around the ring: one whole round, or as far as
    a window reaches, both ways."""
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
    same: tuple[jax.Array, ...],
    scoring: Scoring,
    axes: Axes,
) -> jax.Array:
    """What kernels.blockwise_attention gives, of this device's part of sequences that lie in the
    order of `zigzag` over mesh axes `axes`."""
    return _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scoring, axes)[0]


@dataclasses.dataclass(frozen=True)
class Ring:
    """A device's place in the ring, and what it knows of the others' positions."""

    axes: Axes
    parts: int
    device: jax.Array
    chunk: int
    scoring: Scoring
    everyones: tuple[jax.Array, ...]
    """`Numbers.same` of all positions, in the order of the devices."""

    def visited(self, shift: Step) -> list[Tiles]:
        """The device's queries against the keys of the one `shift` places before it: whole chunks,
        or with a causal window as many of their last keys as it sees."""
        chunk, window, causal, found = self.chunk, self.scoring.window, self.scoring.causal, []
        kept, (most_rows, most_keys) = (
            min(chunk, max(1, window - 1)) if window and causal else chunk,
            blocks.sizes(),
        )
        for begin, end, rows in blocks.spans(chunk, most_rows):
            for first, last, keys in blocks.spans(kept, most_keys):
                at, key = (
                    x.reshape(-1)
                    for x in np.meshgrid(
                        np.arange(begin, end, rows), np.arange(first, last, keys), indexing="ij"
                    )
                )
                both = [
                    (at + mine * chunk, key + (theirs + 1) * chunk - kept)
                    for mine, theirs in halves(self.parts, self.device, shift, causal)
                ]
                starts, firsts = (jnp.concatenate(x) for x in zip(*both, strict=True))
                found.append(Tiles(starts, firsts, rows, keys, elsewhere=True))
        return found

    def own(self) -> list[Tiles]:
        """The device's queries against its own keys."""
        return blocks.tiled(2 * self.chunk, 2 * self.chunk, self.scoring, blocks.sizes())

    def numbers(self, shift: Step) -> tuple[Numbers, Numbers]:
        """Of the queries, and of the keys of the device `shift` places before this one."""
        return self._of(self.device), self._of((self.device - shift) % self.parts)

    def _of(self, device: jax.Array) -> Numbers:
        within, size = jnp.arange(self.chunk), 2 * self.chunk
        place = jnp.concatenate(
            [device * self.chunk + within, (2 * self.parts - 1 - device) * self.chunk + within]
        )
        return Numbers(
            place[None],
            tuple(jax.lax.dynamic_slice_in_dim(x, device * size, size, 1) for x in self.everyones),
        )

    def send(self, x: Any, steps: int) -> Any:
        """Every device's `x` to the device `steps` places after it."""
        return jax.lax.ppermute(
            x, self.axes, [(i, (i + steps) % self.parts) for i in range(self.parts)]
        )


def _ring(q_BTNH: jax.Array, same: tuple[jax.Array, ...], scoring: Scoring, axes: Axes) -> Ring:
    return Ring(
        axes,
        jax.lax.axis_size(axes),
        jax.lax.axis_index(axes),
        q_BTNH.shape[1] // 2,
        scoring,
        tuple(whole(x, axes) for x in same),
    )


def _forward(q_BTNH, k_BSKH, v_BSKV, sinks_N, same, scoring, axes):
    ring = _ring(q_BTNH, same, scoring, axes)
    q_BKGTH, here = blocks.by_head(q_BTNH, k_BSKH, v_BSKV)
    own, ways = ring.own(), routes(ring.parts, ring.chunk, scoring.window)
    arriving = [ring.send(here, direction) for direction, _ in ways]
    found = blocks.gather(
        blocks.nothing(q_BKGTH, here, sinks_N), q_BKGTH, here, ring.numbers(0), own, scoring
    )

    def visit(found: Gathered, there: Keys, shift: Step) -> Gathered:
        return blocks.gather(
            found, q_BKGTH, there, ring.numbers(shift), ring.visited(shift), scoring
        )

    for (direction, steps), there in zip(ways, arriving, strict=True):

        def step(state: Any, shift: Step, direction: int = direction) -> tuple[Any, None]:
            found, there = state
            onward = ring.send(there, direction)
            return (visit(found, there, shift), onward), None

        if steps > 1:
            (found, there), _ = jax.lax.scan(step, (found, there), direction * jnp.arange(1, steps))
        found = visit(found, there, direction * steps)
    o_BTNV = blocks.by_time(found[0]).astype(q_BTNH.dtype)
    return o_BTNV, (q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, found[1])


def _backward(scoring, axes, saved, do_BTNV):
    """Gradients of keys and values go around with them, one step behind: no device waits for them
    before its own work."""
    q_BTNH, k_BSKH, v_BSKV, sinks_N, same, o_BTNV, log_BKGT = saved
    ring = _ring(q_BTNH, same, scoring, axes)
    q_BKGTH, here = blocks.by_head(q_BTNH, k_BSKH, v_BSKV)
    asked = blocks.ask(q_BKGTH, o_BTNV, do_BTNV, log_BKGT)
    own, ways = ring.own(), routes(ring.parts, ring.chunk, scoring.window)
    arriving = [ring.send(here, direction) for direction, _ in ways]
    none = zeros(here[0]), zeros(here[1])
    dq, home = blocks.spread((zeros(q_BKGTH), none), asked, here, ring.numbers(0), own, scoring)

    def visit(dq: jax.Array, there: Keys, shift: Step) -> Grads:
        return blocks.spread(
            (dq, none), asked, there, ring.numbers(shift), ring.visited(shift), scoring
        )

    for (direction, steps), there in zip(ways, arriving, strict=True):

        def step(state: Any, shift: Step, direction: int = direction) -> tuple[Any, None]:
            dq, there, grads = state
            onward, grads = ring.send(there, direction), ring.send(grads, direction)
            dq, added = visit(dq, there, shift)
            return (dq, onward, _sum(grads, added)), None

        grads = none
        if steps > 1:
            (dq, there, grads), _ = jax.lax.scan(
                step, (dq, there, grads), direction * jnp.arange(1, steps)
            )
            grads = ring.send(grads, direction)
        dq, added = visit(dq, there, direction * steps)
        home = _sum(home, ring.send(_sum(grads, added), -direction * steps))
    dkv = (blocks.by_time(x[:, :, None]).astype(k_BSKH.dtype) for x in home)
    return blocks.by_time(dq).astype(q_BTNH.dtype), *dkv, blocks.of_sinks(sinks_N, asked), None


def _sum(ours: Keys, theirs: Keys) -> Keys:
    return ours[0] + theirs[0], ours[1] + theirs[1]


ring_attention.defvjp(_forward, _backward)
