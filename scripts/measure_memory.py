"""Memory that plan predicts beside memory that a step takes, on eight virtual devices of this
machine's CPU: bytes of all eight together.

Each run is a process of its own. Measured is the growth of its peak resident memory while the state
is made and two steps run.
example: python scripts/measure_memory.py 'fine-tuning, all weights' 'fine-tuning, QLoRA: nf4 under
rank 16'
"""

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import arguments

DEVICES = 8
ATTENTION = {"kind": "attention", "heads": 8, "kv_heads": 4, "head_dim": 64}
MLPS = {
    "dense": {"kind": "gated", "hidden": 2048},
    "moe": {"kind": "moe", "experts": 8, "top_k": 2, "hidden": 1024},
    "wide": {"kind": "gated", "hidden": 16384},
}
FEW = {"train": {"batch_size": 8, "steps": 2}}
NF4 = {
    "mode": "ptq",
    "rules": [{"module_path": ".*/(mixer|mlp)/.*", "weight_qtype": "nf4", "tile_size": 64}],
}
RUNS = {
    "dense, fsdp 8, no remat": ("dense", {"fsdp": 8}, "none"),
    "dense, fsdp 8, full remat": ("dense", {"fsdp": 8}, "full"),
    "dense, fsdp 4 x tensor 2": ("dense", {"fsdp": 4, "tensor": 2}, "none"),
    "dense, stage 4 x data 2": ("dense", {"stage": 4, "data": 2}, "full"),
    "MoE, expert 8": ("moe", {"expert": 8}, "none"),
    "MoE, fsdp 2 x expert 4, full remat": ("moe", {"fsdp": 2, "expert": 4}, "full"),
    "fine-tuning, all weights": ("wide", {"fsdp": 8}, "full", FEW),
    "fine-tuning, LoRA of rank 16": ("wide", {"fsdp": 8}, "full", FEW | {"lora": {"rank": 16}}),
    "fine-tuning, QLoRA: nf4 under rank 16": (
        "wide",
        {"fsdp": 8},
        "full",
        FEW | {"lora": {"rank": 16}, "quantization": NF4},
    ),
}


def main() -> None:
    """Print a Markdown table."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "runs", nargs="*", default=[*RUNS], metavar="NAME", help=f"these alone: {'; '.join(RUNS)}"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    args = parser.parse_intermixed_args()
    names = args.runs
    if unknown := {*names} - RUNS.keys():
        parser.error(f"there are no runs {', '.join(sorted(unknown))}; there are {'; '.join(RUNS)}")
    print("| Run | Plan | Measured | Measured / plan |\n|---|---|---|---|")
    for name in names:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            planned, measured = pool.apply(measure, (args.layers, *RUNS[name]))
        print(
            f"| {name} | {planned / 2**20:,.0f} MiB | {measured / 2**20:,.0f} MiB | "
            f"{measured / planned:.2f} |",
            flush=True,
        )


def measure(
    layers: int,
    kind: str,
    mesh: dict[str, int],
    remat: str,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, int]:
    """-> (bytes that plan predicts, bytes measured), each on all devices, with `more` sections of
    the configuration."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    import jax
    import numpy as np

    from maxstack import sharding
    from maxstack.plan.buffers import memory
    from maxstack.run import assemble
    from maxstack.schema.config import Config

    model = {
        "vocab": 8192,
        "embed": 512,
        "layers": layers,
        "blocks": {"block": {"mixer": ATTENTION, "mlp": MLPS[kind]}},
        "remat": {"policy": remat},
    }
    cfg = Config.model_validate(
        {
            "model": model,
            "mesh": {"data": 1} | mesh,
            "train": {"batch_size": 16, "steps": 2},
            "data": {"sources": [{"kind": "synthetic", "vocab": 8192}], "seq_len": 512},
            "optimizer": {"chain": [{"kind": "adamw"}]},
            **more,
        }
    )
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()))
    compiled = run.step.lower(run.abstract, run.batches.abstract()).compile()
    rows = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in run.batches.abstract().items()}
    before = arguments.resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    state = jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            leaf.shape,
            leaf.sharding,
            lambda index, leaf=leaf: np.ones(leaf.sharding.shard_shape(leaf.shape), leaf.dtype),
        ),
        run.abstract,
    )
    for _ in range(2):
        state, scalars = compiled(state, run.batches.place(rows, cfg.train.batch_size))
        jax.block_until_ready((state, scalars))
    return memory(compiled).needed * DEVICES, arguments.resident("VmHWM") - before


if __name__ == "__main__":
    main()
