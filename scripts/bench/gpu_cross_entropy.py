"""Linear cross-entropy for bench_gpu.py: time and memory beside whole logits.

Shapes: M rows  D embed  V vocab.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.gpu_ops import Bench, Call, Run, backends_for, elsewhere
from bench.gpu_ops import checks as checks_of
from bench.gpu_ops import speeds as speeds_of
from bench.gpu_programs import Job, Ran, drawn

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy import OP, CrossEntropyCase, Losses, Request

Shape = tuple[int, int, int, float | None]
CHECKS: dict[str, tuple[Shape, str]] = {
    "plain": ((512, 256, 2048, None), "bfloat16"),
    "odd sizes, soft cap": ((333, 192, 1500, 30.0), "bfloat16"),
    "float32": ((256, 128, 1000, None), "float32"),
}
SHAPES: dict[str, dict[str, Shape]] = {
    "full": {
        "8,192 tokens, H 2048, V 131072": (8192, 2048, 131072, None),
        "32,768 tokens, H 2048, V 128256": (32768, 2048, 128256, None),
        "32,768 tokens, H 2560, V 128256": (32768, 2560, 128256, None),
        "8,192 tokens, H 2304, V 256000, soft cap": (8192, 2304, 256000, 30.0),
    },
    "quick": {"8,192 tokens, H 2048, V 131072": (8192, 2048, 131072, None)},
    "small": {"1,024 tokens, H 256, V 16384": (1024, 256, 16384, None)},
    "tiny": {"64 tokens, H 32, V 256": (64, 32, 256, None)},
}
WHOLE = "whole logits"
"""Plain jax: logits in bfloat16, softmax in float32, left to the compiler."""


def checks(size: str, device: Device) -> Iterator[Job]:
    """One job for each backend and case."""
    yield from elsewhere(OP, device)
    for name, (shape, dtype) in list(CHECKS.items())[: 2 if size == "tiny" else None]:
        yield from checks_of(_call(shape, dtype, device), name)


def speeds(bench: Bench) -> Iterator[Job]:
    """One job for each backend, shape and size of blocks."""
    dtype = "float32" if bench.size == "small" else "bfloat16"
    for name, shape in SHAPES[bench.size].items():
        row = dict(
            zip(("shape", "rows", "embed", "vocab", "soft_cap"), (name, *shape), strict=True)
        )
        flops = 2.0 * shape[0] * shape[1] * shape[2]
        for backend in [WHOLE, *backends_for(OP, bench.device)]:
            yield from speeds_of(
                bench,
                "cross_entropy",
                _call(shape, dtype, bench.device),
                row | {"dtype": dtype},
                backend,
                "odd sizes, soft cap" if shape[3] else "plain",
                flops,
                functools.partial(_figures, flops),
                peer=_whole if backend == WHOLE else None,
                memory=True,
            )


def _figures(flops: float, ran: dict[str, Ran]) -> dict[str, Any]:
    forward, both = ran["forward"].typical, ran["both"].typical
    return {
        "forward_ms": 1e3 * forward,
        "both_ms": 1e3 * both,
        "forward_tflops": flops / forward / 1e12,
        "both_tflops": 3 * flops / both / 1e12,
        "memory_bytes": ran["memory"].temporaries + ran["memory"].results,
    }


def _call(shape: Shape, dtype: str, device: Device) -> Call:
    rows, embed, vocab, cap = shape
    request = Request(soft_cap=cap)

    def make() -> tuple[jax.Array, ...]:
        """Hidden states, head, targets, and weights of the tokens, some 0 as for padding."""
        targets_M = np.random.default_rng(0).integers(0, vocab, rows, np.int32)
        weights_M = (np.arange(rows) % 7 > 0).astype(np.float32)
        return (
            drawn(0, (rows, embed), dtype),
            drawn(1, (embed, vocab), dtype) * (embed**-0.5),
            jnp.asarray(targets_M),
            jnp.asarray(weights_M),
        )

    def total(run: Run) -> Callable[..., jax.Array]:
        return lambda *inputs: run(*inputs, request, None).total

    def both(run: Run) -> Callable[..., dict[str, jax.Array]]:
        def both(*inputs: jax.Array) -> dict[str, jax.Array]:
            value, (dx_MD, dhead_DV) = jax.value_and_grad(total(run), argnums=(0, 1))(*inputs)
            return {"loss": value, "dx": dx_MD, "dhead": dhead_DV}

        return both

    case = CrossEntropyCase(request, rows, embed, vocab, dtype, False, False, device)
    return Call(OP, case, make, total, both)


def _whole(
    x_MD: jax.Array,
    head_DV: jax.Array,
    targets_M: jax.Array,
    weights_M: jax.Array,
    request: Request,
    bias_V: None,
) -> Losses:
    logits_MV = (x_MD @ head_DV).astype(jnp.float32)
    if cap := request.soft_cap:
        logits_MV = cap * jnp.tanh(logits_MV / cap)
    picked_M = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)[:, 0]
    log_z_M = jax.nn.logsumexp(logits_MV, axis=1)
    nll_M = log_z_M - picked_M
    return Losses((nll_M * weights_M).sum(), nll_M, log_z_M)
