"""The device's ceilings for bench_gpu.py: one large matmul and one copy, on random numbers."""

from collections.abc import Iterator

from bench.gpu_ops import Bench
from bench.gpu_programs import Job, Program, calls, drawn

SIDES = {"full": 8192, "quick": 8192, "small": 1024, "tiny": 128}
COPIED = {"full": 2**30, "quick": 2**30, "small": 2**26, "tiny": 2**16}


def speeds(bench: Bench) -> Iterator[Job]:
    """Rows `matmul` (TFLOP/s) and `copy` (bytes read and written a second)."""
    side, elements = SIDES[bench.size], COPIED[bench.size] // 2
    flops = 2.0 * side**3
    matmul = Program(
        lambda x, y: x @ y,
        lambda: (drawn(0, (side, side), "bfloat16"), drawn(1, (side, side), "bfloat16")),
        calls(flops, bench.peak),
    )
    copy = Program(
        lambda x: x + 1, lambda: (drawn(0, (elements,), "bfloat16"),), 20 if bench.peak else 1
    )
    yield Job(
        "ceilings",
        {"what": f"matmul {side} x {side} x {side}, bfloat16"},
        lambda: {"one": matmul},
        lambda ran: {"tflops": flops / ran["one"].typical / 1e12},
    )
    yield Job(
        "ceilings",
        {"what": f"{2 * elements / 2**20:,.3g} MiB read and as many written"},
        lambda: {"one": copy},
        lambda ran: {"gigabytes_per_second": 4 * elements / ran["one"].typical / 1e9},
    )
