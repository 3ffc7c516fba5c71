"""PyTorch's side of bench_gpu.py, on the shapes that it gives as JSON on standard input; a line
`@bench {...}` for each row.

`train`: transformers' LlamaForCausalLM as a PyTorch user would run it: torch.compile, flash SDPA,
autocast to bfloat16 over float32 weights, fused AdamW; on a CPU, to try the path, not compiled.
`attention`: scaled_dot_product_attention by its flash and cuDNN backends.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench.workers import tell
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLASH = SDPBackend.FLASH_ATTENTION
BACKENDS = {"torch flash": FLASH, "torch cudnn": SDPBackend.CUDNN_ATTENTION}
REPEATS = 5
Row = dict[str, Any]


def main() -> None:
    """Every row, on the GPU if there is one. Of training smaller batches are left out once one
    fits."""
    given, fits = json.load(sys.stdin), 0
    for row in given["rows"]:
        if given["section"] == "attention":
            for name, backend in BACKENDS.items():
                attempt(row | {"backend": name}, lambda row, b=backend: attention(row, b))
        elif row["batch"] >= fits and attempt(row | {"program": "torch"}, train):
            fits = row["batch"]


def attempt(row: Row, measure: Callable[[Row], Row]) -> bool:
    """Print a row with its figures, or why there are none -> whether there are."""
    try:
        figures = {"status": "ok"} | measure(row)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        too_large = isinstance(error, torch.OutOfMemoryError)
        figures = {"status": "too large" if too_large else "failed", "reason": reason}
    tell(row=row | figures)
    return figures["status"] == "ok"


def typical(call: Callable[[], Any], calls: int) -> float:
    """Seconds of a call: the median of several rounds of `calls`, which the GPU runs without
    waiting for the host, after one that does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds[1:])


def attention(row: Row, backend: Any) -> Row:
    """Milliseconds and TFLOP/s, half of T S counted."""
    if row["window"]:
        raise NotImplementedError("without a dense mask SDPA has no window")
    shape = row["batch"], row["heads"], row["length"], row["head_dim"]
    dtype = getattr(torch, row["dtype"])
    q, k, v, weight = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    with sdpa_kernel([backend]):
        alone = typical(forward, 20)
        together = typical(lambda: torch.autograd.grad(forward(), inputs, weight), 7)
    flops, back = 2.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3], max(together - alone, 1e-9)
    return {
        "forward_ms": 1e3 * alone,
        "both_ms": 1e3 * together,
        "backward_ms": 1e3 * back,
        "forward_tflops": flops / alone / 1e12,
        "backward_tflops": 2.5 * flops / back / 1e12,
    }


def train(row: Row) -> Row:
    """Tokens a second and peak memory, warm-up and compilation apart."""
    import transformers

    torch.set_float32_matmul_precision("high")
    config = transformers.LlamaConfig(
        vocab_size=row["vocab"],
        hidden_size=row["embed"],
        intermediate_size=row["hidden"],
        num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"],
        num_key_value_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        tie_word_embeddings=True,
        max_position_embeddings=row["length"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model) if DEVICE == "cuda" else model
    tokens = torch.randint(0, row["vocab"], (row["batch"], row["length"]), device=DEVICE)

    def step() -> None:
        with sdpa_kernel([FLASH]), torch.autocast(DEVICE, torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = typical(step, 4)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens.numel() / seconds,
        "peak_bytes": peak,
    }


if __name__ == "__main__":
    main()
