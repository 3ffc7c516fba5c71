"""Task files for tests, and tiny models that are asked by them."""

import random
from pathlib import Path

import tiny
import yaml
from json_lines import write_rows

from maxstack.evals.task_files import open_tasks
from maxstack.evals.tasks import Tasks
from maxstack.schema.tasks import GenerationConfig

WORDS = "ärger blue cat dog eel fox gnu hen ibis jay kite lynx".split()
DATA = {"tokenizer": {"kind": "bytes"}, "seq_len": 64}
METRICS = {
    "multiple_choice": ["acc", "acc_norm", "acc_bytes", "exact_match"],
    "loglikelihood": ["acc", "perplexity"],
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "generate_until": ["exact_match"],
}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{a}} {{a|upper}}",
        "doc_to_choice": "{{[a, b, c]}}",
        "doc_to_target": "{{right}}",
        "description": "Pick. ",
        "num_fewshot": 2,
        "fewshot_split": "test",
        "fewshot_delimiter": "\n",
    },
    "named": {
        "output_type": "multiple_choice",
        "doc_to_text": "a",
        "doc_to_choice": ["no", "ja é", " x"],
        "doc_to_target": [0, 2],
        "target_delimiter": "",
    },
    "contexts": {
        "output_type": "multiple_choice",
        "doc_to_text": "right",
        "doc_to_choice": "{{[a ~ ' and', b ~ ' or']}}",
        "doc_to_target": "c",
        "num_fewshot": 1,
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
    },
    "likelihood": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{a}}",
        "doc_to_target": "{{said[:1]}}",
    },
    "spaced": {"output_type": "loglikelihood", "doc_to_text": "{{a}} \n", "doc_to_target": "b"},
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{(a ~ ' ' ~ b ~ ' ' ~ c) * (1 + right * 7)}}",
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{a}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["~", "\n\n"], "max_gen_toks": 6, "do_sample": False},
        "filter_list": [
            {"name": "strict", "filter": [{"function": "take_first"}]},
            {
                "name": "first",
                "filter": [
                    {"function": "regex", "regex_pattern": "(.)", "group_select": 0},
                    {"function": "take_first"},
                ],
            },
        ],
    },
}


def documents(count, seed, said=()):
    """Questions with fields of letters beyond ASCII, and a number. `said`: words with what a model
    goes on with, for every other one."""
    rng = random.Random(seed)
    rows = [
        dict(zip("abc", rng.sample(WORDS, 3), strict=True))
        | {"right": i % 2, "said": "q" * (i % 3 + 1)}
        for i in range(count)
    ]
    for row, (word, text) in zip(rows[::2], said, strict=False):
        row |= {"a": word, "said": text}
    return rows


def write_tasks(folder: Path, said=(), **changes) -> list[str]:
    """Files of TASKS; their paths."""
    for split, count in {"train": 5, "test": 12}.items():
        write_rows(folder / f"{split}.jsonl", documents(count, split, said))
    return [write_task(folder, name, **{**task, **changes}) for name, task in TASKS.items()]


def write_task(folder: Path, name: str, **fields) -> str:
    """A file of a task over these documents; its path."""
    files = {split: f"{folder}/{split}.jsonl" for split in ("train", "test")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    task |= {"test_split": "test", **fields}
    names = METRICS[task.get("output_type", "generate_until")]
    task.setdefault("metric_list", [{"metric": metric} for metric in names])
    (folder / f"{name}.yaml").write_text(
        yaml.safe_dump({k: v for k, v in task.items() if v is not None})
    )
    return f"{folder}/{name}.yaml"


def run_of(devices=1, **changes):
    """A tiny run over bytes."""
    model = tiny.model(**tiny.ONE_KIND)
    return tiny.make_run(tiny.config(data=DATA, model=model, **changes), devices)


def asked(run, names, **options):
    """Tasks that the model of a run is asked."""
    options = {"batch_size": 8, "length": 64, "stop_tokens": [256]} | options
    return Tasks(run, open_tasks(names), **options)


def said_by(run):
    """Words, and what the model of a run goes on with, where that begins with ASCII."""
    words = [first + second for first in WORDS for second in WORDS]
    cfg = GenerationConfig(max_gen_toks=6)
    texts = asked(run, []).generator(run.init().params, words, cfg, ["~", "\n\n"])
    return [
        (word, text)
        for word, text in zip(words, texts, strict=True)
        if text[:1].isascii() and text[:1].isprintable() and text
    ]
