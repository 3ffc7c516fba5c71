"""Steps of inference as the host prepares them, for the programs of a run or of a package.

`batch` lays the chunks of a step out as rows: each replica has an equal share of them, in which the
rows of a chunk are adjacent and unused rows come last. Beside the rows go the page tables, one line
for each slot. `copy` moves recurrent states and pages inside the cache between steps.
Shapes: R rows of all replicas  O outputs  S slots  W pages of a request at most  D embed  V vocab.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from maxstack.inference.layout import Layout
from maxstack.inference.multi_step import Bounds, Made, Rules
from maxstack.inference.page_cache import Limits, PageCopy, StateCopy
from maxstack.layers.cache import Rows

if TYPE_CHECKING:
    from maxstack.hf.layer_reader import Kept

OUTPUTS = 128
"""Rows whose logits are computed at a time."""

COPIES = 64
"""Pages that are copied at a time."""


def step_sizes(limits: Limits) -> tuple[int, ...]:
    """Return the numbers of rows that steps may have: the most, and shares of it. A few requests
    need few rows, which cost less on a CPU; each number is another program to compile."""
    return tuple(sorted({max(1, limits.rows // share) for share in (128, 64, 32, 16, 4, 1)}))


class Batch(NamedTuple):
    """Rows of a step."""

    rows: Rows
    tables: tuple[Any, ...]
    """By group: int32 [S, W]."""


class ChunkTokens(NamedTuple):
    """Tokens of a chunk, with where they are written."""

    replica: int
    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[Sequence[int]]
    """By group."""
    adapter: int = 0


class Runner:
    """Computes the steps of an engine, and holds the cache that they read and replace."""

    adapters = 0
    """Number of adapters."""
    has_multi_step = True
    """True where `multi_step` can compute several steps at once."""
    cache: Any = None

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        max_length: int,
        replicas: int = 1,
        shardings: Any = None,
        options: dict[str, Any] | None = None,
        spare: int = 0,
    ):
        """`shardings` of the cache, `options` of its compiler. `spare`: pages beside those of
        requests on which sizes of steps are tried, as are two slots; 0: none, so they can be tried
        on an empty cache alone."""
        self.layout = layout
        self.spare = spare
        self.limits = limits
        self.replicas = replicas
        # Pages of the longest request: the columns of every page table.
        self.width = -(-max_length // limits.page)
        self.sizes = step_sizes(limits)
        self.held = limits.pages
        """Pages of each group that the cache has arrays for; `limits.pages` at most."""
        self._max_length = max_length
        self._copy = jax.jit(
            self._copy_states,
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=options,
        )
        self._copy_pages = jax.jit(
            self._copy_over,
            static_argnums=3,
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=options,
        )

    def load(self, params: Any, keep: bool = False) -> None:
        """Replace the weights."""
        raise NotImplementedError

    def kept(self) -> "dict[str, Kept] | None":
        """Return how each weight of a folder is kept, for `load_prepared`; None where weights can
        only be made of those of a run."""
        return None

    def load_prepared(self, weights: Mapping[str, Any]) -> None:
        """Take weights by path, as `kept` describes them, for the first time."""
        raise NotImplementedError

    def compile(self, sizes: Sequence[int], outputs: Collection[int]) -> Any:
        """Compile the programs of steps of these sizes, and the head for so many outputs, before
        there are weights -> the shape of the logits of fewest outputs; None where the programs
        cannot be known."""
        return None

    def compile_larger(self) -> None:
        """Compile in the background what steps need when the cache has grown, now and each time
        that it grows."""

    def renew(self) -> None:
        """Make the cache anew."""
        raise NotImplementedError

    def close(self) -> None:
        """Compile nothing more in the background."""

    def forward(
        self, batch: Batch, x_RD: jax.Array | None = None, module: int | None = None
    ) -> jax.Array:
        """Return the last block's output of each row [R, D]; keys and values go to the cache.
        With `x_RD`, the output of the model or the module before, compute a module of multi-token
        prediction, for which `batch` holds the tokens as `Decoder.decode_further` reads them."""
        raise NotImplementedError

    def head(
        self, x_RD: jax.Array, rows: Sequence[int], module: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (normed states [O, D], logits float32 [O, V]) of at most outputs[-1] rows of what
        `forward` returned, padded to one of `outputs`."""
        raise NotImplementedError

    def multi_step(
        self, batch: Batch, rules: Rules, bounds: Bounds, top: int | None
    ) -> Made | None:
        """Compute several steps from a batch of the last known token of each request -> the tokens;
        None while the program is compiled in the background. `top`: likeliest tokens to report,
        None: no log-probabilities."""
        raise NotImplementedError

    @property
    def slots(self) -> int:
        """Slots of a replica: slot 0, which stays unused, then those of requests, of snapshots, and
        of texts on which sizes are tried."""
        own = 2 if self.spare else 0
        return 1 + self.limits.requests + self.limits.snapshots + own

    def replica_pages(self, held: int) -> int:
        """Return the pages of a replica in the arrays of a group that holds so many: page 0, which
        rows without a token read and write, then those that the scheduler knows, then spare
        ones."""
        return 1 + held + self.spare

    def hold(self, pages: Sequence[int]) -> None:
        """Make the arrays of each group large enough for the page of this number."""
        assert all(page <= held for page, held in zip(pages, self.held, strict=True))

    @property
    def scratch_texts(self) -> int:
        """How many texts `scratch` has room for."""
        return 2 if self.spare else min(2, self.limits.requests)

    @property
    def scratch_pages(self) -> int:
        """Pages of each of these."""
        return min(self.width, max(1, (self.spare or min(self.held)) // 2))

    def scratch(self, text: int) -> tuple[int, list[list[int]]]:
        """Return a slot, and its pages by group, for a text that is no request's: spare ones, or
        the first ones of an empty cache."""
        slot = self.slots - 1 - text if self.spare else 1 + text
        pages = []
        for held in self.held:
            first = 1 + text * self.scratch_pages + (held if self.spare else 0)
            pages.append([*range(first, first + self.scratch_pages)])
        return slot, pages

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of rows whose logits are computed at a time."""
        # The sizes of steps, because those are checked for batch invariance.
        return tuple(size for size in self.sizes if size <= OUTPUTS) or (OUTPUTS,)

    def batch(self, chunks: Sequence[ChunkTokens], at_least: int = 0) -> tuple[Batch, list[int]]:
        """Return chunks as a step of the smallest size that holds them, each replica's from its own
        first row on; and the first row of each chunk."""
        used = [0] * self.replicas
        for chunk in chunks:
            used[chunk.replica] += len(chunk.tokens)
        # All replicas run one program, so the fullest one decides.
        fewest = max(at_least, *used) if chunks or at_least else self.sizes[-1]
        size = next(size for size in self.sizes if size >= fewest)
        rows = np.zeros((4, self.replicas * size), np.int32)
        # Position -1: the row is unused.
        rows[1] = -1
        # Tables of all slots and full width: a program's shapes must not depend on who runs.
        tables = np.zeros(
            (len(self.layout.reaches), self.replicas * self.slots, self.width), np.int32
        )
        # Rows are sharded over the replicas in order, so each replica's begin at its own share.
        filled, firsts = [size * replica for replica in range(self.replicas)], []
        for replica, slot, start, tokens, pages, adapter in chunks:
            first = filled[replica]
            firsts.append(first)
            filled[replica] += len(tokens)
            own = slice(first, filled[replica])
            rows[0, own], rows[1, own] = tokens, np.arange(start, start + len(tokens))
            rows[2, own], rows[3, own] = slot, adapter
            for table, held in zip(tables, pages, strict=True):
                table[replica * self.slots + slot, : len(held)] = held
        # Spare pages lie behind the others and exist.
        of_requests = tables.reshape(len(tables), self.replicas, self.slots, self.width)
        self.hold(of_requests[:, :, : 1 + self.limits.requests].max(axis=(1, 2, 3)).tolist())
        return Batch(Rows(*rows), tuple(tables)), firsts

    def copy(self, copies: Sequence[StateCopy | PageCopy]) -> None:
        """Copy states between slots, one after the other, and pages."""
        pages, most = [], [0] * len(self.held)
        for copy in copies:
            if isinstance(copy, PageCopy):
                most[copy.group] = max(most[copy.group], copy.target)
        self.hold(most)
        for copy in copies:
            if isinstance(copy, PageCopy):
                first = copy.replica * self.replica_pages(self.held[copy.group])
                pages.append((copy.group, first + copy.source, first + copy.target))
            else:
                first = copy.replica * self.slots
                self.cache = self._copy(self.cache, first + copy.source, first + copy.target)
        # All pages of a group together: their targets were just taken, so no copy reads another's
        # target.
        for group in range(len(self.layout.reaches)):
            own = [ids for of, *ids in pages if of == group]
            for start in range(0, len(own), COPIES):
                # A fixed number is one program a group; padding copies page 0, which is unused,
                # onto itself.
                ids = np.zeros((2, COPIES), np.int32)
                some = own[start : start + COPIES]
                ids[:, : len(some)] = np.transpose(some)
                self.cache = self._copy_pages(self.cache, *ids, group)

    def _copy_over(self, cache: Any, source: jax.Array, target: jax.Array, group: int) -> Any:
        """Return the cache with pages of a group copied over others."""

        def copied(array: jax.Array, per_request: bool, own: int) -> jax.Array:
            # Numbers of pages are those of a group's pool; the same number is another page
            # elsewhere.
            return array if per_request or own != group else array.at[target].set(array[source])

        layout, after = self.layout, []
        for arrays, kept, own in zip(cache, layout.arrays, layout.groups, strict=True):
            after.append(
                {name: copied(array, kept[name].per_request, own) for name, array in arrays.items()}
            )
        return after

    def _copy_states(self, cache: Any, source: jax.Array, target: jax.Array) -> Any:
        after = []
        for arrays, kept in zip(cache, self.layout.arrays, strict=True):
            own = dict(arrays)
            for name, array in arrays.items():
                if kept[name].per_request:
                    own[name] = array.at[target].set(array[source])
            after.append(own)
        return after


def flatten_cache(cache: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arrays of all layers by name, as a package has them."""
    return {f"{i}/{name}": array for i, own in enumerate(cache) for name, array in own.items()}


def unflatten_cache(arrays: Mapping[str, Any], layers: int) -> list[dict[str, Any]]:
    """Return such arrays by layer."""
    cache: list[dict[str, Any]] = [{} for _ in range(layers)]
    for path, array in arrays.items():
        layer, _, name = path.partition("/")
        cache[int(layer)][name] = array
    return cache
