"""Training steps of a Llama-3.2-1B shape for bench_gpu.py: the step that `maxstack train` runs, on
random tokens that lie on the device."""

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import yaml
from bench.gpu_programs import Job, Ran

from maxstack import sharding
from maxstack.config import presets_dir
from maxstack.models.flops import flops_per_token
from maxstack.run import Run, assemble
from maxstack.schema.config import Config, RunConfig, TrainConfig
from maxstack.schema.data import DataConfig, SyntheticSource
from maxstack.schema.decoder import BlockConfig, DecoderConfig, HeadConfig
from maxstack.schema.mixers import AttentionConfig, Llama3Scaling, NormConfig, RopeConfig
from maxstack.schema.mlps import GatedMLPConfig
from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.quantization import QuantizationConfig

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
"""Steps that do not count; then this many groups of so many steps, of which the median group
counts."""


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
    quantization = (
        yaml.safe_load(
            (presets_dir() / "quantization" / f"{recipe}.yml").read_text(encoding="utf-8")
        )
        if recipe != "none"
        else {}
    )
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
    """One job for each preset of XLA's flags, recipe and batch size; kernels that `verdicts` has
    found wrong make the result wrong."""
    shape = shape_of(given["size"])
    for xla, recipe in itertools.product(given["xla"], given["quantization"]):
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
                functools.partial(_measured, cfg, flags(xla), peak, verdicts, fitting),
            )


def flags(preset: str) -> dict[str, Any]:
    """Those of configs/xla/PRESET.yml; none: none."""
    path = Path(__file__).resolve().parents[2] / "configs" / "xla" / f"{preset}.yml"
    return {} if preset == "none" else yaml.safe_load(path.read_text(encoding="utf-8"))["flags"]


def _measured(
    cfg: Config,
    options: dict[str, Any],
    peak: float | None,
    verdicts: "Verdicts",
    fitting: dict[int, float],
    ran: dict[str, Ran],
) -> dict[str, Any]:
    """Compile, see whether it fits, run. `fitting`: batch sizes that fit, and what share of the
    memory each is expected to take when doubled."""
    batch, length = cfg.train.batch_size, cfg.data.seq_len
    if any(batch < other for other in fitting):
        return {"status": "skipped", "reason": f"a batch of {max(fitting)} fits"}
    if (share := fitting.get(batch // 2, 0.0)) > 1:
        return {
            "status": "skipped",
            "reason": f"it would take {share:.1f} times the memory, to judge by a batch of "
            f"{batch // 2}",
        }
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]))
    choices = run.kernels
    begin = time.perf_counter()
    compiled = run.compile(run.lower(), options)
    about = {
        "compile_seconds": round(time.perf_counter() - begin, 1),
        "kernels": sorted({f"{choice.op} {choice.backend}" for choice in choices}),
        "unchecked": sorted(
            {
                f"{choice.op} {choice.backend}"
                for choice in choices
                if not verdicts.right(choice.op, choice.backend)
            }
        ),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params)),
    }
    memory, limit = (
        compiled.memory_analysis(),
        (jax.devices()[0].memory_stats() or {}).get("bytes_limit"),
    )
    if memory:
        about["compiled_bytes"] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        if limit and about["compiled_bytes"] > limit:
            return about | {
                "status": "too large",
                "reason": f"needs {about['compiled_bytes'] / 2**30:.1f} GiB of {limit / 2**30:.1f}",
            }
    seconds, losses = _steps(run, compiled)
    fitting[batch] = (
        (2 * about["compiled_bytes"] - memory.argument_size_in_bytes) / limit
        if memory and limit
        else 0.0
    )
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
    found = [reason for choice in choices if (reason := verdicts.wrong(choice.op, choice.backend))]
    return about | ({"status": "wrong", "reason": "; ".join(found)} if found else {})


def _steps(run: Run, compiled: Any) -> tuple[list[float], list[float]]:
    """Seconds of a step by group, and the losses of the first and the last. The steps of a group
    are dispatched without waiting, as the loop does."""
    cfg, numbers = run.cfg, np.random.default_rng(0)
    state, held = run.init(), []
    for _ in range(4):
        drawn = numbers.integers(
            0, cfg.model.vocab, (cfg.train.batch_size, cfg.data.seq_len + 1), np.int32
        )
        rows = {
            "tokens": drawn[:, :-1],
            "targets": drawn[:, 1:],
            "mask": np.ones(drawn[:, 1:].shape, np.float32),
        }
        held.append(run.place(rows, cfg.train.batch_size))
    seconds, losses = [], []
    for group in range(GROUPS + 1):
        steps = STEPS if group else WARM_UP
        begin = time.perf_counter()
        for step in range(steps):
            state, scalars = compiled(state, held[step % len(held)])
        losses.append(float(jax.block_until_ready(scalars["loss"])))
        jax.block_until_ready(state)
        if group:
            seconds.append((time.perf_counter() - begin) / steps)
    return seconds, [losses[0], losses[-1]]
