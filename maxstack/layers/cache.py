"""The KV cache, as one layer sees it while a step of inference is traced.

Shapes: R rows, each a token of some request  S slots, one a request  W pages of a request at most
P pages  L tokens of a page  N heads  K kv heads  H head dim  V value dim.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from maxstack.kernels.attention.request import Request
from maxstack.kernels.paged_attention import Quantized, paged_attention


class Rows(NamedTuple):
    """The rows of a step, one token each. On each device the rows of a request are adjacent, in the
    order of their positions. Unused rows come last, except those of requests that ended in a burst,
    whose slot is 0 too."""

    tokens_R: Array
    positions_R: Array
    """-1: the row is unused."""
    slots_R: Array
    """Number of the request among those of the device; slot 0 is unused."""
    adapters_R: Array
    """Number of the request's adapter; 0: none."""


@dataclasses.dataclass
class LayerCache:
    """Arrays that a layer reads and replaces."""

    rows: Rows
    tables_SW: Array
    """int32: the pages of each request, in the order of its tokens; page 0 belongs to none."""
    arrays: dict[str, Array]
    backend: str
    """Backend of paged attention."""

    def attend(
        self,
        q_RNH: Array,
        new_RCH: Array | None,
        request: Request,
        *,
        sinks_N: Array | None = None,
        value_dim: int | None = None,
    ) -> Array:
        """Attention of each row over the pages of its request, into which `new_RCH` is written
        before: [R, N, V]. C are keys and values in turn, or with `value_dim` a key for all heads
        whose first numbers are the value."""
        scales, kept = self.arrays.get("scales"), self.arrays["pages"]
        # Scales are there where the cache is in low precision.
        pages = kept if scales is None else Quantized(kept, scales)
        o_RNV, pages = paged_attention(
            q_RNH,
            new_RCH,
            pages,
            self.tables_SW,
            self.rows.slots_R,
            self.rows.positions_R,
            request,
            self.backend,
            sinks_N=sinks_N,
            value_dim=value_dim,
        )
        if isinstance(pages, Quantized):
            self.arrays["pages"], self.arrays["scales"] = pages
        else:
            self.arrays["pages"] = pages
        return o_RNV
