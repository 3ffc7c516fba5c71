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
    flops: tuple[float, float]
    """Of the forward and of the backward pass."""
    peer: tuple[str, Callable[..., Any]]
    """A name, and what runs in place of a backend."""
    dense: str | None = None
    """Why a peer or the reference, which hold everything in memory, is not tried."""
    row: dict[str, Any] = {}
    """Columns that name the call in the results."""


def of_attention(
    length: int,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    value_dim: int | None = None,
    keys: int | None = None,
    dtype: str = "bfloat16",
    packed: bool = False,
    sinks: bool = False,
    **request: Any,
) -> Call:
    """A call of attention; further keys come before the queries. Causal FLOPs without a window
    count half of T S, as FlashAttention's benchmarks do."""
    keys = keys or length
    asked = Attention(head_dim**-0.5, offset=keys - length, **request)
    dims = heads, kv_heads, head_dim, value_dim or head_dim
    case = AttentionCase(asked, length, keys, *dims, dtype, packed, sinks, Device.here())
    span = min(request.get("window") or length, length)
    pairs = length * keys / 2 if span == length else span * (span + 1) / 2 + (length - span) * span
    forward = 4.0 * batch * heads * pairs * head_dim
    peer = "jax.nn xla", _xla_attention
    dense = f"the whole score matrix of {length} positions is not tried" if length > 4096 else None
    example = examples.attention_example(case, batch)
    return Call(attention.OP, case, example, (forward, 2.5 * forward), peer, dense)


def of_logits(
    rows: int, embed: int, vocab: int, soft_cap: float | None = None, dtype: str = "bfloat16"
) -> Call:
    """A call of linear cross-entropy."""
    request, device = CrossEntropy(soft_cap=soft_cap), Device.here()
    case = CrossEntropyCase(request, rows, embed, vocab, dtype, False, False, device)
    flops, peer = 2.0 * rows * embed * vocab, ("whole logits", _whole_logits)
    return Call(
        cross_entropy.OP, case, examples.cross_entropy_example(case), (flops, 2 * flops), peer
    )


def of_experts(
    rows: int, groups: int, contracted: int, columns: int, dtype: str = "bfloat16"
) -> Call:
    """A call of the grouped matmul; one matrix for all rows is the speed that it could reach."""
    case = GroupedMatmulCase(rows, groups, contracted, columns, dtype, Device.here())
    flops, size = 2.0 * rows * contracted * columns, 4 * rows * groups * columns
    peer = "one dense matmul", lambda x_MD, w_EDN, sizes_E: x_MD @ w_EDN[0]
    dense = f"its [rows, groups, columns] would take {size / 2**30:.0f} GiB"
    example = examples.grouped_matmul_example(case)
    return Call(
        grouped_matmul.OP, case, example, (flops, 2 * flops), peer, dense if size > 2**32 else None
    )


CHECKS: dict[str, Callable[[], dict[str, Call]]] = {
    "attention": lambda: {
        "causal": of_attention(1024, 2),
        "window": of_attention(1024, 2, head_dim=64, window=200),
        "documents": of_attention(777, 2, packed=True),
        "documents, window": of_attention(1000, head_dim=64, window=100, packed=True),
        "soft cap": of_attention(512, soft_cap=30.0),
        "sinks": of_attention(512, head_dim=64, sinks=True, window=128),
        "not causal": of_attention(512, causal=False),
        "offset": of_attention(256, keys=640, head_dim=64),
        "MLA": of_attention(512, kv_heads=8, head_dim=192, value_dim=128),
        "float32": of_attention(500, dtype="float32"),
    },
    "cross_entropy": lambda: {
        "odd sizes, soft cap": of_logits(333, 192, 1500, 30.0),
        "float32": of_logits(256, 128, 1000, dtype="float32"),
    },
    "grouped_matmul": lambda: {
        "odd sizes": of_experts(777, 6, 192, 320),
        "even": of_experts(1024, 8, 256, 384),
    },
}
"""Cases by section; --tiny checks the first."""
LENGTHS = {"quick": (4096,), "small": (512, 1024, 2048, 4096, 8192), "tiny": (128,)}
SHAPES = {
    "cross_entropy": {
        "8,192 tokens, H 2048, V 131072": (8192, 2048, 131072),
        "32,768 tokens, H 2048, V 128256": (32768, 2048, 128256),
        "32,768 tokens, H 2560, V 128256": (32768, 2560, 128256),
        "8,192 tokens, H 2304, V 256000, soft cap": (8192, 2304, 256000, 30.0),
    },
    "grouped_matmul": {
        "Qwen3 30B-A3B up, 65,536 rows": (65536, 128, 2048, 768),
        "Qwen3 30B-A3B down, 65,536 rows": (65536, 128, 768, 2048),
        "Mixtral 8x7B up, 16,384 rows": (16384, 8, 4096, 14336),
        "DeepSeek-V3 up, 64 of 256 experts, 32,768 rows": (32768, 64, 7168, 2048),
    },
}
"""With --quick the first of each."""
SMALL = {
    ("cross_entropy", "small"): {"1,024 tokens, H 256, V 16384": (1024, 256, 16384)},
    ("cross_entropy", "tiny"): {"64 tokens, H 32, V 256": (64, 32, 256)},
    ("grouped_matmul", "small"): {"64 experts, 4,096 rows": (4096, 64, 256, 128)},
    ("grouped_matmul", "tiny"): {"4 experts, 64 rows": (64, 4, 32, 48)},
}


def checks(section: str, size: str) -> Iterator[Call]:
    """The calls that are compared with float64."""
    cases = [*CHECKS[section]().items()]
    for name, call in cases[:1] if size == "tiny" else cases:
        yield call._replace(row={"case": name})


def speeds(section: str, size: str) -> Iterator[Call]:
    """The calls that are timed, on a CPU in float32."""
    dtype = "float32" if size == "small" else "bfloat16"
    if section == "attention":
        yield from attention_speeds(size, dtype)
        return
    make = of_logits if section == "cross_entropy" else of_experts
    shapes = [*SMALL.get((section, size), SHAPES[section]).items()]
    for name, shape in shapes[:1] if size == "quick" else shapes:
        yield make(*shape, dtype=dtype)._replace(row={"shape": name, "dtype": dtype})


def attention_speeds(size: str, dtype: str) -> Iterator[Call]:
    """16,384 tokens of 2,048 channels on a GPU, as in FlashAttention's benchmarks; one sequence of
    256 or 128 channels on a CPU."""
    width, tokens, window = {"small": (256, 0, 256), "tiny": (128, 0, 32)}.get(
        size, (2048, 16384, 1024)
    )
    dims = {"full": (128, 64), "quick": (128,)}.get(size, (64,))
    lengths = LENGTHS.get(size, (4096, 8192, 2048, 16384))
    for dim, length, mask in itertools.product(dims, lengths, ("causal", "window")):
        shape = {"head_dim": dim, "length": length, "heads": width // dim, "dtype": dtype}
        shape |= {"batch": max(1, tokens // length), "window": window if mask == "window" else None}
        call = of_attention(kv_heads=width // dim, **shape)
        yield call._replace(row={"mask": mask, **shape})


def _xla_attention(inputs: Inputs, request: Attention) -> jax.Array:
    window = (request.window - 1, 0) if request.window else None
    options = {"scale": request.scale, "is_causal": True, "local_window_size": window}
    return jax.nn.dot_product_attention(*inputs[:3], **options, implementation="xla")


def _whole_logits(
    x_MD: Any, head_DV: Any, targets_M: Any, weights_M: Any, request: CrossEntropy, bias_V: None
) -> Losses:
    logits_MV = (x_MD @ head_DV).astype(jnp.float32)
    if cap := request.soft_cap:
        logits_MV = cap * jnp.tanh(logits_MV / cap)
    log_z_M = jax.nn.logsumexp(logits_MV, axis=1)
    nll_M = log_z_M - jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)[:, 0]
    return Losses((nll_M * weights_M).sum(), nll_M, log_z_M)
