"""transformers' generate, for serve_worker.py. int8 is PyTorch's dynamic quantization of every
linear layer."""

import time
from typing import Any

import torch
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}


class Clock(StoppingCriteria):
    """Notes when each token of a batch is there; never stops."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seconds.append(time.perf_counter() - self.begin)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(folder: str, dtype: str, threads: int, length: int) -> Any:
    """See serve_worker."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    if dtype == "int8":
        model = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def ask(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        clock, ids = Clock(), torch.tensor(prompts)
        with torch.inference_mode():
            answers = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return answers[:, ids.shape[1] :].tolist(), clock.seconds

    return ask
