"""vLLM's engine on a CPU, for serve_worker.py. It has no int8 of its own for an unquantized
folder."""

import os
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def load(folder: str, dtype: str, threads: int, length: int) -> Any:
    """See serve_worker."""
    if dtype not in DTYPES:
        raise NotImplementedError("int8 needs a checkpoint that was quantized before")
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:threads]))
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=DTYPES[dtype],
        max_model_len=length,
        max_num_seqs=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
    ).llm_engine
    asked = 0

    def ask(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        nonlocal asked
        rules = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin, seconds = time.perf_counter(), []
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            asked += 1
            answers[str(asked)] = []
            engine.add_request(str(asked), {"prompt_token_ids": prompt}, rules)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = [*output.outputs[0].token_ids]
            now = time.perf_counter() - begin
            while len(seconds) < min(map(len, answers.values())):
                seconds.append(now)
        return [*answers.values()], seconds

    return ask
