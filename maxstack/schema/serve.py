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
    """Settings of the generation engine."""

    rows: SizeInt = 512
    """Maximum number of batched tokens per step and replica, of prompts and answers together.
    Smaller steps use 1/4 to 1/128 of it, if that changes no bit of the results or if identical is
    any."""
    page: SizeInt = 16
    """Tokens per page of the KV cache; requests with a common prefix share pages."""
    cache: PositiveFloat | None = None
    """Maximum KV cache size per replica in GiB, which grows as requests need it; null: enough for
    max_requests requests of max_length tokens, but at most half of the free memory."""
    cache_dtype: Literal["int8", "fp8"] | None = None
    """Type of cached keys, values and latents, with a scale per token and head; fp8 is
    float8_e4m3fn; null: as the activations. States of recurrent layers keep their type."""
    max_length: PositiveInt | None = None
    """Maximum number of tokens of a prompt and its answer together; null: the length that the model
    was made for, if its folder or run states it."""
    max_requests: PositiveInt = 32
    """Maximum number of concurrent requests per replica; others wait."""
    max_waiting: NonNegativeInt = 1024
    """Maximum number of waiting requests; the server refuses more with status 429. One client,
    identified by key or address, may take up at most three quarters of the waiting and running
    places that others leave free."""
    identical: Literal["strict", "check", "any"] = "check"
    """Whether a request gets bitwise equal results whatever else is in its batch. strict: verified
    at startup on the real shapes, and an error if it does not hold; check: verified for each size
    of step before its first use, and a warning instead; any: not verified, and layers compute as in
    training."""
    prefix_cache: bool = True
    """Keep the cache pages of finished requests for other requests with the same prefix."""
    snapshot: PositiveInt = 512
    """Tokens between snapshots of recurrent states, from which other requests can resume; a
    multiple of page."""
    snapshots: NonNegativeInt = 64
    """Number of snapshots to keep per replica, for models with recurrent layers."""
    attention: PagedAttention = "auto"
    """Kernel of paged attention; auto: the first one that supports the case."""
    speculate: NonNegativeInt = 0
    """Number of speculative tokens per step; answers do not change. 0: none."""
    draft: Literal["ngram", "mtp"] = "ngram"
    """Where draft tokens come from. ngram: what followed the same tokens earlier in the text; mtp:
    the model's multi-token prediction modules, one token each."""

    adapters: dict[str, str] = {}
    """Mapping from the name that requests use to an adapter: folders in PEFT's format, at paths or
    URLs."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_queue(cls, data: Any) -> Any:
        """Accept `queue`, the old name of `max_waiting`."""
        if not isinstance(data, Mapping) or "queue" not in data or "max_waiting" in data:
            return data
        return {"max_waiting" if key == "queue" else key: value for key, value in data.items()}

    @property
    def modules(self) -> int:
        """Number of multi-token prediction modules that run."""
        return self.speculate if self.draft == "mtp" else 0

    def own_faults(self) -> Iterator[Fault]:
        if self.snapshot % self.page:
            yield (
                "snapshot",
                f"snapshot={self.snapshot} is not a multiple of page={self.page}; give "
                f"serve.snapshot={-(-self.snapshot // self.page) * self.page} too",
            )
