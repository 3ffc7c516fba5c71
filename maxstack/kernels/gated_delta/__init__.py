"""The gated delta rule, a recurrence over time, by several backends.

Shapes: B batch  T time  K key heads  N value heads  H key dim  V value dim.
"""

import dataclasses
from collections.abc import Mapping

import jax

from maxstack.kernels.backends import Backend, Device, Op

OP = Op(
    "gated_delta",
    (
        Backend("chunked", f"{__name__}.chunked"),
        Backend("reference", f"{__name__}.reference"),
    ),
)


@dataclasses.dataclass(frozen=True)
class GatedDeltaCase:
    """One call on one device."""

    length: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    device: Device

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """Empty: neither backend has block sizes, since `chunk` belongs to the model."""
        return {}


def gated_delta(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segments_BT: jax.Array | None,
    chunk: int = 64,
    backend: str = "auto",
) -> jax.Array:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464, eq. 10) -> [B, T, N, V] in v's
    dtype, computed in float32.

    A value head n reads queries and keys of head n // (N / K); its state S [H, V] is 0 before each
    document, and becomes a S + b k (v - a S^T k)^T at each position, whose output is S^T q. a =
    exp(decay), decay <= 0 and float32; b = beta. Queries and keys are already normalised and
    scaled. `segments_BT` numbers the documents of a row; None means one document a row.
    ConfigError if the requested backend cannot serve.
    """
    case = GatedDeltaCase(
        v_BTNV.shape[1],
        v_BTNV.shape[2],
        k_BTKH.shape[3],
        v_BTNV.shape[3],
        v_BTNV.dtype.name,
        Device.here(),
    )
    return OP[OP.choose(case, backend).backend].run(
        q_BTKH, k_BTKH, v_BTNV, decay_BTN, beta_BTN, segments_BT, chunk
    )
