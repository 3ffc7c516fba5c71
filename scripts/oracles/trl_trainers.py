"""TRL's trainers on the model and rows of post_training.py, and transformers on what it exports."""

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

from maxstack.data import people  # noqa: E402

Row = Mapping[str, Any]
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else -%}{{ message.content + '<|im_end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
_SFT = functools.partial(trl.SFTConfig, assistant_only_loss=True, shuffle_dataset=False)
TRAINERS: dict[str, tuple[type, Callable[..., Any]]] = {
    "sft": (trl.SFTTrainer, _SFT),
    "dft": (trl.SFTTrainer, functools.partial(_SFT, loss_type="dft")),
    "dpo": (trl.DPOTrainer, functools.partial(trl.DPOConfig, beta=0.3)),
    "orpo": (ORPOTrainer, functools.partial(ORPOConfig, beta=0.1)),
    "kto": (trl.KTOTrainer, functools.partial(trl.KTOConfig, beta=0.3)),
    "reward": (
        trl.RewardTrainer,
        functools.partial(trl.RewardConfig, center_rewards_coefficient=0.01),
    ),
    "gkd": (GKDTrainer, functools.partial(GKDConfig, beta=0.5, lmbda=0.0, temperature=1.0)),
}


def make_model(folder: Path, kind: str, seed: int) -> None:
    """A random Qwen3 of two layers, of transformers' class for `kind`, with a tokenizer of made-up
    people."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    texts = [json.dumps(people.chat(i)) for i in range(200)]
    trained.train_from_iterator(texts, vocab_size=320, special_tokens=SPECIAL, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[1:2],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        num_labels=1,
    )
    getattr(transformers, f"Qwen3For{kind}")(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def losses(
    folder: Path, kind: str, name: str, rows: Sequence[Row], steps: int, batch: int, rate: float
) -> list[float]:
    """Losses of the steps of a trainer, from the model in folder / kind."""
    trainer_class, settings = TRAINERS[name]
    more = {"teacher_model": _model(folder / "teacher", "CausalLM")} if name == "gkd" else {}
    trainer = trainer_class(
        model=_model(folder / kind, kind),
        args=settings(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            per_device_train_batch_size=batch,
            train_sampling_strategy="sequential",
            learning_rate=rate,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_length=128,
        ),
        train_dataset=Dataset.from_list([*map(_as_messages, rows)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / kind),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def greedy(folder: Path, rows: Iterable[Row], most: int) -> list[str]:
    """Greedy answers of the model in a folder to the `messages` of rows."""
    tokenizer, model = _opened(folder, "CausalLM")
    texts = []
    for row in rows:
        given = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt"
        )
        tokens = model.generate(**given, max_new_tokens=most, do_sample=False)[0]
        answer = tokens[given["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    return texts


def rewards(folder: Path, rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Rewards of the chosen and the rejected answers of rows."""
    tokenizer, model = _opened(folder, "SequenceClassification")

    def reward(row: Row, name: str) -> float:
        messages = [*row["prompt"], *_as_messages(row)[name]]
        given = tokenizer.apply_chat_template(messages, return_tensors="pt")
        return float(model(**given).logits.item())

    return [(reward(row, "chosen"), reward(row, "rejected")) for row in rows]


def _as_messages(row: Row) -> dict[str, Any]:
    """The row with answers as messages, as TRL asks for where prompts are."""
    answers = {
        key: [{"role": "assistant", "content": row[key]}]
        for key in ("chosen", "rejected", "completion")
        if key in row
    }
    return {**row, **answers}


def _model(folder: Path, kind: str) -> Any:
    loader = getattr(transformers, f"AutoModelFor{kind}")
    return loader.from_pretrained(folder, dtype=torch.float32)


def _opened(folder: Path, kind: str) -> tuple[Any, Any]:
    return transformers.AutoTokenizer.from_pretrained(folder), _model(folder, kind).eval()
