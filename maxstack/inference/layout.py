"""Layout of the cache of a decoder: which arrays each layer keeps, and which layers share a table
of pages. Imports no jax."""

import dataclasses
import math

from maxstack.errors import ConfigError
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.mixers import Reach
from maxstack.schema.parts import Cached

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Cached arrays of every layer, in their order."""

    owners: tuple[int, ...]
    """The layer whose arrays each layer reads."""
    arrays: tuple[dict[str, Cached], ...]
    """By layer; empty where another owns them."""
    groups: tuple[int, ...]
    """By layer: index in `reaches`."""
    reaches: tuple[Reach, ...]
    """Distinct reaches of layers that keep an array for each token."""
    dtype: str

    @classmethod
    def of(cls, cfg: DecoderConfig) -> "Layout":
        """The layout of a model. ConfigError where it cannot generate."""
        owners, arrays, reaches = [], [], []
        for i, name in enumerate(cfg.order):
            mixer = cfg.blocks[name].mixer
            key = f"model.blocks.{name}.mixer"
            if mixer.two_sided:
                raise ConfigError(
                    f"{key}: reads positions after its own, so the model cannot generate token by "
                    "token; `maxstack sample` is for models of masked diffusion"
                )
            try:
                arrays.append(mixer.cached())
            except NotImplementedError:
                raise ConfigError(
                    f"{key}: mixers of kind={mixer.kind} declare no cache, so the model cannot "
                    "generate; give its section a method `cached`"
                ) from None
            shared = mixer.keys_of
            owner = (
                max(j for j in range(len(cfg.prefix)) if cfg.prefix[j] == shared and j < i)
                if (shared is not None)
                else i
            )
            owners.append(owner)
            reaches.append(mixer.reach)
        paged = [
            reach
            for reach, kept in zip(reaches, arrays, strict=True)
            if any(not array.per_request for array in kept.values())
        ]
        # a group reads and frees together; all tokens are kept where nothing is read by page
        distinct = tuple(dict.fromkeys(paged)) or (Reach(),)
        groups = tuple(
            distinct.index(reach) if reach in distinct else 0
            for reach in (reaches[owner] for owner in owners)
        )
        return cls(tuple(owners), tuple(arrays), groups, distinct, cfg.dtype)

    def token_bytes(self, group: int) -> int:
        """Bytes that a token takes in the layers of a group."""
        return sum(
            self._bytes(array)
            for kept, own in zip(self.arrays, self.groups, strict=True)
            if own == group
            for array in kept.values()
            if not array.per_request
        )

    @property
    def request_bytes(self) -> int:
        """Bytes that a request takes, beside its tokens."""
        return sum(
            self._bytes(array)
            for kept in self.arrays
            for array in kept.values()
            if array.per_request
        )

    @property
    def recurrent(self) -> bool:
        """True where a layer keeps a state of each request, which only the tokens in their order
        can make."""
        return self.request_bytes > 0

    def _bytes(self, array: Cached) -> int:
        return math.prod(dim.size for dim in array.dims) * BYTES[array.dtype or self.dtype]
