"""Attention for bench_gpu.py: every backend against float64 on the device, then its speed by
sequence length.

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
from bench.gpu_blocks import Blocks, Differs, Sizes
from bench.gpu_errors import compare, float64
from bench.gpu_programs import Job, Program, Ran, calls, drawn, elsewhere, passes

from maxstack.kernels.attention import OP, reference
from maxstack.kernels.attention.request import AttentionCase, Request
from maxstack.kernels.backends import Device

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Asked:
    """One call: shapes, and what is asked of it."""

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
    def request(self) -> Request:
        """As a layer puts it; keys that came before the queries stand before them."""
        return Request(
            self.head_dim**-0.5,
            self.window,
            self.soft_cap,
            None,
            self.causal,
            (self.keys or self.length) - self.length,
        )

    def case(self, device: Device) -> AttentionCase:
        """As backends see it."""
        return AttentionCase(
            self.request,
            self.length,
            self.keys or self.length,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.value_dim or self.head_dim,
            self.dtype,
            self.documents,
            self.sinks,
            device,
        )

    def call(
        self, run: Callable[..., jax.Array], blocks: Blocks = None
    ) -> Callable[..., jax.Array]:
        """(q, k, v, sinks?) -> o of a backend."""
        same = (
            ((self.numbers(self.length), self.numbers(self.keys or self.length)),)
            if self.documents
            else ()
        )

        def call(
            q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, *sinks_N: jax.Array
        ) -> jax.Array:
            pairs = tuple((jnp.asarray(mine), jnp.asarray(theirs)) for mine, theirs in same)
            sizes = {"blocks": blocks} if blocks else {}
            return run(
                q_BTNH,
                k_BSKH,
                v_BSKV,
                sinks_N[0] if sinks_N else None,
                pairs,
                self.request,
                **sizes,
            )

        return call

    def numbers(self, length: int) -> np.ndarray:
        """Documents of uneven lengths, as int32 [B, length]; each row has its own."""
        cuts = [
            sorted({length // 3 + 5 * row, length // 2 + 1 + row, length - 1 - 3 * row})
            for row in range(self.batch)
        ]
        return np.stack(
            [np.searchsorted(row, np.arange(length), side="right").astype(np.int32) for row in cuts]
        )

    def make(self) -> Arrays:
        """q, k, v, sinks where asked for, and the gradient of the result, always the same."""
        kv, values = self.keys or self.length, self.value_dim or self.head_dim
        shapes = [
            (self.batch, self.length, self.heads, self.head_dim),
            (self.batch, kv, self.kv_heads, self.head_dim),
            (self.batch, kv, self.kv_heads, values),
            *([(self.heads,)] if self.sinks else []),
            (self.batch, self.length, self.heads, values),
        ]
        return tuple(drawn(i, shape, self.dtype) for i, shape in enumerate(shapes))

    @property
    def flops(self) -> float:
        """Forward: 4 for each visible pair, head and dimension. Causal without a window counts half
        of T S, as FlashAttention's benchmarks do."""
        t, keys = self.length, self.keys or self.length
        span = min(self.window or t, t)
        pairs = (
            t * keys
            if not self.causal
            else t * keys / 2
            if span == t
            else span * (span + 1) / 2 + (t - span) * span
        )
        return (
            2.0
            * self.batch
            * self.heads
            * pairs
            * (self.head_dim + (self.value_dim or self.head_dim))
        )


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
    cases = (
        {name: CORE[name] for name in TINY}
        if size == "tiny"
        else CORE | (MORE if size == "full" else {})
    )
    for name, asked in cases.items():
        if size == "tiny":
            asked = dataclasses.replace(
                asked,
                length=asked.length // 8,
                keys=asked.keys and asked.keys // 8,
                heads=4,
                window=asked.window and 20,
                kv_heads=min(asked.kv_heads, 4),
            )
        expected = functools.cache(functools.partial(_expected, asked))
        for backend in OP.backends:
            if backend.name != "reference" and device.platform in backend.platforms:
                yield _check(
                    name, asked, backend.name, expected, _refusal(backend.name, asked.case(device))
                )


def _check(
    name: str, asked: Asked, backend: str, expected: Callable[[], Any], refused: str | None
) -> Job:
    def programs() -> dict[str, Program]:
        return {"both": Program(_both(asked.call(OP[backend].run)), asked.make)}

    def finish(ran: dict[str, Ran]) -> dict[str, Any]:
        return compare(ran["both"].outputs, expected(), asked.dtype)

    return Job(
        "check",
        {"op": "attention", "case": name, "backend": backend},
        programs,
        finish,
        refused,
        name in MORE,
    )


def _expected(asked: Asked) -> Any:
    return float64(_both(asked.call(reference.run)), asked.make())


def _both(call: Callable[..., jax.Array]) -> Callable[..., dict[str, jax.Array]]:
    """(inputs..., gradient of the result) -> the result and the gradients of all inputs."""

    def both(*given: jax.Array) -> dict[str, jax.Array]:
        out, back = jax.vjp(call, *given[:-1])
        return {"o": out} | {
            f"d{name}": grad
            for name, grad in zip(("q", "k", "v", "sinks"), back(given[-1]), strict=False)
        }

    return both


def speeds(
    size: str,
    device: Device,
    peak: float | None,
    allowed: Callable[[str, str, str], str | None],
    sizes: Sizes,
) -> Iterator[Job]:
    """One job for each backend, head dim, mask, length and size of blocks. `allowed` (op, backend,
    case) says why a speed may not be shown."""
    dims = {"full": (128, 64), "quick": (128,)}.get(size, (64,))
    backends = [
        PEER,
        *(backend.name for backend in OP.backends if device.platform in backend.platforms),
    ]
    for dim, length, mask, backend in itertools.product(
        dims, LENGTHS[size], ("causal", "window"), backends
    ):
        asked = _measured(size, length, dim, mask)
        if device.platform == "gpu" and backend in SLOW and length != LENGTHS[size][0]:
            continue
        refused = _refusal(backend, asked.case(device))
        if refused is None and backend not in (PEER, "reference"):
            refused = allowed("attention", backend, f"{mask} {dim}")
        for place, blocks in enumerate(sizes.of(OP, backend, asked.case(device))):
            differs = functools.partial(sizes.differs, place == 0)
            yield _speed(
                asked,
                mask,
                backend,
                peak,
                refused,
                blocks,
                differs,
                dict(asked.case(device).shape_class),
            )


def _measured(size: str, length: int, dim: int, mask: str) -> Asked:
    """16,384 tokens of 2,048 channels on a GPU, as FlashAttention's benchmarks have; one sequence
    of 256 or 128 channels on a CPU."""
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


def _speed(
    asked: Asked,
    mask: str,
    backend: str,
    peak: float | None,
    refused: str | None,
    blocks: Blocks,
    differs: Differs,
    shape_class: dict[str, Any],
) -> Job:
    def programs() -> dict[str, Program]:
        call = asked.call(_peer if backend == PEER else OP[backend].run, blocks)
        times = calls(asked.flops, peak)
        return {
            "forward": Program(call, lambda: asked.make()[:-1], times),
            "both": Program(_both(call), asked.make, max(1, times // 3)),
        }

    def finish(ran: dict[str, Ran]) -> dict[str, Any]:
        found = passes(ran, asked.flops, 2.5 * asked.flops) | {
            "temporary_bytes": ran["both"].temporaries,
            "op": OP.name,
            "shape_class": shape_class,
        }
        return found | differs(
            f"{backend} {mask} {asked.head_dim} {asked.length}", ran["both"].outputs, asked.dtype
        )

    row = {
        "mask": mask,
        "head_dim": asked.head_dim,
        "length": asked.length,
        "batch": asked.batch,
        "heads": asked.heads,
        "window": asked.window,
        "dtype": asked.dtype,
        "backend": backend,
        "blocks": blocks,
    }
    return Job("attention", row, programs, finish, refused)


def _refusal(backend: str, case: AttentionCase) -> str | None:
    if backend in (PEER, "reference"):
        return (
            None
            if case.queries <= DENSE
            else f"the whole score matrix of {case.queries} positions is not tried"
        )
    try:
        return OP[backend].supports(case)
    except ImportError as error:
        return f"failed: {error}"


def _peer(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: None,
    same: tuple[()],
    request: Request,
) -> jax.Array:
    window = (request.window - 1, 0) if request.window else None
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKV,
        scale=request.scale,
        is_causal=True,
        local_window_size=window,
        implementation="xla",
    )
