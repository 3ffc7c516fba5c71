"""Training steps of a Llama-3.2-1B shape for bench_gpu.py: the step of `maxstack train`, on random
tokens that are on the device."""

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import yaml
from bench.gpu_programs import Job, Ran

from maxstack import sharding
from maxstack.config.compose import presets_dir
from maxstack.hardware import compiling
from maxstack.models.flops import flops_per_token
from maxstack.run import Run, assemble
from maxstack.schema.config import Config, RunConfig, TrainConfig
from maxstack.schema.data import DataConfig, SyntheticSource
from maxstack.schema.decoder import DecoderConfig, HeadConfig
from maxstack.schema.mixers import AttentionConfig, Llama3Scaling, NormConfig, RopeConfig
from maxstack.schema.mlps import GatedMLPConfig
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.quantization import QuantizationConfig
from maxstack.schema.stack import BlockConfig

if TYPE_CHECKING:
    from bench.verdicts import Verdicts

SHAPES = {
    "full": {
        "vocab": 128256,
        "embed": 2048,
        "layers": 16,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 128,
        "hidden": 8192,
        "length": 4096,
    },
    "small": {
        "vocab": 4096,
        "embed": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "hidden": 1024,
        "length": 512,
    },
    "tiny": {
        "vocab": 256,
        "embed": 32,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "hidden": 64,
        "length": 64,
    },
}
"""Full: Llama 3.2 1B as in configs/models/llama-3.2-1b.yml, 1,235,814,400 parameters, but with
heads of 128 channels, half as many of them, as large models have."""
BATCHES = {"full": (8, 16, 4, 2), "quick": (8, 4, 2), "small": (4,), "tiny": (2,)}
WARM_UP, GROUPS, STEPS = 3, 3, 5
"""Steps that do not count, groups of steps of which the median counts, and steps of a group."""


def shape_of(size: str) -> dict[str, int]:
    """The model and its sequence length."""
    return SHAPES["full" if size == "quick" else size]


def configuration(
    shape: dict[str, int],
    batch: int,
    attention: str = "auto",
    tuned: str | None = None,
    recipe: str = "none",
) -> Config:
    """bfloat16 compute, float32 weights and AdamW, a constant learning rate, nothing recomputed.
    `tuned`: a table of block sizes; `recipe`: a preset of configs/quantization."""
    quantization = _preset("quantization", recipe)
    norm, scaling = NormConfig(eps=1e-5), Llama3Scaling(kind="llama3", factor=32.0)
    mixer = AttentionConfig(
        kind="attention",
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        backend=attention,
        rope=RopeConfig(theta=500000.0, scaling=scaling),
    )
    block = BlockConfig(
        mixer=mixer, mlp=GatedMLPConfig(kind="gated", hidden=shape["hidden"]), norm=norm
    )
    return Config(
        run=RunConfig(tuned=tuned),
        quantization=QuantizationConfig.model_validate(quantization),
        model=DecoderConfig(
            vocab=shape["vocab"],
            embed=shape["embed"],
            layers=shape["layers"],
            blocks={"block": block},
            norm=norm,
            head=HeadConfig(tied=True),
        ),
        data=DataConfig(
            sources=(SyntheticSource(kind="synthetic", vocab=shape["vocab"]),),
            seq_len=shape["length"],
            packing="none",
        ),
        optimizer=OptimizerConfig(
            schedule=None, chain=[{"kind": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}]
        ),
        train=TrainConfig(steps=1000, batch_size=batch),
    )


def jobs(given: dict[str, Any], peak: float | None, verdicts: "Verdicts") -> Iterator[Job]:
    """One job for each preset of XLA's flags, recipe and batch size. Kernels that are wrong by
    `verdicts` make the result wrong."""
    shape = shape_of(given["size"])
    for xla, recipe in itertools.product(given["xla"], given["quantization"]):
        flags = _preset("xla", xla).get("flags", {})
        fitting: dict[int, float] = {}
        for batch in given["batches"] or BATCHES[given["size"]]:
            row = {
                "program": "maxstack",
                "batch": batch,
                "attention": given["attention"],
                "xla": xla,
                "quantization": recipe,
                **shape,
            }
            cfg = configuration(shape, batch, given["attention"], given["tuned"], recipe)
            yield Job(
                "train",
                row,
                dict,
                functools.partial(_measured, cfg, flags, peak, verdicts, fitting),
            )


def _preset(kind: str, name: str) -> dict[str, Any]:
    """The preset configs/KIND/NAME.yml; empty for none."""
    if name == "none":
        return {}
    return yaml.safe_load((presets_dir() / kind / f"{name}.yml").read_text(encoding="utf-8"))


def _measured(
    cfg: Config,
    options: dict[str, Any],
    peak: float | None,
    verdicts: "Verdicts",
    fitting: dict[int, float],
    ran: dict[str, Ran],
) -> dict[str, Any]:
    """Compile, and run if it fits. `fitting`: batch size -> expected share of the memory when
    doubled, for those that fit."""
    batch, length = cfg.train.batch_size, cfg.data.seq_len
    if any(batch < other for other in fitting):
        return {"status": "skipped", "reason": f"a batch of {max(fitting)} fits"}
    if (share := fitting.get(batch // 2, 0.0)) > 1:
        reason = f"it would take {share:.1f} times the memory, to judge by a batch of {batch // 2}"
        return {"status": "skipped", "reason": reason}
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]))
    choices = run.kernels
    begin = time.perf_counter()
    compiled = compiling.compiled(run.lower(), run.mesh, options)
    seconds_to_compile = time.perf_counter() - begin
    kernels = sorted({(choice.op, choice.backend) for choice in choices})
    about = {
        "compile_seconds": round(seconds_to_compile, 1),
        "kernels": [" ".join(kernel) for kernel in kernels],
        "unchecked": [" ".join(kernel) for kernel in kernels if not verdicts.right(*kernel)],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params)),
    }
    memory = compiled.memory_analysis()
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    expected = 0.0
    if memory:
        size = about["compiled_bytes"] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        if limit and size > limit:
            reason = f"needs {size / 2**30:.1f} GiB of {limit / 2**30:.1f}"
            return about | {"status": "too large", "reason": reason}
        if limit:
            expected = (2 * size - memory.argument_size_in_bytes) / limit
    seconds, losses = _steps(run, compiled)
    fitting[batch] = expected
    tokens = batch * length / statistics.median(seconds)
    flops = flops_per_token(cfg.model, length)
    about |= {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": tokens,
        "flops_per_token_causal": flops,
        "losses": losses,
        "mfu_causal": tokens * flops / peak if peak else None,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    if wrong := [reason for kernel in kernels if (reason := verdicts.wrong(*kernel))]:
        about |= {"status": "wrong", "reason": "; ".join(wrong)}
    return about


def _steps(run: Run, compiled: Any) -> tuple[list[float], list[float]]:
    """Seconds of a step by group, and the losses of the first and the last group. The steps of a
    group are dispatched without waiting, as in training."""
    cfg, rng = run.cfg, np.random.default_rng(0)
    state, batches = run.init(), []
    for _ in range(4):
        shape = cfg.train.batch_size, cfg.data.seq_len + 1
        drawn = rng.integers(0, cfg.model.vocab, shape, np.int32)
        tokens, targets = drawn[:, :-1], drawn[:, 1:]
        rows = {"tokens": tokens, "targets": targets, "mask": np.ones(targets.shape, np.float32)}
        batches.append(run.batches.place(rows, cfg.train.batch_size))
    seconds, losses = [], []
    for group in range(GROUPS + 1):
        steps = STEPS if group else WARM_UP
        begin = time.perf_counter()
        for step in range(steps):
            state, scalars = compiled(state, batches[step % len(batches)])
        losses.append(float(jax.block_until_ready(scalars["loss"])))
        jax.block_until_ready(state)
        if group:
            seconds.append((time.perf_counter() - begin) / steps)
    return seconds, [losses[0], losses[-1]]
