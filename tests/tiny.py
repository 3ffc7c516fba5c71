"""Tiny configurations for tests, and the batches to run them on."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from json_lines import read_rows

from maxstack import sharding
from maxstack.config import dump
from maxstack.run import Run, assemble
from maxstack.schema.checkpoint import CheckpointConfig
from maxstack.schema.config import Config

VOCAB = 320
ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8}
MLA = {
    "kind": "mla", "heads": 4, "kv_lora": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8,
}  # fmt: skip
DELTA = {"kind": "gated_delta", "key_heads": 2, "key_dim": 8, "value_heads": 4, "value_dim": 8}
GATED = {"kind": "gated", "hidden": 64}
MOE = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 32}
ONE_KIND = {"layers": 2, "pattern": ["local"]}
"""Of layers, for `model`: half of what the others take to compile."""
_RUNS: dict[tuple[str, int], Run] = {}


def model(**changes: Any) -> dict[str, Any]:
    """A model of two kinds of block, local and global attention."""
    blocks = {
        "local": {"mixer": ATTENTION | {"window": 12}, "mlp": {**GATED}},
        "global": {"mixer": {**ATTENTION}, "mlp": {**GATED}},
    }
    tree = {"vocab": VOCAB, "embed": 32, "layers": 3, "pattern": ["local", "global"]}
    return tree | {"dtype": "float32", "blocks": blocks} | changes


def one_block(mixer: Any = ATTENTION, mlp: Any = GATED, **changes: Any) -> dict[str, Any]:
    """A model of one kind of block, `block`."""
    return model(pattern=["block"], blocks={"block": {"mixer": mixer, "mlp": mlp}}) | changes


def config(**sections: Any) -> Config:
    """A configuration of that model on ragged synthetic documents, packed."""
    base: dict[str, Any] = {
        "model": {} if "kind" in sections.get("model", {}) else model(),
        "objective": {"kind": "next_token"},
        "train": {"batch_size": 8, "steps": 20},
        "optimizer": {
            "learning_rate": 1e-2,
            "chain": [
                {"kind": "clip_by_global_norm", "max_norm": 1.0},
                {"kind": "adamw", "b2": 0.95, "weight_decay": 0.1},
            ],
        },
        "data": {
            "sources": [
                {"kind": "synthetic", "documents": 64, "length": 50, "ragged": True, "vocab": VOCAB}
            ],
            "seq_len": 48,
        },
    }
    return Config.model_validate(
        {
            key: base.get(key, {}) | value if isinstance(value, dict) else value
            for key, value in (base | sections).items()
        }
    )


def with_rollouts(**sections: Any) -> Config:
    """A model of one kind of block, learning from its own answers to made-up questions, 4 to each
    of 8, by an engine of few programs."""
    source = {"kind": "function", "call": "maxstack.data.people:prompts"}
    base: dict[str, Any] = {
        "model": model(**ONE_KIND),
        "serve": {"rows": 32},
        "data": {
            "sources": [source | {"record": {"kind": "prompts"}, "documents": 64, "holdout": 0.25}],
            "tokenizer": {"kind": "bytes", "eos": True},
            "template": "plain",
            "seq_len": 256,
            "packing": "fit",
        },
        "objective": {"kind": "policy_gradient"},
        "rollout": {"prompts": 8, "samples": 4, "max_tokens": 16},
        "rewards": [{"kind": "exact", "field": "json"}],
    }
    for key, value in sections.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    baseline = base["objective"].get("advantage", {}).get("baseline")
    if baseline == "value":
        base["model"]["head"] = {"value": True} | base["model"].get("head", {})
    return config(**base)


def make_run(cfg: Config, devices: int = 1) -> Run:
    """`cfg` on the first `devices` virtual devices. Equal configurations share compiled functions;
    where a run lies and what it saves is no part of them."""
    same = {"run": Config.model_fields["run"].default, "checkpoint": CheckpointConfig()}
    key = dump(cfg.model_copy(update=same)), devices
    if key not in _RUNS:
        mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:devices])
        _RUNS[key] = assemble(cfg, mesh)
    return dataclasses.replace(_RUNS[key], cfg=cfg)


def batch(cfg: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A whole batch: two documents a row, and uneven masks."""
    rng = np.random.default_rng(seed)
    shape = cfg.train.batch_size, cfg.data.seq_len
    tokens = rng.integers(0, cfg.model.vocab, (shape[0], shape[1] + 1)).astype(np.int32)
    cut = rng.integers(1, shape[1], (shape[0], 1))
    place = np.arange(shape[1])[None]
    mask = rng.random(shape) < rng.random((shape[0], 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": (1 + (place >= cut)).astype(np.int32),
        "positions": np.where(place >= cut, place - cut, place).astype(np.int32),
        "mask": mask.astype(np.float32),
    }


def place(run: Run, seed: int = 0) -> dict[str, jax.Array]:
    """A whole batch on the run's devices."""
    return run.batches.place(batch(run.cfg, seed), run.cfg.train.batch_size)


def compiled(run: Run, **options: Any) -> Any:
    """The step of a run as the compiler makes it."""
    lowered = run.step.lower(run.abstract, run.batches.abstract())
    return lowered.compile(compiler_options=options)


def steps(run: Run, number: int) -> list[dict[str, float]]:
    """The scalars of the first `number` steps, each on a batch of its own."""
    state, rows = run.init(), []
    for i in range(number):
        state, scalars = run.step(state, place(run, i))
        rows.append({name: float(value) for name, value in scalars.items()})
    return rows


def write(folder: Path, cfg: Config) -> Path:
    """A file of the configuration, for the command line."""
    path = folder / "run.yml"
    path.write_text(dump(cfg))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return read_rows(folder / "metrics.jsonl")
