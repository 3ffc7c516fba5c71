"""Linear cross-entropy on GPUs: matmuls by XLA (cuBLAS), a block of rows at a time, and between
them one Triton kernel.

It reads a block's float32 logits once for their statistics and once more, from the end, for their
gradient, which it writes in x's dtype: the only traffic of a block beside three matmuls. Making the
logits again instead would cost a fourth matmul, which is more from an embed of about a thousand on.
Shapes: M rows  R rows of a block  D embed  V vocab  S span of columns that a program holds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from maxstack.kernels import triton
from maxstack.kernels.backends import size_of
from maxstack.kernels.cross_entropy.by_rows import graded_by_rows, scores_by_rows, sizes
from maxstack.kernels.cross_entropy.differentiable import differentiable
from maxstack.kernels.cross_entropy.request import (
    Call,
    CrossEntropyCase,
    Gradients,
    Inputs,
    Request,
    Scores,
)
from maxstack.kernels.cross_entropy.softmax import (
    LOWEST,
    Statistics,
    capped,
    gradient,
    multiply,
    together,
)

SPANS, WARPS = (4096, 2048, 8192), 8
MOST_LOGITS = 2**31 - 1


def supports(case: CrossEntropyCase) -> str | None:
    """Why the kernel cannot serve `case`; None if it can."""
    if reason := case.device.older_than_ampere:
        return reason
    if case.dtype not in ("bfloat16", "float32"):
        return f"it computes in float32, and x is {case.dtype}"
    rows = sizes(case)[0]
    if rows * case.vocab > MOST_LOGITS:
        return f"a block of {rows} rows with {case.vocab} columns has more than 2^31 logits"
    return None


def candidates(case: CrossEntropyCase) -> list[dict[str, int]]:
    """Rows of a block of logits, and columns that a program holds at a time."""
    return [
        {"rows": rows, "span": span}
        for rows in sizes(case)
        if rows * case.vocab <= MOST_LOGITS
        for span in SPANS
        if span < 2 * case.vocab or span == SPANS[0]
    ]


def forward(inputs: Inputs, call: Call) -> Scores:
    """(nll [M], log Z [M])."""

    def step(x_RD: jax.Array, targets_R: jax.Array) -> Scores:
        return _scores(multiply(x_RD, inputs.head_DV), inputs.bias_V, targets_R, call)

    return scores_by_rows(step, inputs, call)


def graded(inputs: Inputs, call: Call) -> tuple[Scores, Gradients]:
    """`forward` and the gradients of the total."""

    def step(x_RD: jax.Array, targets_R: jax.Array, weights_R: jax.Array) -> Any:
        product_RV, bias_V, dtype = multiply(x_RD, inputs.head_DV), inputs.bias_V, x_RD.dtype
        if not call.axes:
            *scores, d_RV = _call(
                _read_and_write_rows,
                product_RV,
                bias_V,
                (targets_R, weights_R),
                (None, None, dtype),
                2,
                call,
            )
            return tuple(scores), d_RV
        nll_R, log_z_R = _scores(product_RV, bias_V, targets_R, call)
        per_row = targets_R, weights_R, log_z_R
        return (nll_R, log_z_R), _call(_write_rows, product_RV, bias_V, per_row, (dtype,), 1, call)[
            0
        ]

    per_row = inputs.targets_M, inputs.weights_M.astype(jnp.float32)
    return graded_by_rows(step, inputs, call, per_row)


run = differentiable(forward, graded)


def _scores(
    product_RV: jax.Array, bias_V: jax.Array | None, targets_R: jax.Array, call: Call
) -> Scores:
    part = _call(_read_rows, product_RV, bias_V, (targets_R,), (None, None, None), 1, call)
    return together(Statistics(*part), call.axes)


def _call(
    kernel: Any,
    product_RV: jax.Array,
    bias_V: jax.Array | None,
    per_row: tuple[jax.Array, ...],
    outs: tuple[Any, ...],
    passes: int,
    call: Call,
) -> Any:
    """`kernel` with a program a row; `outs`: None for a float32 [R], a dtype for an [R, V]."""
    rows, vocab = product_RV.shape
    assert rows * vocab <= MOST_LOGITS
    span = min(call.blocks.get("span", SPANS[0]), pl.next_power_of_2(vocab))
    shapes = [
        jax.ShapeDtypeStruct((rows,), jnp.float32)
        if dtype is None
        else jax.ShapeDtypeStruct((rows, vocab), dtype)
        for dtype in outs
    ]
    biases = () if bias_V is None else (bias_V.astype(jnp.float32),)
    return triton.call(
        functools.partial(
            kernel, vocab=vocab, span=span, biased=bias_V is not None, request=call.request
        ),
        shapes,
        (product_RV, *biases, *per_row),
        grid=(rows,),
        name="cross_entropy" + kernel.__name__,
        interpret=call.interpret,
        warps=WARPS,
        stages=2,
        flops=0,
        transcendentals=passes * rows * vocab,
        moved=passes * product_RV.nbytes + size_of(*(shape for shape in shapes if shape.ndim == 2)),
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
        logits_S = triton.load(self.product.at[self.row, columns_S], mask_S)
        if self.bias is not None:
            logits_S = logits_S + triton.load(self.bias.at[columns_S], mask_S)
        return columns_S, capped(logits_S, self.request.soft_cap), mask_S

    def statistics(self, target: jax.Array) -> Statistics:
        """Statistics of the row. Each lane keeps its own until the end."""

        def piece(i: Any, running: Statistics) -> Statistics:
            columns_S, logits_S, mask_S = self.logits(i)
            return running.with_logits(logits_S, columns_S == target, mask_S)

        zero = jnp.zeros((self.span,), jnp.float32)
        start = Statistics(zero + LOWEST, zero, zero)
        return jax.lax.fori_loop(0, self.pieces, piece, start).over_lanes()

    def write_gradient(
        self, out_ref: Any, target: jax.Array, weight: jax.Array, log_z: jax.Array
    ) -> None:
        """softmax.gradient, the last columns first: they may still be in the cache."""

        def piece(i: Any, _: None) -> None:
            columns_S, logits_S, mask_S = self.logits(self.pieces - 1 - i)
            d_S = gradient(logits_S, columns_S == target, weight, log_z, self.request)
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
