"""Linear cross-entropy for bench_gpu.py: every backend against float64 on the device, then its time
and memory beside whole logits.

Shapes: M rows  D embed  V vocab.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.gpu_blocks import Blocks, Differs, Sizes
from bench.gpu_errors import compare, float64
from bench.gpu_programs import Job, Program, Ran, calls, drawn, elsewhere

from maxstack.kernels.backends import Device
from maxstack.kernels.cross_entropy import OP, reference
from maxstack.kernels.cross_entropy.request import Case, Request

Shape = tuple[int, int, int, float | None]
Total = Callable[..., jax.Array]
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
"""Plain jax: logits in bfloat16, softmax in float32, whatever the compiler makes of it."""


def checks(size: str, device: Device) -> Iterator[Job]:
    """One job for each backend and case."""
    yield from elsewhere(OP, device)
    for name, (shape, dtype) in list(CHECKS.items())[: 2 if size == "tiny" else None]:
        make = functools.partial(_make, shape, dtype)
        expected = functools.cache(functools.partial(_expected, make, shape[3]))
        for backend in OP.backends:
            if backend.name != "reference" and device.platform in backend.platforms:
                row = {"op": OP.name, "case": name, "backend": backend.name}
                yield Job(
                    "check",
                    row,
                    functools.partial(_checked, backend.name, shape[3], make),
                    lambda ran, expected=expected, dtype=dtype: compare(
                        ran["both"].outputs, expected(), dtype
                    ),
                    _refusal(backend.name, _case(shape, dtype, device)),
                )


def _checked(backend: str, cap: float | None, make: Callable[[], Any]) -> dict[str, Program]:
    return {"both": Program(_both(_ours(OP[backend].run, cap)), make)}


def _expected(make: Callable[[], Any], cap: float | None) -> dict[str, np.ndarray]:
    return float64(_both(_ours(reference.run, cap)), make())


def _case(shape: Shape, dtype: str, device: Device) -> Case:
    return Case(Request(soft_cap=shape[3]), *shape[:3], dtype, False, False, device)


def _make(shape: Shape, dtype: str) -> tuple[jax.Array, ...]:
    """Hidden states, head, targets, weights of the tokens: some are 0, as padding is."""
    rows, embed, vocab, _ = shape
    targets_M = np.random.default_rng(0).integers(0, vocab, rows, np.int32)
    weights_M = (np.arange(rows) % 7 > 0).astype(np.float32)
    return (
        drawn(0, (rows, embed), dtype),
        drawn(1, (embed, vocab), dtype) * (embed**-0.5),
        jnp.asarray(targets_M),
        jnp.asarray(weights_M),
    )


def _ours(run: Callable[..., Any], cap: float | None, blocks: Blocks = None) -> Total:
    def total(
        x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, weights_M: jax.Array
    ) -> jax.Array:
        return run(
            x_MD,
            head_DV,
            targets_M,
            weights_M,
            Request(soft_cap=cap),
            None,
            **({"blocks": blocks} if blocks else {}),
        ).total

    return total


def _whole(cap: float | None) -> Total:
    def total(
        x_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, weights_M: jax.Array
    ) -> jax.Array:
        logits_MV = (x_MD @ head_DV).astype(jnp.float32)
        logits_MV = logits_MV if cap is None else cap * jnp.tanh(logits_MV / cap)
        picked_M = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)[:, 0]
        return ((jax.nn.logsumexp(logits_MV, axis=1) - picked_M) * weights_M).sum()

    return total


def _both(total: Total) -> Callable[..., dict[str, jax.Array]]:
    def both(x_MD: jax.Array, *others: jax.Array) -> dict[str, jax.Array]:
        value, (dx_MD, dhead_DV) = jax.value_and_grad(total, argnums=(0, 1))(x_MD, *others)
        return {"loss": value, "dx": dx_MD, "dhead": dhead_DV}

    return both


def speeds(
    size: str,
    device: Device,
    peak: float | None,
    allowed: Callable[[str, str, str], str | None],
    sizes: Sizes,
) -> Iterator[Job]:
    """One job for each backend, shape and size of blocks."""
    dtype = "float32" if size == "small" else "bfloat16"
    for name, shape in SHAPES[size].items():
        for backend in [
            WHOLE,
            *(backend.name for backend in OP.backends if device.platform in backend.platforms),
        ]:
            case = _case(shape, dtype, device)
            refused = _refusal(backend, case)
            if refused is None and backend not in (WHOLE, "reference"):
                refused = allowed(OP.name, backend, "odd sizes, soft cap" if shape[3] else "plain")
            for place, blocks in enumerate(sizes.of(OP, backend, case)):
                yield _speed(
                    name,
                    shape,
                    backend,
                    peak,
                    refused,
                    blocks,
                    functools.partial(sizes.differs, place == 0),
                    dict(case.shape_class),
                )


def _speed(
    name: str,
    shape: Shape,
    backend: str,
    peak: float | None,
    refused: str | None,
    blocks: Blocks,
    differs: Differs,
    shape_class: dict[str, Any],
) -> Job:
    rows, embed, vocab, cap = shape
    dtype = str(shape_class["dtype"])
    flops, make = 2.0 * rows * embed * vocab, functools.partial(_make, shape, dtype)

    def programs() -> dict[str, Program]:
        total, times = (
            _whole(cap) if backend == WHOLE else _ours(OP[backend].run, cap, blocks),
            calls(flops, peak),
        )
        return {
            "forward": Program(total, make, times),
            "both": Program(_both(total), make, max(1, times // 3)),
            "memory": Program(_both(total), make, runs=False),
        }

    def finish(ran: dict[str, Ran]) -> dict[str, Any]:
        forward, both = ran["forward"].typical, ran["both"].typical
        found = {
            "forward_ms": 1e3 * forward,
            "both_ms": 1e3 * both,
            "forward_tflops": flops / forward / 1e12,
            "both_tflops": 3 * flops / both / 1e12,
            "memory_bytes": ran["memory"].temporaries + ran["memory"].results,
            "op": OP.name,
            "shape_class": shape_class,
        }
        return found | differs(f"{backend} {name}", ran["both"].outputs, dtype)

    row = {
        "shape": name,
        "rows": rows,
        "embed": embed,
        "vocab": vocab,
        "soft_cap": cap,
        "dtype": dtype,
        "backend": backend,
        "blocks": blocks,
    }
    return Job("cross_entropy", row, programs, finish, refused)


def _refusal(backend: str, case: Case) -> str | None:
    try:
        return None if backend == WHOLE else OP[backend].supports(case)
    except ImportError as error:
        return f"failed: {error}"
