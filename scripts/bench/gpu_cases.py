"""The kernels' calls that bench_gpu.py checks and times: shapes, and peers in plain JAX.

Shapes: M rows  E groups  N columns  D embed  V vocab.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.kernels import attention, cross_entropy, examples, grouped_matmul
from maxstack.kernels.attention.request import AttentionCase, Inputs
from maxstack.kernels.attention.request import Request as Attention
from maxstack.kernels.backends import Device, Op
from maxstack.kernels.cross_entropy import CrossEntropyCase, Losses
from maxstack.kernels.cross_entropy import Request as CrossEntropy
from maxstack.kernels.grouped_matmul import GroupedMatmulCase


class Call(NamedTuple):
    """A call of an op, for every backend to compute."""

    op: Op
    case: Any
    example: examples.Example
    row: dict[str, Any]
    """Columns that name the call in the results."""
    flops: tuple[float, float] = (0.0, 0.0)
    """Of the forward and of the backward pass."""
    peer: tuple[str, Callable[..., Any] | None] = ("", None)
    """A name, and what runs in place of a backend."""
    dense: str | None = None
    """Why a peer or the reference, which hold everything in memory, is not tried."""


def of_attention(
    row: dict[str, Any], length: int, batch: int = 1, heads: int = 8, kv_heads: int = 2,
    head_dim: int = 128, value_dim: int | None = None, keys: int | None = None,
    dtype: str = "bfloat16", packed: bool = False, sinks: bool = False, **request: Any,
) -> Call:  # fmt: skip
    """A call of attention; further keys come before the queries. Causal FLOPs without a window
    count half of T S, as FlashAttention's benchmarks do."""
    keys = keys or length
    scale, window = head_dim**-0.5, request.get("window")
    asked = Attention(scale, offset=keys - length, **request)
    case = AttentionCase(
        asked, length, keys, heads, kv_heads, head_dim, value_dim or head_dim, dtype, packed,
        sinks, Device.here(),
    )  # fmt: skip
    span = min(window or length, length)
    pairs = length * keys / 2 if span == length else span * (span + 1) / 2 + (length - span) * span
    forward = 4.0 * batch * heads * pairs * head_dim
    return Call(
        attention.OP, case, examples.attention_example(case, batch), row, (forward, 2.5 * forward),
        ("jax.nn xla", _xla_attention),
        f"the whole score matrix of {length} positions is not tried" if length > 4096 else None,
    )  # fmt: skip


def of_cross_entropy(
    row: dict[str, Any], rows: int, embed: int, vocab: int, soft_cap: float | None = None,
    dtype: str = "bfloat16",
) -> Call:  # fmt: skip
    """A call of linear cross-entropy."""
    case = CrossEntropyCase(
        CrossEntropy(soft_cap=soft_cap), rows, embed, vocab, dtype, False, False, Device.here()
    )
    flops = 2.0 * rows * embed * vocab
    example = examples.cross_entropy_example(case)
    return Call(
        cross_entropy.OP, case, example, row, (flops, 2 * flops), ("whole logits", _whole_logits)
    )


def of_grouped_matmul(
    row: dict[str, Any], rows: int, groups: int, contracted: int, columns: int,
    dtype: str = "bfloat16",
) -> Call:  # fmt: skip
    """A call of the grouped matmul; one matrix for all rows is the speed that it could reach."""
    case = GroupedMatmulCase(rows, groups, contracted, columns, dtype, Device.here())
    flops, size = 2.0 * rows * contracted * columns, 4 * rows * groups * columns
    return Call(
        grouped_matmul.OP, case, examples.grouped_matmul_example(case), row, (flops, 2 * flops),
        ("one dense matmul", lambda x_MD, w_EDN, sizes_E: x_MD @ w_EDN[0]),
        f"its [rows, groups, columns] would take {size / 2**30:.0f} GiB" if size > 2**32 else None,
    )  # fmt: skip


CHECKS: dict[str, tuple[Callable[..., Call], dict[str, dict[str, Any]]]] = {
    "attention": (
        of_attention,
        {
            "causal": {"length": 1024, "batch": 2},
            "window": {"length": 1024, "batch": 2, "head_dim": 64, "window": 200},
            "documents": {"length": 777, "batch": 2, "packed": True},
            "documents, window": {"length": 1000, "head_dim": 64, "window": 100, "packed": True},
            "soft cap": {"length": 512, "soft_cap": 30.0},
            "sinks": {"length": 512, "head_dim": 64, "sinks": True, "window": 128},
            "not causal": {"length": 512, "causal": False},
            "offset": {"length": 256, "keys": 640, "head_dim": 64},
            "MLA": {"length": 512, "kv_heads": 8, "head_dim": 192, "value_dim": 128},
            "float32": {"length": 500, "dtype": "float32"},
        },
    ),
    "linear_cross_entropy": (
        of_cross_entropy,
        {
            "odd sizes, soft cap": {"rows": 333, "embed": 192, "vocab": 1500, "soft_cap": 30.0},
            "float32": {"rows": 256, "embed": 128, "vocab": 1000, "dtype": "float32"},
        },
    ),
    "grouped_matmul": (
        of_grouped_matmul,
        {
            "odd sizes": {"rows": 777, "groups": 6, "contracted": 192, "columns": 320},
            "even": {"rows": 1024, "groups": 8, "contracted": 256, "columns": 384},
        },
    ),
}
"""Cases by op; --tiny checks the first, with fewer positions."""
LENGTHS = {"full": (4096, 8192, 2048, 16384), "quick": (4096,), "tiny": (128,)}
LENGTHS["small"] = 512, 1024, 2048, 4096, 8192
LOGITS = {
    "full": (
        ("8,192 tokens, H 2048, V 131072", (8192, 2048, 131072)),
        ("32,768 tokens, H 2048, V 128256", (32768, 2048, 128256)),
        ("32,768 tokens, H 2560, V 128256", (32768, 2560, 128256)),
        ("8,192 tokens, H 2304, V 256000, soft cap", (8192, 2304, 256000, 30.0)),
    ),
    "small": (("1,024 tokens, H 256, V 16384", (1024, 256, 16384)),),
    "tiny": (("64 tokens, H 32, V 256", (64, 32, 256)),),
}
EXPERTS = {
    "full": (
        ("Qwen3 30B-A3B up, 65,536 rows", (65536, 128, 2048, 768)),
        ("Qwen3 30B-A3B down, 65,536 rows", (65536, 128, 768, 2048)),
        ("Mixtral 8x7B up, 16,384 rows", (16384, 8, 4096, 14336)),
        ("DeepSeek-V3 up, 64 of 256 experts, 32,768 rows", (32768, 64, 7168, 2048)),
    ),
    "small": (("64 experts, 4,096 rows", (4096, 64, 256, 128)),),
    "tiny": (("4 experts, 64 rows", (64, 4, 32, 48)),),
}


def checks(op: str, size: str) -> Iterator[Call]:
    """The calls that are compared with float64."""
    make, cases = CHECKS[op]
    if size == "tiny":
        cases = {"causal": {"length": 128}} if op == "attention" else dict([*cases.items()][:1])
    for name, settings in cases.items():
        yield make({"op": op, "case": name}, **settings)


def speeds(section: str, size: str) -> Iterator[Call]:
    """The calls that are timed: with --quick one of each kind, on a CPU in float32."""
    dtype = "float32" if size == "small" else "bfloat16"
    if section == "attention":
        yield from attention_speeds(size, dtype)
        return
    table, make = {
        "cross_entropy": (LOGITS, of_cross_entropy),
        "grouped_matmul": (EXPERTS, of_grouped_matmul),
    }[section]
    shapes = table["full"][:1] if size == "quick" else table[size]
    for name, shape in shapes:
        yield make({"shape": name, "dtype": dtype}, *shape, dtype=dtype)


def attention_speeds(size: str, dtype: str) -> Iterator[Call]:
    """16,384 tokens of 2,048 channels on a GPU, as in FlashAttention's benchmarks; one sequence of
    256 or 128 channels on a CPU."""
    width, tokens, window = {"small": (256, 0, 256), "tiny": (128, 0, 32)}.get(
        size, (2048, 16384, 1024)
    )
    dims = {"full": (128, 64), "quick": (128,)}.get(size, (64,))
    for dim, length, mask in itertools.product(dims, LENGTHS[size], ("causal", "window")):
        shape = {
            "head_dim": dim,
            "length": length,
            "batch": max(1, tokens // length),
            "heads": width // dim,
            "window": window if mask == "window" else None,
            "dtype": dtype,
        }
        yield of_attention({"mask": mask, **shape}, kv_heads=width // dim, **shape)


def _xla_attention(inputs: Inputs, request: Attention) -> jax.Array:
    window = (request.window - 1, 0) if request.window else None
    return jax.nn.dot_product_attention(
        *inputs[:3], scale=request.scale, is_causal=True, local_window_size=window,
        implementation="xla",
    )  # fmt: skip


def _whole_logits(
    x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, weights_M: jax.Array,
    request: CrossEntropy, bias_V: None,
) -> Losses:  # fmt: skip
    logits_MV = (x_MD @ head_DV).astype(jnp.float32)
    if cap := request.soft_cap:
        logits_MV = cap * jnp.tanh(logits_MV / cap)
    log_z_M = jax.nn.logsumexp(logits_MV, axis=1)
    nll_M = log_z_M - jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)[:, 0]
    return Losses((nll_M * weights_M).sum(), nll_M, log_z_M)
