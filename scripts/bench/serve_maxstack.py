"""maxstack's engine, for serve_worker.py. int8 is the preset `int8` of configs/quantization."""

import os
import time
from collections.abc import Sequence
from typing import Any

from maxstack.inference.engine_setup import start
from maxstack.inference.request import Sampling

os.environ["JAX_PLATFORMS"] = "cpu"
DTYPES = {
    "f32": ("model.dtype=float32",),
    "bf16": ("model.dtype=bfloat16",),
    "int8": ("model.dtype=float32", "quantization=int8", "quantization.mode=ptq"),
}


def load(folder: str, dtype: str, threads: int, length: int, overrides: Sequence[str]) -> Any:
    """See serve_worker. XLA takes as many threads as the process may use cores."""
    settings = *DTYPES[dtype], f"serve.max_length={length}", "serve.prefix_cache=false"
    engine = start(folder, [*settings, *overrides]).engine

    def ask(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        rules = Sampling(max_tokens=tokens, temperature=0.0)
        begin, seconds = time.perf_counter(), []
        answers: dict[int, list[int]] = {engine.add(prompt, rules): [] for prompt in prompts}
        while engine.busy:
            for output in engine.step():
                answers[output.request] += [token.token for token in output.tokens]
            now = time.perf_counter() - begin
            while len(seconds) < min(map(len, answers.values())):
                seconds.append(now)
        return [*answers.values()], seconds

    return ask
