"""torch.nn.functional.scaled_dot_product_attention on the shapes of gpu_attention.py, its flash and
cuDNN backends.

bench_gpu.py gives the cases as JSON on standard input, and reads a line `@bench {...}` for each
case and backend.
example: cd scripts; echo '{"cases": [{"batch": 1, "heads": 16, "length": 4096, "head_dim": 128,
"window": null, "dtype": "bfloat16"}], "calls": 20}' | python -m bench.torch_attention_gpu
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # before torch is imported, which --help does not need
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

BACKENDS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}
REPEATS = 5


def main() -> None:
    """Every case, on the GPU if there is one."""
    given = json.load(sys.stdin)
    for case in given["cases"]:
        for name, backend in BACKENDS.items():
            row = {"section": "attention", **case, "backend": name}
            if case["window"]:
                row |= {
                    "status": "unsupported",
                    "reason": "without a dense mask, scaled_dot_product_attention has no window",
                }
            else:
                try:
                    with sdpa_kernel([backend]):
                        row |= {"status": "ok"} | measured(case, given["calls"])
                except Exception as error:
                    row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
            print("@bench " + json.dumps({"row": row}), flush=True)


def measured(case: dict[str, Any], calls: int) -> dict[str, float]:
    """Milliseconds and TFLOP/s, half of T S counted; the backward pass is forward and backward less
    forward."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = case["batch"], case["heads"], case["length"], case["head_dim"]
    q, k, v, do = (
        torch.randn(shape, device=device, dtype=getattr(torch, case["dtype"]), requires_grad=i < 3)
        for i in range(4)
    )

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), do)

    alone, together = timed(forward, calls, device), timed(both, max(1, calls // 3), device)
    back, flops = max(together - alone, 1e-9), 2.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
    return {
        "forward_ms": 1e3 * alone,
        "both_ms": 1e3 * together,
        "backward_ms": 1e3 * back,
        "forward_tflops": flops / alone / 1e12,
        "backward_tflops": 2.5 * flops / back / 1e12,
    }


def timed(call: Callable[[], Any], calls: int, device: str) -> float:
    """Seconds of a call: the median of several rounds of `calls`, which the GPU runs without
    waiting for the host."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
