"""Causal attention over one long row, forward and backward, on a CPU: 4 heads, 2 kv heads, head_dim
64, float32.

Prints one JSON line: least seconds of a call, and of processor time, bytes of XLA's temporaries,
and by how many bytes the process's resident memory peaked above what it held before the first call.
example: python scripts/bench/attention_cpu.py ours 2048 3
"""

import argparse
import json
import time
from pathlib import Path

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("kind", choices=("ours", "jax"))
parser.add_argument("length", type=int)
parser.add_argument("calls", type=int)
args = parser.parse_args()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from arguments import resident  # noqa: E402

T = args.length
N, K, H = 4, 2, 64


def attend(q, k, v):
    if args.kind == "jax":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    from maxstack.kernels.attention import attention
    from maxstack.kernels.attention.request import Request

    return attention(q, k, v, None, Request(H**-0.5))


def both(q, k, v, do):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(do)


keys = jax.random.split(jax.random.key(0), 4)
inputs = [
    jax.random.normal(key, (1, T, heads, H), jnp.float32)
    for key, heads in zip(keys, (N, K, K, N), strict=True)
]
run = jax.jit(both).lower(*inputs).compile()
jax.block_until_ready(inputs)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
seconds, processor = [], []
for _ in range(args.calls):
    begin, busy = time.perf_counter(), time.process_time()
    out = jax.block_until_ready(run(*inputs))
    seconds.append(time.perf_counter() - begin)
    processor.append(time.process_time() - busy)
    del out
print(
    json.dumps(
        {
            "seconds": min(seconds),
            "temporary_bytes": run.memory_analysis().temp_size_in_bytes,
            "grown_bytes": resident("VmHWM") - before,
            "processor_seconds": min(processor),
        }
    )
)
