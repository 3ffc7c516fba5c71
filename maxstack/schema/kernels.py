"""The backends of each op by name, for the configuration, which is checked before jax is imported.
Preferred first, as in the ops."""

from typing import Literal

Attention = Literal[
    "auto",
    "cudnn",
    "pallas_gpu",
    "splash",
    "pallas_tpu",
    "tokamax",
    "hopper",
    "blockwise",
    "reference",
]
CrossEntropy = Literal["auto", "pallas_gpu", "pallas_tpu", "blockwise", "tokamax", "reference"]
GroupedMatmul = Literal[
    "auto", "pallas_gpu", "megablox", "tokamax", "blocks", "ragged_dot", "reference"
]
PagedAttention = Literal["auto", "tiles", "pallas_gpu", "pallas_tpu", "blockwise", "reference"]
GatedDelta = Literal["auto", "chunked", "reference"]
