"""smollm2/answers.npz: what transformers and peft compute, in float32, of the published
SmolLM2-135M-Instruct (tests/smollm2.py), which they read from its GGUF file.

`tokens` int32 [B, T]: greedy answers that no token ends, and `leads` float32 [B, T] of the best
logit of each; `perplexity` of a page, in float64 (in float32 transformers is 1.2e-4 below it on
such a page, and maxstack 4e-6); `losses` [steps] of transformers' Trainer on the answers of
conversations, with an adapter.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from smollm2 import BATCH, CONVERSATIONS, PAGE, RATE, ROWS, STEPS, TOKENS, fetch, write_adapter

NAMES, CLOSE = ["smollm2"], 1e-5


def make(name: str, out: Path) -> None:
    """Write the file."""
    folder, file = fetch().parent, fetch().name
    words = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()
    tokens, leads = zip(*(greedy(model, words, row) for row in ROWS), strict=True)
    page = words(PAGE, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(page).logits[0, :-1]
    (out / name).mkdir()
    np.savez_compressed(
        out / name / "answers.npz",
        tokens=torch.stack(tokens).int(),
        leads=torch.stack(leads),
        perplexity=torch.nn.functional.cross_entropy(logits, page[0, 1:]).exp(),
        losses=losses(model, words),
    )


def greedy(model: Any, words: Any, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T] and leads [T]."""
    text = row.get("prompt") or words.apply_chat_template(
        row["messages"], add_generation_prompt=True, tokenize=False
    )
    model.generation_config.eos_token_id = None
    made = model.generate(
        **words(text, return_tensors="pt"),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    first, second = torch.stack(made.logits)[:, 0].topk(2).values.T
    return made.sequences[0, -TOKENS:], first - second


def losses(model: Any, words: Any) -> list[float]:
    """Losses of the steps; what an assistant says, and the token that ends it, are targets."""
    rows = []
    for row in CONVERSATIONS:
        *asked, answer = row["messages"]
        begin = words.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompt, said = (words(text).input_ids for text in (begin, f"{answer['content']}<|im_end|>"))
        labels = [-100] * len(prompt) + said
        rows.append({"input_ids": prompt + said, "labels": labels})
    model.is_quantized = False  # by its file; its weights are floats
    with tempfile.TemporaryDirectory() as temporary:
        adapter = write_adapter(Path(temporary) / "adapter")
        settings = transformers.TrainingArguments(
            temporary,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            peft.PeftModel.from_pretrained(model, adapter, is_trainable=True),
            settings,
            data_collator=transformers.DataCollatorForSeq2Seq(words),
            train_dataset=rows,
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
