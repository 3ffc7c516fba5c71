"""Attention by our own kernels for Hopper GPUs, in Pallas on Mosaic: the forward pass
(hopper_backward.py has the backward pass, hopper_tiles.py what both share). cuDNN comes first, but
takes no documents, caps or sinks; kernels on Pallas's Triton backend, which jax 0.12 deprecates,
are gone.

The forward kernel gives softmax(scores) v and the log-sum-exp (after FlashAttention-3, Shah et al.
2024, arXiv:2407.08608). A block of threads has 128 queries of one head, 64 for each computing
warpgroup; the third warpgroup loads keys and values ahead.

Shapes: B batch  T query time  S key time  N heads  K kv heads  H head dim  V value head dim.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxstack.kernels.attention import hopper_backward as backward
from maxstack.kernels.attention import hopper_tiles as parts
from maxstack.kernels.attention.hopper_tiles import BLOCK, COMPUTE, LOG2E, ROWS, Call, Refs, Ring
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request, differentiable

DIMS = 64, 128
LOWEST = -1e30
"""Maximum of no scores: finite, so that exp2(score - maximum) is 0 for a hidden one."""
DEFAULT = {"keys": 128, "stages": 2}
"""Keys of a forward step, and steps that are loaded ahead."""


def supports(case: AttentionCase) -> str | None:
    """Why the kernels cannot serve `case`; None if they can."""
    device, request = case.device, case.request
    if device.capability[0] != 9:
        return (
            f"its kernels are for compute capability 9.0 (H100, H200), and {device.kind} has "
            f"{'.'.join(map(str, device.capability))}"
        )
    # Asked for without importing it: choosing a backend must not load a plugin.
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
        "jax_plugins.xla_cuda12"
    ):
        return (
            "the assembler of CUDA 12.8 compiles masks wrongly; replace jax-cuda12-plugin with "
            "jax[cuda13]"
        )
    if case.dtype != "bfloat16":
        return f"dtype {case.dtype} is not bfloat16"
    if case.head_dim not in DIMS or case.value_dim != case.head_dim:
        return (
            f"head_dim {case.head_dim} with value head dim {case.value_dim} is neither 64 "
            "nor 128 for both"
        )
    if request.scale <= 0:
        return f"scale {request.scale} is not positive"
    return None


def candidates(case: AttentionCase) -> list[dict[str, int]]:
    """Block sizes to measure, the default first."""
    return [
        DEFAULT,
        {"keys": 64, "stages": 2},
        {"keys": 64, "stages": 3},
        *([{"keys": 128, "stages": 3}] if case.head_dim == 64 else []),
    ]


def run(
    inputs: Inputs, request: Request, blocks: Mapping[str, int] | None = None, interpret: Any = None
) -> jax.Array:
    """softmax(scores) v -> [B, T, N, V] in q's dtype. Sequences are padded to multiples of 128.
    `blocks`: of `candidates`.

    `interpret`: jax's InterpretGPUParams, for tests.
    """
    sizes = DEFAULT | dict(blocks or {})
    assert sizes.keys() == DEFAULT.keys() and sizes["keys"] in (64, BLOCK), sizes
    b, t, n, h = inputs.q_BTNH.shape
    s, kv = inputs.k_BSKH.shape[1:3]
    # Whole blocks, since copies of the tensor memory accelerator are of whole tiles.
    padded_t, padded_s = (-(-length // BLOCK) * BLOCK for length in (t, s))
    dtype, numbered = inputs.q_BTNH.dtype, len(inputs.same)
    shape = b, padded_t, padded_s, s, n, kv, h, dtype
    call = Call(*shape, request, numbered, sizes["keys"], sizes["stages"], interpret)
    return _attention(inputs, call)


def _forward(inputs: Inputs, call: Call) -> tuple[jax.Array, jax.Array]:
    o_BTNV, log_BNT = forward(call, [*_arrays(inputs, call), *_numbers(inputs, call)])
    if inputs.sinks_N is not None:
        # A sink only scales what the other keys give, so the kernels know nothing of sinks.
        sinks_N1 = inputs.sinks_N.astype(jnp.float32)[:, None] * LOG2E
        with_sinks_BNT = jnp.logaddexp2(log_BNT, sinks_N1)
        share_BNT = jnp.exp2(log_BNT - with_sinks_BNT)
        o_BTNV = (o_BTNV * share_BNT.swapaxes(1, 2)[..., None]).astype(o_BTNV.dtype)
        log_BNT = with_sinks_BNT
    t = inputs.q_BTNH.shape[1]
    return o_BTNV[:, :t], log_BNT[:, :, :t]


def _backward(
    call: Call, inputs: Inputs, log_BNT: jax.Array, mean_BNT: jax.Array, do_BTNV: jax.Array
) -> list[jax.Array]:
    t, s = inputs.q_BTNH.shape[1], inputs.k_BSKH.shape[1]
    # exp2(score - inf) is 0, so queries that see nothing have no gradient; -inf would give NaN.
    seen_BNT = jnp.where(log_BNT == -jnp.inf, jnp.inf, log_BNT)
    # Padded queries have do = 0 and delta = 0, so they add nothing to dk and dv.
    rows = [_padded(do_BTNV.astype(call.dtype), call.queries, 1)]
    rows += [_padded(x, call.queries, 2) for x in (seen_BNT, mean_BNT)]
    operands = [*_arrays(inputs, call), *rows, *_numbers(inputs, call)]
    dk, dv = backward.of_keys(call, operands)
    return [backward.of_queries(call, operands)[:, :t], dk[:, :s], dv[:, :s]]


_attention = differentiable(_forward, _backward, unit=1 / LOG2E)


def _arrays(inputs: Inputs, call: Call) -> list[jax.Array]:
    """q, k and v, padded to whole blocks."""
    lengths = call.queries, call.keys, call.keys
    return [_padded(x, size, 1) for x, size in zip(inputs[:3], lengths, strict=True)]


def _numbers(inputs: Inputs, call: Call) -> list[jax.Array]:
    """Numbers of the queries, then those of the keys."""
    return [
        _padded(jnp.broadcast_to(pair[side], (call.batch, pair[side].shape[1])), size, 1)
        for side, size in enumerate((call.queries, call.keys))
        for pair in inputs.same
    ]


def _padded(x: jax.Array, length: int, axis: int) -> jax.Array:
    return jnp.pad(x, [(0, length - x.shape[i] if i == axis else 0) for i in range(x.ndim)])


def forward(call: Call, operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """-> (output like q, log2 of the sum of exp(scores) [B, N, T], -inf where a query sees
    nothing). `operands`: q, k, v, then int32 numbers of queries [B, T] and of keys [B, S]."""
    tile = (ROWS, call.dim), call.dtype
    keys = (call.forward_keys, call.dim), call.dtype
    numbers = [((call.forward_keys,), jnp.int32)] * call.numbered
    scratch = {
        "query": parts.own_tiles(tile),
        "logs": parts.buffers(COMPUTE, ((ROWS,), jnp.float32)),
        "keys": Ring.scratch(call.stages, keys, *numbers),
        "values": Ring.scratch(call.stages, keys),
    }
    # Saved instead of the scores: the backward pass recomputes those from it.
    log = jax.ShapeDtypeStruct((call.batch, call.heads, call.queries), jnp.float32)
    out = [operands[0], log]
    count = call.heads, call.queries // BLOCK
    return tuple(parts.launch(call, "attention_forward", _kernel, operands, out, count, scratch, 2))


def _kernel(call: Call, refs: Refs, scratch: Any) -> None:
    q, k, v, *numbers, o, log = refs
    mine, theirs = numbers[: call.numbered], numbers[call.numbered :]
    head, row, warpgroup = parts.axes()
    # The last queries have the most keys, and go first.
    start = (call.queries // BLOCK - 1 - lax.axis_index("tile")) * BLOCK
    block = call.keys_of(start, BLOCK, call.forward_keys)
    # Two rings: a key's slot is free after the scores, a value's only after the softmax.
    keys, values = (Ring(scratch[name], call.stages) for name in ("keys", "values"))

    @pl.when(warpgroup < COMPUTE)
    def compute() -> None:
        # 2 x 232 + 40 registers a thread, for 128 threads each, fit into the 65,536 of a
        # multiprocessor.
        plgpu.set_max_registers(232, action="increase")
        first = start + warpgroup * ROWS
        here, log_tile = pl.ds(first, ROWS), scratch["logs"][0].at[warpgroup]
        sources, numbers = [q.at[row, here, head]], [x.at[row, here] for x in mine]
        # The queries stay for all steps.
        [query_tile], own = parts.fetch(call, scratch["query"], warpgroup, sources, numbers)
        nothing = call.full((ROWS, call.dim), 0), call.full((ROWS,), LOWEST), call.full((ROWS,), 0)
        visit = functools.partial(_visit, call, query_tile, own, keys, values, first, block.first)
        gathered, highest, total = parts.walk(
            call, call.keys_of(first, ROWS, call.forward_keys), block, visit, nothing
        )
        # The output is divided once, after all keys; a query that sees none gives zeros.
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        # The query has been read for the last time, so its buffer takes the output.
        query_tile[...] = (gathered * lax.broadcast_in_dim(inverse, gathered.shape, [0])).astype(
            call.dtype
        )
        log_tile[...] = jnp.where(total > 0, highest + jnp.log(total) * LOG2E, -jnp.inf)
        parts.store((query_tile, o.at[row, here, head]), (log_tile, log.at[row, head, here]))

    @pl.when(warpgroup == COMPUTE)
    def load() -> None:
        parts.load_keys(call, keys, values, (k, v, theirs), block, call.forward_keys)


def _visit(
    call: Call,
    query_tile: Any,
    own: Sequence[jax.Array],
    keys: Ring,
    values: Ring,
    first: Any,
    lo: Any,
    masked: bool,
    tile: Any,
    carry: Any,
) -> Any:
    """A step over a tile of keys, with online softmax: (output times the sum, highest score, sum)
    of the keys seen so far."""
    gathered, highest, total = carry
    (key_tile, *numbers), done = keys.take(tile - lo)
    s = call.product(query_tile, key_tile, transpose=True)
    others = call.columns(numbers)
    # The slot is free before the softmax, so that the loader refills it meanwhile.
    done()
    s, _ = call.scores(s)
    s = call.hide(s, masked, first, tile * call.forward_keys, own, others)
    higher = jnp.maximum(highest, s.max(axis=1))
    p = jnp.exp2(s - lax.broadcast_in_dim(higher, s.shape, [0]))
    shrink = jnp.exp2(highest - higher)
    # Kept unnormalised: a division by row once at the end instead of once a step.
    total = total * shrink + p.sum(axis=1)
    # Before the wait for values, so that it overlaps their copy.
    gathered = gathered * lax.broadcast_in_dim(shrink, gathered.shape, [0])
    (value_tile,), done = values.take(tile - lo)
    gathered = call.product(p.astype(call.dtype), value_tile, onto=gathered)
    done()
    return gathered, higher, total
