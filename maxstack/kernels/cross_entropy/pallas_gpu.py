"""Linear cross-entropy on GPUs: matmuls by XLA (cuBLAS), a block of rows at a time, and between
them one Triton kernel.

It reads a block's float32 logits once for their statistics and once more, from the end, for their
gradient, which it writes in x's dtype: all that a block costs beside three matmuls. To make logits
again instead would cost a fourth matmul, which is more from an embed of about a thousand on.
Shapes: M rows  R rows of a block  D embed  V vocab  S span of columns that a program holds.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from maxstack.kernels import triton
from maxstack.kernels.cross_entropy.by_rows import graded_by_rows, scores_by_rows, sizes
from maxstack.kernels.cross_entropy.differentiable import on_one_device
from maxstack.kernels.cross_entropy.request import Case, Gradients, Request
from maxstack.kernels.cross_entropy.softmax import Statistics, capped, multiply, together

LOWEST = -1e30
SPANS, WARPS = (4096, 2048, 8192), 8
MOST_LOGITS = 2**31 - 1


def supports(case: Case) -> str | None:
    """Why the kernel cannot serve `case`; None: it can."""
    if case.device.capability < (8, 0):
        return (
            f"its kernel needs compute capability 8.0, and {case.device.kind} has "
            f"{case.device.capability[0]}.{case.device.capability[1]}"
        )
    if case.dtype not in ("bfloat16", "float32"):
        return f"it computes in float32, and x is {case.dtype}"
    if sizes(case)[0] * case.vocab > MOST_LOGITS:
        return (
            f"a block of {sizes(case)[0]} rows with {case.vocab} columns has more than 2^31 logits"
        )
    return None


def candidates(case: Case) -> list[dict[str, int]]:
    """Rows of a block of logits, and columns that a program holds at a time."""
    rows = [size for size in sizes(case) if size * case.vocab <= MOST_LOGITS]
    return [
        {"rows": size, "span": span}
        for size in rows
        for span in SPANS
        if span < 2 * case.vocab or span == SPANS[0]
    ]


def forward(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(nll [M], log Z [M]); the vocabulary's other slices lie along `axes`, and targets count this
    slice's columns."""
    head_DV, blocks = head_DV.astype(x_MD.dtype), blocks or {}

    def step(x_RD: jax.Array, targets_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        return together(
            _statistics(multiply(x_RD, head_DV), bias_V, targets_R, request, blocks, interpret),
            axes,
        )

    return scores_by_rows(step, (x_MD, targets_M), head_DV.shape[1], blocks.get("rows"))


def graded(
    x_MD: jax.Array,
    head_DV: jax.Array,
    bias_V: jax.Array | None,
    targets_M: jax.Array,
    weights_M: jax.Array,
    request: Request,
    axes: tuple[str, ...] = (),
    blocks: Mapping[str, int] | None = None,
    interpret: bool = False,
) -> Any:
    """((nll, log Z), Gradients)."""
    head_DV, blocks = head_DV.astype(x_MD.dtype), blocks or {}

    def step(x_RD: jax.Array, targets_R: jax.Array, weights_R: jax.Array) -> Any:
        product_RV = multiply(x_RD, head_DV)
        if not axes:
            *found, d_RV = _whole(
                product_RV, bias_V, targets_R, weights_R, request, x_RD.dtype, blocks, interpret
            )
            return tuple(found), d_RV
        nll_R, log_z_R = together(
            _statistics(product_RV, bias_V, targets_R, request, blocks, interpret), axes
        )
        return (nll_R, log_z_R), _gradient(
            product_RV,
            bias_V,
            targets_R,
            weights_R,
            log_z_R,
            request,
            x_RD.dtype,
            blocks,
            interpret,
        )

    found, gradients = graded_by_rows(
        step,
        x_MD,
        head_DV,
        (targets_M, weights_M.astype(jnp.float32)),
        bias_V is not None,
        blocks.get("rows"),
    )
    return found, Gradients(*gradients)


run = on_one_device(forward, graded)


def _call(
    kernel: Any,
    product_RV: jax.Array,
    bias_V: jax.Array | None,
    per_row: tuple[jax.Array, ...],
    outs: tuple[Any, ...],
    passes: int,
    request: Request,
    blocks: Mapping[str, int],
    interpret: bool,
) -> Any:
    """`kernel` with a program a row; `outs`: None for a float32 [R], a dtype for an [R, V]."""
    rows, vocab = product_RV.shape
    assert rows * vocab <= MOST_LOGITS
    span = min(blocks.get("span", SPANS[0]), pl.next_power_of_2(vocab))
    shapes = [
        jax.ShapeDtypeStruct((rows,) if dtype is None else (rows, vocab), dtype or jnp.float32)
        for dtype in outs
    ]
    inputs = (product_RV, *(() if bias_V is None else (bias_V.astype(jnp.float32),)), *per_row)
    traffic = passes * product_RV.nbytes + sum(
        rows * vocab * dtype.itemsize for dtype in outs if dtype is not None
    )
    return triton.call(
        functools.partial(
            kernel, vocab=vocab, span=span, biased=bias_V is not None, request=request
        ),
        shapes,
        inputs,
        grid=(rows,),
        name="cross_entropy" + kernel.__name__,
        interpret=interpret,
        warps=WARPS,
        stages=2,
        flops=0,
        transcendentals=passes * rows * vocab,
        moved=traffic,
    )


def _statistics(
    product_RV: jax.Array, bias_V: jax.Array | None, targets_R: jax.Array, *how: Any
) -> Statistics:
    return Statistics(
        *_call(_read_rows, product_RV, bias_V, (targets_R,), (None, None, None), 1, *how)
    )


def _gradient(
    product_RV: jax.Array,
    bias_V: jax.Array | None,
    targets_R: jax.Array,
    weights_R: jax.Array,
    log_z_R: jax.Array,
    request: Request,
    dtype: Any,
    *how: Any,
) -> jax.Array:
    return _call(
        _write_rows,
        product_RV,
        bias_V,
        (targets_R, weights_R, log_z_R),
        (jnp.dtype(dtype),),
        1,
        request,
        *how,
    )[0]


def _whole(
    product_RV: jax.Array,
    bias_V: jax.Array | None,
    targets_R: jax.Array,
    weights_R: jax.Array,
    request: Request,
    dtype: Any,
    *how: Any,
) -> Any:
    return _call(
        _read_and_write_rows,
        product_RV,
        bias_V,
        (targets_R, weights_R),
        (None, None, jnp.dtype(dtype)),
        2,
        request,
        *how,
    )


class _Row:
    """A program's row, `span` columns at a time."""

    def __init__(
        self, refs: tuple[Any, ...], vocab: int, span: int, biased: bool, request: Request
    ):
        self.product, self.bias = refs[0], refs[1] if biased else None
        self.rest, self.row, self.request = refs[1 + biased :], pl.program_id(0), request
        self.vocab, self.span, self.pieces = vocab, span, -(-vocab // span)

    def logits(self, piece: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """(columns, logits, mask where columns may lie past the end)."""
        columns_S = piece * self.span + jnp.arange(self.span, dtype=jnp.int32)
        mask_S = None if self.vocab % self.span == 0 else columns_S < self.vocab
        other = None if mask_S is None else 0.0
        logits_S = plgpu.load(self.product.at[self.row, columns_S], mask=mask_S, other=other)
        if self.bias is not None:
            logits_S = logits_S + plgpu.load(self.bias.at[columns_S], mask=mask_S, other=other)
        return columns_S, capped(logits_S, self.request.soft_cap), mask_S

    def statistics(self, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(greatest logit, sum of exp(logits - it), target's logit or 0). Each lane keeps its own
        until the end."""

        def piece(i: Any, sums: Any) -> Any:
            top_S, sum_S, picked_S = sums
            columns_S, logits_S, mask_S = self.logits(i)
            e_S = jnp.exp(-jnp.abs(logits_S - top_S))
            new = (
                jnp.where(logits_S > top_S, logits_S, top_S),
                jnp.where(logits_S > top_S, sum_S * e_S + 1, sum_S + e_S),
            )
            if mask_S is not None:
                new = jnp.where(mask_S, new[0], top_S), jnp.where(mask_S, new[1], sum_S)
            return *new, jnp.where(columns_S == target, logits_S, picked_S)

        zero = jnp.zeros((self.span,), jnp.float32)
        top_S, sum_S, picked_S = jax.lax.fori_loop(
            0, self.pieces, piece, (zero + LOWEST, zero, zero)
        )
        top = jnp.max(top_S)
        return top, jnp.sum(sum_S * jnp.exp(top_S - top)), jnp.sum(picked_S)

    def write_gradient(
        self, out_ref: Any, target: jax.Array, weight: jax.Array, log_z: jax.Array
    ) -> None:
        """softmax.gradient, the last columns first: they may still be in the cache."""
        share = weight * (1 + 2 * self.request.z_loss * log_z)

        def piece(i: Any, _: None) -> None:
            columns_S, logits_S, mask_S = self.logits(self.pieces - 1 - i)
            d_S = share * jnp.exp(logits_S - log_z) - jnp.where(columns_S == target, weight, 0.0)
            if cap := self.request.soft_cap:
                d_S = d_S * (1 - (logits_S / cap) * (logits_S / cap))
            plgpu.store(out_ref.at[self.row, columns_S], d_S.astype(out_ref.dtype), mask=mask_S)

        jax.lax.fori_loop(0, self.pieces, piece, None)


def _read_rows(*refs: Any, **sizes: Any) -> None:
    row = _Row(refs, **sizes)
    targets_ref, *outs = row.rest
    for out_ref, value in zip(outs, row.statistics(targets_ref[row.row]), strict=True):
        out_ref[row.row] = value


def _write_rows(*refs: Any, **sizes: Any) -> None:
    row = _Row(refs, **sizes)
    targets_ref, weights_ref, log_z_ref, out_ref = row.rest
    row.write_gradient(out_ref, *(ref[row.row] for ref in (targets_ref, weights_ref, log_z_ref)))


def _read_and_write_rows(*refs: Any, **sizes: Any) -> None:
    row = _Row(refs, **sizes)
    targets_ref, weights_ref, nll_ref, log_z_ref, out_ref = row.rest
    target = targets_ref[row.row]
    top, total, picked = row.statistics(target)
    log_z = top + jnp.log(total)
    nll_ref[row.row], log_z_ref[row.row] = log_z - picked, log_z
    row.write_gradient(out_ref, target, weights_ref[row.row], log_z)
