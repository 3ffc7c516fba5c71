"""Layout of the cache of a decoder: which arrays each layer keeps, and which layers share a page
table (a page group). Imports no jax."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from maxstack.errors import ConfigError
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.mesh import AXES, MeshConfig, names, parts
from maxstack.schema.mixers import Reach
from maxstack.schema.parts import Cached
from maxstack.schema.serve import ServeConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
PORTABLE = "any"
"""Platform of a cache for any device."""
LANES = 128
"""Elements in a row of a TPU's vector memory."""
QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""serve.cache_dtype -> the type of the pages."""


class CacheBytes(NamedTuple):
    """Bytes of the cache on one device."""

    tokens: tuple[float, ...]
    """By group: a token."""
    reads: tuple[float, ...]
    """By group: a token as layers read it; layers that share keys read it again."""
    request: float
    """A request, besides its tokens."""

    @property
    def all(self) -> float:
        """A token that all layers keep, and what a request takes besides its tokens."""
        return sum(self.tokens) + self.request


@dataclasses.dataclass(frozen=True)
class Layout:
    """Cached arrays of every layer, in their order, then of modules of multi-token prediction."""

    owners: tuple[int, ...]
    """The layer whose arrays each layer reads."""
    arrays: tuple[dict[str, Cached], ...]
    """By layer; empty where another owns them."""
    groups: tuple[int, ...]
    """By layer: index in `reaches`."""
    reaches: tuple[Reach, ...]
    """Distinct reaches of layers that keep an array for each token."""
    dtype: str
    platform: str = "cpu"
    """Kind of the devices."""

    @classmethod
    def of(
        cls,
        cfg: DecoderConfig,
        serve: ServeConfig = ServeConfig(),  # noqa: B008
        platform: str = "cpu",
    ) -> "Layout":
        """Return the layout of a model. ConfigError where it cannot generate."""
        owners: list[int] = []
        arrays: list[dict[str, Cached]] = []
        reaches: list[Reach] = []
        depth = cfg.mtp.depth if cfg.mtp else 0
        if serve.modules > depth:
            raise ConfigError(
                f"serve.speculate={serve.speculate}: serve.draft=mtp guesses a token with each "
                f"module of multi-token prediction, and the model has {depth}; use "
                f"serve.speculate={depth}, or serve.draft=ngram"
            )
        further = [cfg.mtp.block] * serve.modules if cfg.mtp else []
        for i, name in enumerate([*cfg.order, *further]):
            mixer = cfg.blocks[name].mixer
            key = f"model.blocks.{name}.mixer"
            # What a token's layers cache must not change when later tokens come.
            if mixer.two_sided:
                raise ConfigError(
                    f"{key}: reads positions after its own, so the model cannot generate token by "
                    "token; `maxstack sample` is for models of masked diffusion"
                )
            try:
                arrays.append(_stored(mixer.cached(), serve.cache_dtype))
            except NotImplementedError:
                raise ConfigError(
                    f"{key}: mixers of kind={mixer.kind} declare no cache, so the model cannot "
                    "generate; give its section a method `cached`"
                ) from None
            shared = mixer.keys_of
            owner = (
                # The nearest layer before this one of the block that owns the keys.
                max(j for j in range(len(cfg.prefix)) if cfg.prefix[j] == shared and j < i)
                if (shared is not None)
                else i
            )
            owners.append(owner)
            reaches.append(mixer.reach)
        # One group for each distinct reach: layers with a window need few pages, and would hold as
        # many as full attention in a shared table.
        paged = []
        for reach, kept in zip(reaches, arrays, strict=True):
            if not all(array.per_request for array in kept.values()):
                paged.append(reach)
        # without pages at all, one group that keeps all tokens
        distinct = tuple(dict.fromkeys(paged)) or (Reach(),)
        groups = []
        for owner in owners:
            reach = reaches[owner]
            # Layers with a state alone have no pages; any group will do for them.
            groups.append(distinct.index(reach) if reach in distinct else 0)
        layers = tuple(owners), tuple(arrays), tuple(groups)
        return cls(*layers, distinct, cfg.dtype, platform)

    def token_bytes(self, group: int) -> int:
        """Return the bytes of a token in the layers of a group."""
        return sum(
            self.array_bytes(array)
            for kept, own in zip(self.arrays, self.groups, strict=True)
            if own == group
            for array in kept.values()
            if not array.per_request
        )

    def pages(self, length: int, page: int, rows: int) -> list[int]:
        """Return by group the most pages that a request of `length` tokens holds, with steps of at
        most `rows` tokens."""
        reads = [reach.window or reach.chunk or length for reach in self.reaches]
        # A window, a step's new tokens before the window moves on, and one more page, since neither
        # begins at the edge of one.
        return [min(-(-length // page), -(-(read + rows) // page) + 1) for read in reads]

    def on(self, mesh: MeshConfig, sizes: Mapping[str, int]) -> CacheBytes:
        """Return the cache of a device of a mesh of these sizes; arrays are sharded by axes."""
        from maxstack.sharding import spec

        def size(arrays: Iterable[Cached], per_request: bool) -> float:
            total = 0.0
            for array in arrays:
                if array.per_request == per_request:
                    axes = ["batch", *(dim.axis for dim in array.dims)]
                    # Without the batch axis: it makes replicas, each with a cache of its own.
                    own = [axis for entry in spec(axes, mesh.rules)[1:] for axis in names(entry)]
                    total += self.array_bytes(array) / parts(own, sizes)
            return total

        tokens, reads = [0.0] * len(self.reaches), [0.0] * len(self.reaches)
        for own, owner, group in zip(self.arrays, self.owners, self.groups, strict=True):
            tokens[group] += size(own.values(), False)
            reads[group] += size(self.arrays[owner].values(), False)
        request = sum(size(own.values(), True) for own in self.arrays)
        return CacheBytes(tuple(tokens), tuple(reads), request)

    def shards(self, mesh: MeshConfig, sizes: Mapping[str, int]) -> float:
        """Return the bytes of the cache over those that each device of a replica holds."""
        return self.on(mesh, dict.fromkeys(AXES, 1)).all / self.on(mesh, sizes).all

    @property
    def request_bytes(self) -> int:
        """Bytes of a request, besides its tokens."""
        return sum(
            self.array_bytes(array)
            for kept in self.arrays
            for array in kept.values()
            if array.per_request
        )

    @property
    def recurrent(self) -> bool:
        """True where a layer keeps a state per request, which has to see all tokens in order."""
        # Only states take bytes for a request besides its tokens.
        return self.request_bytes > 0

    def snapshots(self, serve: ServeConfig) -> int:
        """Return the number of snapshots of states that a replica keeps."""
        return serve.snapshots if self.recurrent and serve.prefix_cache else 0

    def array_bytes(self, array: Cached) -> int:
        """Return the bytes of an array for a token or a request."""
        sizes = [dim.size for dim in array.dims]
        if self.page_order(array):
            sizes[-1] += -sizes[-1] % LANES
        return math.prod(sizes) * BYTES[array.dtype or self.dtype]

    def page_order(self, array: Cached) -> tuple[int, ...] | None:
        """Return the order of dimensions of pages [P, L, C, H] where XLA's choice will not do: on a
        TPU it packs rows that do not fill all lanes, and then copies the whole cache in each
        step. In this order rows are padded to full lanes instead."""
        paged = not array.per_request and not array.dtype and len(array.dims) == 2
        if self.platform != "tpu" or not paged or array.dims[1].size % LANES == 0:
            return None
        # Compiled for a v5e, head_dim 64: a step's temporary memory 271 -> 47 MiB, for a cache of
        # twice the bytes. Latents have one array a token, so tokens take the last dimension but
        # one: a size of 1 there would be padded to a tile.
        return (0, 2, 1, 3) if array.dims[0].size == 1 else (0, 1, 2, 3)


def _stored(arrays: dict[str, Cached], cache_dtype: str | None) -> dict[str, Cached]:
    """Return the arrays of a layer as serve.cache_dtype keeps them: pages in low precision have a
    scale for each array of each token beside them."""
    if cache_dtype is None or "pages" not in arrays:
        return arrays
    dims = arrays["pages"].dims
    pages = Cached(dims, dtype=QUANTIZED[cache_dtype])
    return arrays | {"pages": pages, "scales": Cached(dims[:1], dtype="float32")}
