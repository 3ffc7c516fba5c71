"""The configuration of inference: generation and the server."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pydantic

from maxstack.config import (
    Fault,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
)
from maxstack.schema.kernels import PagedAttention


class ServeConfig(Section):
    """Sizes and rules of the engine that generates."""

    rows: SizeInt = 512
    """Tokens that a step computes at most, of prompts and answers alike, on each replica of the
    model. Steps with fewer have 1/4 to 1/128 of these rows, where that changes no bit, or identical
    is any."""
    page: SizeInt = 16
    """Tokens of a page of the cache, which requests with one beginning share."""
    cache: PositiveFloat | None = None
    """Size of the cache in GiB a replica; null: for max_requests of max_length, at most half of the
    memory that is free."""
    cache_dtype: Literal["int8", "fp8"] | None = None
    """Type of cached keys, values and latents, with a scale for each token and head; fp8 is
    float8_e4m3fn; null: that of the activations. States of recurrent layers stay as they are."""
    max_length: PositiveInt | None = None
    """Tokens of a prompt and its answer together at most; null: as many as the model was made for,
    where its folder or its run say so."""
    max_requests: PositiveInt = 32
    """Requests that run at a time on each replica; others wait."""
    max_waiting: NonNegativeInt = 1024
    """Requests that may wait; the server refuses more with status 429. One client, by its key or
    its address, may have three quarters of what others leave of these and of those that run."""
    identical: Literal["strict", "check", "any"] = "check"
    """Same bits for a request whatever else is computed beside it. strict: tried at the start on
    the real shapes, and refused where it does not hold; check: a warning then; any: not tried, and
    layers compute as in training."""
    prefix_cache: bool = True
    """Keep pages of ended requests, for others that begin alike."""
    snapshot: PositiveInt = 512
    """Tokens between two snapshots of the state of recurrent layers, at which alone other requests
    can take it up; a multiple of page."""
    snapshots: NonNegativeInt = 64
    """Snapshots that are kept on each replica, of models that have recurrent layers."""
    attention: PagedAttention = "auto"
    """The kernel of attention over cached pages; auto: the first that can serve."""
    speculate: NonNegativeInt = 0
    """Tokens that are guessed, and computed in one step; the answer stays the same. 0: none."""
    draft: Literal["ngram", "mtp"] = "ngram"
    """Source of guesses. ngram: what followed the same tokens earlier in the text; mtp: the model's
    own modules of multi-token prediction, each of which guesses one token."""

    adapters: dict[str, str] = {}
    """Adapters by the names that requests choose them by: folders in PEFT's format, at paths or
    URLs."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_queue(cls, data: Any) -> Any:
        """`queue` is what `max_waiting` was called once."""
        if not isinstance(data, Mapping) or "queue" not in data or "max_waiting" in data:
            return data
        return {"max_waiting" if key == "queue" else key: value for key, value in data.items()}

    @property
    def modules(self) -> int:
        """Modules of multi-token prediction that run."""
        return self.speculate if self.draft == "mtp" else 0

    def own_faults(self) -> Iterator[Fault]:
        if self.snapshot % self.page:
            yield (
                "snapshot",
                f"snapshot={self.snapshot} is not a multiple of page={self.page}; give "
                f"serve.snapshot={-(-self.snapshot // self.page) * self.page} too",
            )
