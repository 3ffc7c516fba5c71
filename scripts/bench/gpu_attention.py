"""Attention for bench_gpu.py: speed by sequence length.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.gpu_ops import Bench, Call, Run, backends_for, elsewhere
from bench.gpu_ops import checks as checks_of
from bench.gpu_ops import speeds as speeds_of
from bench.gpu_programs import Job, Ran, drawn, passes

from maxstack.kernels.attention import OP
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device


@dataclasses.dataclass(frozen=True)
class Asked:
    """Shapes and options of a call."""

    length: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int | None = None
    keys: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    causal: bool = True
    soft_cap: float | None = None
    sinks: bool = False
    documents: bool = False

    @property
    def all_keys(self) -> int:
        """Keys: as many as queries where not said otherwise."""
        return self.keys or self.length

    @property
    def values(self) -> int:
        """Channels of a value."""
        return self.value_dim or self.head_dim

    @property
    def request(self) -> Request:
        """The request as a layer makes it; additional keys come before the queries."""
        return Request(
            self.head_dim**-0.5,
            self.window,
            self.soft_cap,
            None,
            self.causal,
            self.all_keys - self.length,
        )

    def call(self, device: Device) -> Call:
        """The call for a backend."""
        case = AttentionCase(
            self.request,
            self.length,
            self.all_keys,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.values,
            self.dtype,
            self.documents,
            self.sinks,
            device,
        )
        return Call(OP, case, self.make, self.forward, self.both)

    def forward(self, run: Run) -> Callable[..., jax.Array]:
        """(q, k, v, sinks?, gradient of the result) -> the result."""
        same = [(self.numbers(self.length), self.numbers(self.all_keys))] if self.documents else []

        def forward(
            q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, *others: jax.Array
        ) -> jax.Array:
            pairs = tuple((jnp.asarray(mine), jnp.asarray(theirs)) for mine, theirs in same)
            sinks_N = others[0] if self.sinks else None
            return run(Inputs(q_BTNH, k_BSKH, v_BSKV, sinks_N, pairs), self.request)

        return forward

    def both(self, run: Run) -> Callable[..., dict[str, jax.Array]]:
        """(q, k, v, sinks?, gradient of the result) -> the result and the gradients of the
        others."""
        forward = self.forward(run)

        def both(*inputs: jax.Array) -> dict[str, jax.Array]:
            out, back = jax.vjp(forward, *inputs[:-1])
            names = ("dq", "dk", "dv", "dsinks")
            return {"o": out} | dict(zip(names, back(inputs[-1]), strict=False))

        return both

    def numbers(self, length: int) -> np.ndarray:
        """Documents of uneven lengths, as int32 [B, length]; each row has its own."""
        cuts = [
            sorted({length // 3 + 5 * row, length // 2 + 1 + row, length - 1 - 3 * row})
            for row in range(self.batch)
        ]
        return np.stack(
            [np.searchsorted(row, np.arange(length), side="right").astype(np.int32) for row in cuts]
        )

    def make(self) -> tuple[jax.Array, ...]:
        """q, k, v, sinks if any, and the gradient of the result, always the same."""
        shapes = [
            (self.batch, self.length, self.heads, self.head_dim),
            (self.batch, self.all_keys, self.kv_heads, self.head_dim),
            (self.batch, self.all_keys, self.kv_heads, self.values),
            *([(self.heads,)] if self.sinks else []),
            (self.batch, self.length, self.heads, self.values),
        ]
        return tuple(drawn(i, shape, self.dtype) for i, shape in enumerate(shapes))

    @property
    def flops(self) -> float:
        """FLOPs forward: 4 for each visible pair, head and dimension. Causal without a window
        counts half of T S, as FlashAttention's benchmarks do."""
        t = self.length
        span = min(self.window or t, t)
        if not self.causal:
            pairs: float = t * self.all_keys
        elif span == t:
            pairs = t * self.all_keys / 2
        else:
            pairs = span * (span + 1) / 2 + (t - span) * span
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.values)


CORE = {
    "causal 128": Asked(1024, 2),
    "window 128": Asked(1024, 2, window=200),
    "causal 64": Asked(1024, 2, head_dim=64),
    "window 64": Asked(1024, 2, head_dim=64, window=200),
    "documents": Asked(777, 2, documents=True),
}
MORE = {
    "long": Asked(4096, heads=4, kv_heads=4),
    "documents, window": Asked(1000, 2, head_dim=64, window=100, documents=True),
    "float32": Asked(500, dtype="float32"),
    "soft cap": Asked(512, soft_cap=30.0),
    "sinks": Asked(512, head_dim=64, sinks=True, window=128),
    "not causal": Asked(512, causal=False),
    "offset": Asked(256, keys=640, head_dim=64),
    "MLA 192/128": Asked(512, kv_heads=8, head_dim=192, value_dim=128),
}
TINY = "causal 64", "window 64", "documents"
LENGTHS = {
    "full": (4096, 8192, 2048, 16384),
    "quick": (4096,),
    "small": (512, 1024, 2048, 4096, 8192),
    "tiny": (128,),
}
PEER = "jax.nn xla"
"""jax.nn.dot_product_attention, with its whole score matrix in memory."""
SLOW = (PEER, "reference", "blockwise")
"""Plain XLA: on a GPU one length is enough."""
DENSE = 4096
"""Longest sequence whose whole score matrix is worth waiting for."""


def checks(size: str, device: Device) -> Iterator[Job]:
    """One job for each backend and case."""
    yield from elsewhere(OP, device)
    names = {"tiny": TINY, "full": (*CORE, *MORE)}.get(size, CORE)
    for name in names:
        asked = (CORE | MORE)[name]
        if size == "tiny":
            asked = dataclasses.replace(
                asked,
                length=asked.length // 8,
                heads=4,
                window=asked.window and 20,
                kv_heads=min(asked.kv_heads, 4),
            )
        yield from checks_of(asked.call(device), name, name in MORE)


def speeds(bench: Bench) -> Iterator[Job]:
    """One job for each backend, head dim, mask, length and size of blocks."""
    dims = {"full": (128, 64), "quick": (128,)}.get(bench.size, (64,))
    lengths = LENGTHS[bench.size]
    backends = [PEER, *backends_for(OP, bench.device)]
    for dim, length, mask, backend in itertools.product(
        dims, lengths, ("causal", "window"), backends
    ):
        if bench.device.platform == "gpu" and backend in SLOW and length != lengths[0]:
            continue
        asked = _measured(bench.size, length, dim, mask)
        fields = ("head_dim", "length", "batch", "heads", "window", "dtype")
        too_large = f"the whole score matrix of {length} positions is not tried"
        yield from speeds_of(
            bench,
            "attention",
            asked.call(bench.device),
            {"mask": mask} | {field: getattr(asked, field) for field in fields},
            backend,
            f"{mask} {dim}",
            asked.flops,
            functools.partial(_figures, asked.flops),
            peer=_peer if backend == PEER else None,
            too_large=too_large if length > DENSE else None,
        )


def _figures(flops: float, ran: dict[str, Ran]) -> dict[str, Any]:
    return passes(ran, flops, 2.5 * flops) | {"temporary_bytes": ran["both"].temporaries}


def _measured(size: str, length: int, dim: int, mask: str) -> Asked:
    """16,384 tokens of 2,048 channels on a GPU, as in FlashAttention's benchmarks; one sequence of
    256 or 128 channels on a CPU."""
    width, batch, window = {"small": (256, 1, 256), "tiny": (128, 1, 32)}.get(
        size, (2048, 16384 // length, 1024)
    )
    return Asked(
        length,
        batch,
        width // dim,
        width // dim,
        dim,
        dtype="float32" if size == "small" else "bfloat16",
        window=window if mask == "window" else None,
    )


def _peer(inputs: Inputs, request: Request) -> jax.Array:
    window = (request.window - 1, 0) if request.window else None
    return jax.nn.dot_product_attention(
        *inputs[:3],
        scale=request.scale,
        is_causal=True,
        local_window_size=window,
        implementation="xla",
    )
