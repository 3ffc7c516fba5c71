"""Backends of each op by name, for the configuration, which is checked before jax is imported. In
the order of preference, as in the ops."""

from typing import Literal

Attention = Literal["auto", "cudnn", "hopper", "splash", "blockwise", "reference"]
CrossEntropy = Literal["auto", "pallas_tpu", "blockwise", "reference"]
GroupedMatmul = Literal["auto", "megablox", "tokamax", "blocks", "ragged_dot", "reference"]
PagedAttention = Literal["auto", "tiles", "pallas_tpu", "blockwise", "reference"]
GatedDelta = Literal["auto", "chunked", "reference"]
