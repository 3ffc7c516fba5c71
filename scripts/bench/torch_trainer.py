"""transformers' Trainer on the model of a folder and the rows of bench_cpu.py --model: fused AdamW,
autocast for bf16. Its arguments are the folder, f32 or bf16, the length of a row, rows of a batch,
and steps.
"""

import sys
import tempfile
import time

import numpy as np
import torch
from bench.workers import tell
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

folder, dtype, length, rows, steps = sys.argv[1:3] + [*map(int, sys.argv[3:])]
ends: list[float] = []


class Clock(TrainerCallback):
    """Notes when each step has ended."""

    def on_step_end(self, *_, **__):
        ends.append(time.time())


def row(index: int) -> dict[str, torch.Tensor]:
    """The row of maxstack's source `synthetic`."""
    drawn = np.random.Generator(np.random.PCG64(index)).integers(0, 4096, length + 1, np.int32)
    return {"input_ids": torch.from_numpy(drawn).long(), "labels": torch.from_numpy(drawn).long()}


with tempfile.TemporaryDirectory() as temporary:
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        TrainingArguments(
            temporary,
            max_steps=steps,
            per_device_train_batch_size=rows,
            train_sampling_strategy="sequential",
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_steps=1,
            bf16=dtype == "bf16",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[row(i) for i in range(rows * steps)],
        callbacks=[Clock()],
    )
    trainer.train()
loss = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
tell(loss=loss, ends=ends)
