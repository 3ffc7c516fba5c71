"""Parts that the Hopper kernels share: the call, the tiles that it visits, the ring of buffers
between the warpgroup that loads and those that compute.

A block of threads is three warpgroups: two compute, the third starts the copies of the tensor
memory accelerator. In interpreted kernels plain arithmetic replaces operations that jax's
interpreter does not know: matrix products with an operand in registers, loads into a layout, and
layouts. Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim, the value head
dim too.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxstack.kernels.attention.request import Request, distance_masks
from maxstack.kernels.backends import size_of

ROWS = 64
"""Rows of a warpgroup's tile, those of one wgmma."""
COMPUTE = 2
"""Warpgroups that compute."""
BLOCK = ROWS * COMPUTE
LOG2E = float(np.log2(np.e))
Refs = Sequence[Any]
Index = Any
"""An int, or a traced one."""
TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]  # newer jax types a protocol as abstract
WGMMA = plgpu.Layout.WGMMA
OF_ROWS, OF_COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)


class Bounds(NamedTuple):
    """Tiles from `first` to before `last` are visited; those from `whole` to before `broken` need
    no mask."""

    first: Index
    whole: Index
    broken: Index
    last: Index


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, padded to whole blocks."""

    batch: int
    queries: int
    keys: int
    real_keys: int
    """Keys from here on are padding."""
    heads: int
    kv_heads: int
    dim: int
    dtype: Any
    request: Request
    numbered: int
    forward_keys: int
    """Keys of a forward step."""
    stages: int
    """Steps that are loaded ahead."""
    interpret: Any = None

    @property
    def groups(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    def keys_of(self, start: Index, rows: int, block: int) -> Bounds:
        """The key tiles that queries start..start + rows - 1 visit."""
        request = self.request
        limits = request.min_distance, request.max_distance
        return _bounds(start + request.offset, rows, *limits, self.real_keys, block)

    def queries_of(self, start: Index, rows: int, block: int) -> Bounds:
        """The query tiles that visit keys start..start + rows - 1."""
        request = self.request
        # Seen from a key, distances change their sign, and so the limits their places.
        low, high = (
            None if limit is None else -limit
            for limit in (request.max_distance, request.min_distance)
        )
        first = start - request.offset
        lo, whole, cut, end = _bounds(first, rows, low, high, self.queries, block)
        # A tile that holds padded keys needs a mask for every query.
        if self.real_keys < self.keys:
            whole = jnp.where(start + rows > self.real_keys, end, whole)
        return _ordered(lo, whole, cut, end)

    @property
    def bounded(self) -> bool:
        """Some tile needs a mask for its positions."""
        request = self.request
        return request.causal or bool(request.window) or self.real_keys < self.keys

    def hide(
        self,
        s: jax.Array,
        masked: bool,
        query: Index,
        key: Index,
        own: Sequence[jax.Array],
        others: Sequence[jax.Array],
        keys_are_rows: bool = False,
    ) -> jax.Array:
        """Scores with -inf where a query does not see a key. `query`, `key`: indices of the tile's
        first ones, compared if `masked`; `own`, `others`: numbers of its rows and columns."""
        # Positions are compared in tiles on the edge alone; numbers of documents in every tile.
        if masked:
            rows, columns = (
                plgpu.broadcasted_iota(
                    jnp.int32, s.shape, axis, layout=None if self.interpret else WGMMA
                )
                for axis in (0, 1)
            )
            queries, keys = (columns, rows) if keys_are_rows else (rows, columns)
            masks = distance_masks(
                self.request, queries - keys + (query + self.request.offset - key)
            )
            if self.real_keys < self.keys:
                masks.append(keys < self.real_keys - key)
            s = jnp.where(functools.reduce(jnp.logical_and, masks), s, -jnp.inf)
        # Documents may begin anywhere, so no tile is known to be free of them.
        for row, column in zip(own, others, strict=True):
            equal = lax.broadcast_in_dim(row, s.shape, [0]) == lax.broadcast_in_dim(
                column, s.shape, [1]
            )
            s = jnp.where(equal, s, -jnp.inf)
        return s

    def scores(self, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """q.k -> (scores times log2 e, slope of the soft cap)."""
        scale, cap = self.request.scale, self.request.soft_cap
        if cap is None:
            # log2 e is part of the scale, so that the softmax takes exp2.
            return s * (scale * LOG2E), None
        # tanh by the same exp2.
        t = 1 - 2 / (1 + jnp.exp2(s * (2 * LOG2E * scale / cap)))
        return t * (cap * LOG2E), 1 - t * t

    def product(
        self, a: Any, b: Any, transpose: bool = False, onto: jax.Array | None = None
    ) -> jax.Array:
        """a b (or a b^T) -> float32 in registers. `b` lies in shared memory, `a` there or in
        registers."""
        if self.interpret:
            a, b = a if isinstance(a, jax.Array) else a[...], b[...].T if transpose else b[...]
            plgpu.commit_smem()  # what reads here is not what reads on a device
            return jnp.dot(a, b, preferred_element_type=jnp.float32) + (0 if onto is None else onto)
        b = b.transpose((1, 0)) if transpose else b
        if onto is not None:
            return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(
                plgpu.ACC.init(onto)
            )

        # The sum begins in the tensor cores' accumulator, which starts at zero.
        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, a, b)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """A constant in registers: rows, or a tile."""
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, WGMMA if len(shape) == 2 else OF_ROWS)

    def load(self, ref: Any, layout: Any, device_memory: bool = False) -> jax.Array:
        """A vector for the rows or the columns of tiles."""
        if self.interpret:
            return ref[...]
        # Versions of jax differ in whether `load` takes an index.
        index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
        return plgpu.load(ref, *index, layout=layout, optimized=not device_memory)

    def columns(self, refs: Refs) -> list[jax.Array]:
        """Vectors in shared memory for the columns of tiles, read so that the next copy may
        overwrite them."""
        read = [self.load(ref, OF_COLUMNS) for ref in refs]
        if read:
            plgpu.commit_smem()
        return read


def _bounds(
    first: Index, rows: int, low: int | None, high: int | None, columns: int, block: int
) -> Bounds:
    """Row r sees column c where low <= r - c <= high; None: no limit."""
    last = first + rows - 1
    lo: Index = 0
    whole: Index = 0
    cut: Index = columns // block
    end: Index = -(-columns // block)
    if low is not None:
        # The last column that every row sees, and the last that any does.
        cut = jnp.minimum(cut, _over(first - low + 1, block))
        end = jnp.minimum(end, _over(last - low + block, block))
    if high is not None:
        # The first column that any row sees, and the first that every row does.
        lo, whole = _over(first - high, block), _over(last - high + block - 1, block)
    return _ordered(lo, whole, cut, end)


def _ordered(first: Index, whole: Index, broken: Index, last: Index) -> Bounds:
    """Bounds in rising order: each is at least the one before it."""
    # Limits may cross, as for queries before every key: the loops between them then run no turn.
    last = jnp.maximum(first, last)
    whole = jnp.minimum(jnp.maximum(whole, first), last)
    return Bounds(first, whole, jnp.minimum(jnp.maximum(broken, whole), last), last)


def _over(x: Index, block: int) -> Index:
    """x // block, and 0 for negative x."""
    # lax.div rounds towards zero; // differs from it for negative x.
    return lax.div(jnp.maximum(x, 0), jnp.int32(block))


class Ring:
    """Buffers of one or several arrays in shared memory, used in turn: `full` when the copies have
    arrived, `free` when every reader is done."""

    def __init__(self, scratch: Any, stages: int):
        self.buffers, (self.full, self.free) = scratch
        self.stages = stages

    @staticmethod
    def scratch(stages: int, *shapes: Any) -> Any:
        """Shared memory and barriers of a ring of arrays of each (shape, dtype)."""
        # Each copy arrives once at `full`, each computing warpgroup once at `free`.
        full = plgpu.Barrier(num_arrivals=len(shapes), num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages)
        return buffers(stages, *shapes), (full, free)

    def fill(self, step: Index, sources: Refs) -> None:
        """Start the copies of a step, once its slot is free."""
        slot = lax.rem(step, jnp.int32(self.stages))

        # In the first round the slots are empty, and no reader would arrive.
        @pl.when(step >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.full.at[slot])

    def take(self, step: Index) -> tuple[Refs, Callable[[], None]]:
        """Wait for the arrays of a step -> (the arrays, a function to call when this warpgroup is
        done with them)."""
        slot = lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.full.at[slot])
        return [buffer.at[slot] for buffer in self.buffers], lambda: plgpu.barrier_arrive(
            self.free.at[slot]
        )

    def drain(self, steps: Index) -> None:
        """Wait until the last of all `steps` steps are read."""

        def wait(step: Index, _: None) -> None:
            plgpu.barrier_wait(self.free.at[lax.rem(step, jnp.int32(self.stages))])

        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)


def load_keys(
    call: Call, keys: Ring, values: Ring, sources: Any, tiles: Bounds, block: int
) -> None:
    """The loop of the loading warpgroup: copies `sources` (keys, values and the keys' numbers in
    device memory) into the rings, tile by tile."""
    # Starting copies needs few registers; the computing warpgroups get the others.
    plgpu.set_max_registers(40, action="decrease")
    k, v, theirs = sources
    lo, _, _, end = tiles
    row, kv_head = lax.axis_index("batch"), lax.div(lax.axis_index("head"), jnp.int32(call.groups))

    def load(tile: Any, _: None) -> None:
        there = pl.ds(tile * block, block)
        keys.fill(tile - lo, [k.at[row, there, kv_head], *(x.at[row, there] for x in theirs)])
        values.fill(tile - lo, [v.at[row, there, kv_head]])

    lax.fori_loop(lo, end, load, None)
    keys.drain(end - lo)
    values.drain(end - lo)


def walk(
    call: Call, own: Bounds, block: Bounds, visit: Callable[[bool, Index, Any], Any], carry: Any
) -> Any:
    """Run `visit(masked, tile, carry)` over the tiles of the `block` of threads, with masks only
    where the warpgroup's `own` rows need one."""
    # Both warpgroups visit all tiles of the block, also those that their own rows do not see: a
    # slot is free only when both have arrived.
    lo, _, _, end = block
    # Tiles outside of these bounds need masks: the own rows see them in part or not at all.
    whole, cut = (jnp.clip(bound, lo, end) for bound in own[1:3])
    if not call.bounded:
        return lax.fori_loop(lo, end, functools.partial(visit, False), carry)
    carry = lax.fori_loop(lo, whole, functools.partial(visit, True), carry)
    carry = lax.fori_loop(whole, cut, functools.partial(visit, False), carry)
    return lax.fori_loop(cut, end, functools.partial(visit, True), carry)


def own_tiles(*shapes: tuple[tuple[int, ...], Any]) -> Any:
    """Shared memory of each computing warpgroup for arrays of each (shape, dtype), and barriers."""
    arrived = plgpu.Barrier(num_arrivals=len(shapes), num_barriers=COMPUTE)
    return buffers(COMPUTE, *shapes), arrived


def fetch(call: Call, scratch: Any, warpgroup: Any, sources: Refs, numbers: Refs) -> Any:
    """Copy `sources` into this warpgroup's own tiles -> (the tiles, vectors of `numbers` for their
    rows)."""
    shared, arrived = scratch
    tiles, here = [x.at[warpgroup] for x in shared], arrived.at[warpgroup]
    for source, tile in zip(sources, tiles, strict=True):
        plgpu.copy_gmem_to_smem(source, tile, here)
    # Loaded while the copies are under way.
    own = [call.load(x, OF_ROWS, device_memory=True) for x in numbers]
    plgpu.barrier_wait(here)
    return tiles, own


def store(*tiles: tuple[Any, Any]) -> None:
    """Copies each (tile, its part of device memory), and waits."""
    # The copy reads asynchronously, and must see what the registers have written.
    plgpu.commit_smem()
    for tile, target in tiles:
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0)


def buffers(count: int, *shapes: tuple[tuple[int, ...], Any]) -> list[Any]:
    """Shared memory for `count` arrays of each (shape, type): matrices in the layout of wgmma."""
    return [
        # Vectors are no operands of wgmma, so they lie as they are.
        plgpu.SMEM((count, *shape), dtype, transforms=TILED if len(shape) == 2 else ())
        for shape, dtype in shapes
    ]


def launch(
    call: Call,
    name: str,
    body: Callable[[Call, Refs, Any], None],
    operands: Sequence[jax.Array],
    out: Any,
    tiles: tuple[int, int],
    scratch: Any,
    products: int,
) -> Any:
    """Runs `body` for every (head, tile, row of the batch). `tiles`: numbers of heads and tiles;
    `out`: arrays like the results; `products`: matrix products of a tile. Newer jax takes a cost
    estimate too, here of tiles that no mask leaves out."""
    # Older versions of jax refuse the argument.
    more: dict[str, Any] = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        more["cost_estimate"] = pl.CostEstimate(
            flops=2 * products * call.batch * call.heads * call.queries * call.keys * call.dim,
            bytes_accessed=size_of(*operands, *out),
            transcendentals=0,
        )

    def kernel(*refs: Any) -> None:
        body(call, refs[:-1], refs[-1])

    run = plgpu.kernel(
        kernel,
        kernel_name=name,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        scratch_types=[scratch],
        grid=(*tiles, call.batch),
        grid_names=("head", "tile", "batch"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=call.interpret,
        **more,
    )
    return run(*operands)


def axes() -> Any:
    """Indices of a program along head, batch and warpgroup."""
    return [lax.axis_index(name) for name in ("head", "batch", "warpgroup")]
