"""TRL's trainer on the records of bench_post.py: prints a line of JSON with the seconds of each
step from the second on, the tokens of each, and the most memory.

example: python scripts/bench/post_trl.py --folder FOLDER --objective dpo --model '{"embed": 64}'
"""

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import arguments  # noqa: E402

QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main() -> None:
    """Train, and print the figures."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="with tokenizer and records")
    parser.add_argument("--objective", choices=("sft", "dpo"), required=True)
    parser.add_argument("--records", type=int, default=16, help="of a step (default: 16)")
    parser.add_argument("--steps", type=int, default=12, help="(default: 12)")
    parser.add_argument("--model", type=json.loads, required=True, help="as model: in YAML")
    print(json.dumps(trained(parser.parse_args())))


def trained(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a run."""
    os.environ |= QUIET
    import torch
    import transformers
    import trl
    from datasets import Dataset

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

    torch.set_num_threads(os.cpu_count() or 1)
    block = args.model["blocks"]["block"]
    config = transformers.Qwen3Config(
        vocab_size=args.model["vocab"],
        hidden_size=args.model["embed"],
        intermediate_size=block["mlp"]["hidden"],
        num_hidden_layers=args.model["layers"],
        num_attention_heads=block["mixer"]["heads"],
        num_key_value_heads=block["mixer"]["kv_heads"],
        head_dim=block["mixer"]["head_dim"],
        tie_word_embeddings=False,
    )
    trainer_class, settings, more = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {"assistant_only_loss": True}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.1}),
    }[args.objective]
    lines = (args.folder / f"{args.objective}.jsonl").read_text().splitlines()
    clock, model = Clock(), transformers.Qwen3ForCausalLM(config).float()
    reference = {"ref_model": copy.deepcopy(model)} if args.objective == "dpo" else {}
    trainer = trainer_class(
        model=model,
        args=settings(
            output_dir=str(args.folder / "trl"),
            max_steps=args.steps,
            per_device_train_batch_size=args.records,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_length=1024,
            **more,
        ),
        train_dataset=Dataset.from_list([*map(json.loads, lines)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(args.folder),
        callbacks=[clock],
        **reference,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    tokens = [int(batch["attention_mask"].sum()) for batch in trainer.get_train_dataloader()]
    trainer.train()
    return {
        "seconds": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)],
        "tokens": tokens[: args.steps],
        "peak_mib": arguments.resident("VmHWM") / 2**20,
    }


if __name__ == "__main__":
    main()
