"""Model folders and task files that tests and scripts/golden/tasks.py ask alike; without
maxstack."""

import json
from pathlib import Path

import numpy as np
import yaml
from json_lines import write_rows
from safetensors.numpy import load_file, save_file
from tokenizer_files import byte_level
from tokenizers import processors

GOLDENS = Path(__file__).resolve().parent / "goldens"
BOS, EOS = "<|begin|>", "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
CASES = {
    "plain-named": {},
    "plain-added": {},
    "plain-none": {},
    "system-named": {"system_instruction": "Be terse."},
    "chat-added": {"apply_chat_template": True, "system_instruction": "Be terse."},
    "one_turn-named": {"apply_chat_template": True, "fewshot_as_multiturn": False},
}
"""lm-evaluation-harness's arguments by a name, and after the dash, what the tokenizer's files make
of BOS: they name it, they name it and begin texts with it, or they know EOS alone."""
LENGTH = 256
"""Tokens of a request at most, and positions of the model."""
CHOICE = {
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "Which is {{kind}}?",
    "doc_to_choice": "{{names}}",
    "doc_to_target": "right",
    "should_decontaminate": True,
    "doc_to_decontamination_query": "kind",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TASKS = {
    "drawn": CHOICE | {"num_fewshot": 3, "fewshot_split": "test", "description": "Of {{kind}}. "},
    "first": CHOICE
    | {"num_fewshot": 2, "fewshot_split": "few", "fewshot_config": {"sampler": "first_n"}},
    "whole": CHOICE
    | {"doc_to_text": "", "doc_to_target": 0, "target_delimiter": "", "test_split": "few"},
    "spelt": {
        "output_type": "loglikelihood",
        "test_split": "few",
        "doc_to_text": "<|begin|>user\nWhich is {{kind}}?<|end|>\n<|begin|>assistant\n",
        "doc_to_target": "{{names[right]}}<|end|>",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "test_split": "few",
        "doc_to_text": "",
        "doc_to_target": "{{(kind ~ ' ' ~ names|join(' ')) * (1 + right * 9)}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "test_split": "few",
        "num_fewshot": 1,
        "fewshot_split": "test",
        "doc_to_text": "{{kind}}<|end|>\n",
        "doc_to_target": "{{names[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
MEAN = [{"metric": "acc", "weight_by_size": True}, {"metric": "acc_norm", "weight_by_size": False}]
GROUPS = {
    "inner": {"task": ["drawn", "whole"], "aggregate_metric_list": MEAN},
    "outer": {"task": ["inner", "tagged"], "aggregate_metric_list": MEAN},
}
ASKED = ["outer", "spelt", "rolling", "written"]
"""Names that lead to all of them."""


def write_model(folder: Path, bos: str) -> None:
    """A folder of random weights with a tokenizer of bytes."""
    made = byte_level([BOS, EOS])
    if bos == "added":
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
        )
    named = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    named |= {"bos_token": BOS} if bos != "none" else {}
    ids = {"bos_token_id": made.token_to_id(BOS), "eos_token_id": made.token_to_id(EOS)}
    write_llama(folder, made, TEMPLATE, named, {"max_position_embeddings": LENGTH} | ids)


def write_llama(folder: Path, tokenizer, template: str, named, changes) -> None:
    """The golden llama with a tokenizer, a table of random weights for it, a chat template, what
    tokenizer_config.json says, and changes of config.json."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    config |= {"vocab_size": tokenizer.get_vocab_size()} | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDENS / "llama" / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shape = config["vocab_size"], config["hidden_size"]
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_tasks(folder: Path) -> None:
    """Files of TASKS and GROUPS as published ones lie in a folder, with their documents."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    words = "amber blue cedar dune echo fern gold hazel iris jade".split()
    for split, count in {"test": 11, "few": 5}.items():
        rows = [
            {
                "kind": words[rng.integers(10)] + "ish",
                "names": [words[i] for i in rng.permutation(10)[:3]],
                "right": int(rng.integers(3)),
            }
            for _ in range(count)
        ]
        write_rows(folder / f"{split}.jsonl", rows)
    files = {split: str(folder / f"{split}.jsonl") for split in ("test", "few")}
    for name, fields in TASKS.items():
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        task |= {"tag": ["tagged"]} if name == "first" else {}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | fields))
    for name, fields in GROUPS.items():
        (folder / f"_{name}.yaml").write_text(yaml.safe_dump({"group": name} | fields))
