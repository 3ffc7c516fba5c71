"""The kernels' calls that bench_gpu.py checks and times, with the shapes of
gpu.yml, and peers in plain JAX.

Shapes: M rows  E groups  N columns  D embed  V vocab.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import yaml

from maxstack.kernels import attention, cross_entropy, examples, grouped_matmul
from maxstack.kernels.attention.request import AttentionCase, Inputs
from maxstack.kernels.attention.request import Request as Attention
from maxstack.kernels.backends import Device, Op
from maxstack.kernels.cross_entropy import CrossEntropyCase, Losses
from maxstack.kernels.cross_entropy import Request as CrossEntropy
from maxstack.kernels.grouped_matmul import GroupedMatmulCase

TABLE = yaml.safe_load(Path(__file__).with_name("gpu.yml").read_text(encoding="utf-8"))


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


MAKE: dict[str, Callable[..., Call]] = {
    "attention": of_attention,
    "cross_entropy": of_logits,
    "grouped_matmul": of_experts,
}


def checks(section: str, size: str) -> Iterator[Call]:
    """The calls that are compared with float64."""
    cases = [*TABLE["checks"][section].items()]
    for name, case in cases[:1] if size == "tiny" else cases:
        yield MAKE[section](**case)._replace(row={"case": name})


def speeds(section: str, size: str) -> Iterator[Call]:
    """The calls that are timed: of attention by head dim, length and mask."""
    dtype, shapes = TABLE["sizes"][size]["dtype"], TABLE["sizes"][size][section]
    if section != "attention":
        for name, shape in shapes.items():
            row = {"shape": name, "dtype": dtype}
            yield MAKE[section](*shape, dtype=dtype)._replace(row=row)
        return
    masks = ("causal", None), ("window", shapes["window"])
    groups = itertools.product(shapes["head_dims"], shapes["lengths"], masks)
    for dim, length, (mask, window) in groups:
        row = {"head_dim": dim, "length": length, "heads": shapes["width"] // dim, "dtype": dtype}
        row |= {"batch": max(1, shapes["tokens"] // length), "window": window}
        yield of_attention(kv_heads=row["heads"], **row)._replace(row={"mask": mask, **row})


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
