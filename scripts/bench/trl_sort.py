"""TRL's GRPO on the task of sorting eight digits, from a model in a Hugging Face folder: writes a
line of JSON for each step (seconds since training began, mean reward of its samples).

A prompt is BOS, the digits and `=`, an answer the digits in order and EOS, one token each. TRL gets
what makes it fastest here: one batch a step; no logging, evaluation, checkpoints or recomputation;
attention without a fused kernel, which is slower for 19 tokens; memory that is kept once freed.
torch.compile gains less than it takes.

example: python scripts/bench/trl_sort.py --model FOLDER --steps 150 --out trl.jsonl
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import arguments  # noqa: E402

WORDS = [*"0123456789", "<bos>", "=", "<eos>", "<pad>"]
"""By their token ids."""
DIGITS, EOS = 8, WORDS.index("<eos>")
PROMPTS, SAMPLES, RATE = 64, 8, 5e-4
THREADS = 2
SPINS = "10000"
"""Turns that a thread of OpenMP waits before it sleeps: the default stalls beside other work."""
MALLOPT = {
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 2**28),
    "M_ARENA_MAX": (-8, 1),
}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main() -> None:
    """Train, and write the figures."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--model", required=True, help="folder of a causal model of 14 tokens")
    parser.add_argument("--steps", type=int, default=150, help="(default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    with args.out.open("w") as out, tempfile.TemporaryDirectory() as folder:
        train(args, out, folder)


def problems(seed: int, count: int) -> list[dict[str, str]]:
    """Prompts, as words, with their answers as token ids: TRL is slower with lists of integers."""
    digits = np.random.default_rng(seed).integers(0, 10, (count, DIGITS))
    return [
        {"prompt": f"<bos> {joined(row)} =", "answer": joined([*np.sort(row), EOS])}
        for row in digits
    ]


def joined(ids: Iterable[int]) -> str:
    """Token ids as text."""
    return " ".join(map(str, ids))


def exact(completion_ids: list[list[int]], answer: list[str]) -> list[float]:
    """Reward of each answer."""
    return [float(joined(a) == b) for a, b in zip(completion_ids, answer, strict=True)]


def make_tokenizer() -> Any:
    """Words between spaces as the tokens of WORDS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {word: index for index, word in enumerate(WORDS)}
    base = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
    )


def train(args: argparse.Namespace, out: TextIO, folder: str) -> None:
    """Train, and write a line for each step."""
    os.environ |= QUIET
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        rewards[:] = exact(completion_ids, answer)
        return rewards

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.start
            write(out, step=state.global_step, seconds=seconds, reward=float(np.mean(rewards)))

    torch.set_num_threads(THREADS)
    keep_memory()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(GRPOConfig, args, folder),
        train_dataset=Dataset.from_list(problems(args.seed, PROMPTS * args.steps)),
        processing_class=make_tokenizer(),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def keep_memory() -> None:
    """Have glibc keep what is freed: its pages cost more than the work on some arrays."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in MALLOPT.values():
            libc.mallopt(parameter, value)


def settings(config: Any, args: argparse.Namespace, folder: str) -> Any:
    """GRPO with DAPO's clipping and mean over tokens, without a reference."""
    return config(
        output_dir=folder,
        max_steps=args.steps,
        seed=args.seed,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=DIGITS + 1,
        temperature=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def write(out: TextIO, **figures: float) -> None:
    """Write a line at once."""
    out.write(json.dumps(figures) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
