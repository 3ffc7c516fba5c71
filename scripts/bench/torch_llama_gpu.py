"""The training step of gpu_train.py as a PyTorch user would run it: transformers' LlamaForCausalLM,
torch.compile, flash SDPA, autocast to bfloat16 over float32 weights, fused AdamW. On a CPU, to try
the path, it is not compiled.

bench_gpu.py gives the shape as JSON on standard input, and reads a line `@bench {...}` for each
batch size.
example: cd scripts; echo '{"shape": {"vocab": 4096, "embed": 256, "hidden": 1024, "layers": 4,
"heads": 4, "kv_heads": 2, "head_dim": 64, "length": 512}, "batches": [8]}' | python -m
bench.torch_llama_gpu
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

if __name__ == "__main__":  # before torch is imported, which --help does not need
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

WARM_UP, GROUPS, STEPS = 3, 3, 5


def main() -> None:
    """Batch sizes in their order; smaller ones are left out once one fits."""
    given, fits = json.load(sys.stdin), 0
    for batch in given["batches"]:
        row = {
            "program": "torch",
            "batch": batch,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        if batch < fits:
            continue
        try:
            row |= {"status": "ok"} | measured(given["shape"], batch)
            fits = batch
        except torch.OutOfMemoryError as error:
            row |= {"status": "too large", "reason": str(error).splitlines()[0][:300]}
        except Exception as error:
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:400]}
        print("@bench " + json.dumps({"row": row}), flush=True)


def measured(shape: dict[str, int], batch: int) -> dict[str, Any]:
    """Tokens a second and peak memory, warm-up and compilation apart."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["embed"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=True,
        max_position_embeddings=shape["length"],
        use_cache=False,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step = torch.compile(model) if device == "cuda" else model
    held = [
        torch.randint(0, shape["vocab"], (batch, shape["length"]), device=device) for _ in range(4)
    ]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds, begun = [], time.perf_counter()
    for group in range(GROUPS + 1):
        steps = STEPS if group else WARM_UP
        begin = time.perf_counter()
        for n in range(steps):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.autocast(device, torch.bfloat16):
                loss = step(input_ids=held[n % len(held)], labels=held[n % len(held)]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait()
        if group:
            seconds.append((time.perf_counter() - begin) / steps)
        else:
            warm = time.perf_counter() - begun
    found = {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": batch * shape["length"] / statistics.median(seconds),
        "losses": [loss.item()],
        "compile_seconds": round(warm, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        del model, step, optimizer, loss
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


if __name__ == "__main__":
    main()
