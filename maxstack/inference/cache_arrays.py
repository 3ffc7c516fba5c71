"""Arrays of the KV cache on the devices: pages of each layer, and states of requests.

A cache that grows has arrays of fewer pages than the scheduler may give out. The host makes them
larger when a step needs a page that does not exist yet (`Runner.hold`): a page takes memory once
some request has needed it, not from the start. Shapes: see runner.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import layout as jax_layout
from jax.sharding import NamedSharding

from maxstack.inference.layer_programs import shape
from maxstack.inference.layout import Layout
from maxstack.kernels.paged_attention import BITS
from maxstack.schema.parts import Cached
from maxstack.sharding import spec

if TYPE_CHECKING:
    from maxstack.inference.runner import Runner
    from maxstack.run import Run

Arrays = dict[str, jax.Array]


class CacheArrays:
    """Makes and enlarges the arrays of a runner's cache."""

    def __init__(
        self,
        runner: "Runner",
        dtype: str,
        shardings: list[dict[str, Any]],
        options: dict[str, Any],
    ):
        """`dtype`: that of activations; `shardings` by layer and name; `options` of the
        compiler."""
        self._runner = runner
        self._layout = runner.layout
        self._dtype = dtype
        self._shardings = shardings
        self._options = options
        # In its shards from the start: the whole cache may not fit on one device.
        self._make = jax.jit(
            lambda held: self.empty(),
            static_argnums=0,
            out_shardings=shardings,
            compiler_options=options,
        )

    def make(self) -> list[Arrays]:
        """Return the cache before the first step."""
        made: list[Arrays] = self._make(self._runner.held)
        return made

    def empty(self) -> list[Arrays]:
        """Return the same as a function."""
        runner, cache = self._runner, []
        for i, arrays in enumerate(self._layout.arrays):
            own = {}
            for name, array in arrays.items():
                leading: tuple[int, ...] = (runner.replicas * runner.slots,)
                if not array.per_request:
                    pages = runner.replica_pages(runner.held[self._layout.groups[i]])
                    leading = runner.replicas * pages, runner.limits.page
                sizes = [dim.size for dim in array.dims]
                own[name] = jnp.zeros((*leading, *sizes), self._kept_dtype(array))
            cache.append(own)
        return cache

    def shapes(self, cache: list[Arrays], held: Sequence[int]) -> list[dict[str, Any]]:
        """Return the shapes of a cache with `held` pages by group, and else as this one."""
        runner, shapes = self._runner, []
        for i, arrays in enumerate(cache):
            own = {}
            for name, array in arrays.items():
                kept = shape(array)
                if not self._layout.arrays[i][name].per_request:
                    pages = runner.replicas * runner.replica_pages(held[self._layout.groups[i]])
                    kept = kept.update(shape=(pages, *kept.shape[1:]))
                own[name] = kept
            shapes.append(own)
        return shapes

    def grow(self, cache: list[Arrays], before: tuple[int, ...]) -> list[Arrays]:
        """Return a cache that had `before` pages by group with `runner.held` pages."""
        runner, layout = self._runner, self._layout
        grown = []
        for i, arrays in enumerate(cache):
            group = layout.groups[i]
            pages = runner.replica_pages(runner.held[group])
            own = dict(arrays)
            for name, array in arrays.items():
                if layout.arrays[i][name].per_request or array.shape[0] == runner.replicas * pages:
                    continue
                larger = jax.jit(
                    _enlarged,
                    static_argnums=(1, 2, 3),
                    out_shardings=self._shardings[i][name],
                    compiler_options=self._options,
                )
                own[name] = larger(array, runner.replicas, 1 + before[group], pages)
                # At once, so that the old cache and the new one are never held together.
                jax.block_until_ready(own[name])
                array.delete()
            grown.append(own)
        return grown

    def _kept_dtype(self, array: Cached) -> str:
        dtype = array.dtype or self._dtype
        on_cpu = self._layout.platform == "cpu"
        # A cache of 8,193 pages of bfloat16 took 164 ms a layer and step of 4 rows, its bits as
        # uint16 2 ms.
        return BITS.get(dtype, dtype) if on_cpu and not array.per_request else dtype


def _enlarged(array: jax.Array, replicas: int, kept: int, pages: int) -> jax.Array:
    """Return an array with `pages` pages of each replica, the first `kept` of them as before."""
    apart = array.reshape(replicas, -1, *array.shape[1:])[:, :kept]
    # Zeros, not what lies in memory: a masked value is multiplied by 0, which leaves a NaN.
    filled = jnp.pad(apart, [(0, 0), (0, pages - kept), *[(0, 0)] * (array.ndim - 1)])
    return jax.lax.collapse(filled, 0, 2)


def cache_shardings(run: "Run", layout: Layout) -> list[dict[str, Any]]:
    """Return the shardings and layouts of the arrays of the cache."""
    rules = run.cfg.mesh.rules

    def placement(array: Cached) -> Any:
        # The first dimension holds the pages of all replicas in order, so those of a replica lie on
        # its own devices.
        axes = ["batch"] if array.per_request else ["batch", ""]
        axes += [dim.axis for dim in array.dims]
        sharding = NamedSharding(run.mesh, spec(axes, rules))
        order = layout.page_order(array)
        # The layout is asked for at the edge of every program; else XLA copies the cache into its
        # own.
        return jax_layout.Format(jax_layout.Layout(order), sharding) if order else sharding

    shardings = []
    for arrays in layout.arrays:
        shardings.append({name: placement(array) for name, array in arrays.items()})
    return shardings
