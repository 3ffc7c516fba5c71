"""The minimum memory of a run, summed over shapes without a compiler: train checks it before it
compiles, and plan shows it."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from maxstack.errors import ConfigError
from maxstack.hardware.chips import by_kind
from maxstack.hardware.devices import host_memory
from maxstack.run import Run
from maxstack.state import HOST
from maxstack.step import select

GIB = 2**30


# The sum is a lower bound on purpose: what is refused here certainly does not fit, and what passes
# may still be refused by the compiler, minutes later.
def check_memory(run: Run, beside: Mapping[str, int] | None = None) -> None:
    """ConfigError, with the numbers, if a device has less memory than a step needs at least.
    `beside`: further parts, and their bytes on a device."""
    parts = {**least(run), **(beside or {})}
    device = run.mesh.local_devices[0]
    # Unknown memory (limit None) is no reason to refuse.
    limit = usable(device, run.mesh.size)
    needed = sum(parts.values())
    if limit is not None and needed > limit:
        held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        advice = "train.batch_size; `maxstack plan --search` finds a mesh that fits"
        if run.cfg.rollout:
            advice = "serve.max_requests; `maxstack plan` shows what each part takes"
        raise ConfigError(
            f"mesh: a step needs at least {needed / GIB:.2f} GiB on each of {run.mesh.size} "
            "devices "
            f"({held}), but {device.device_kind} has {limit / GIB:.2f}; shard over more devices "
            "(mesh.fsdp, mesh.tensor), use model.remat or mesh.offload, or reduce " + advice
        )


def least(run: Run) -> dict[str, int]:
    """Return the bytes that one device holds at the same time in any step: state, gradients, and
    the inputs of all layers, from which the backward pass starts."""
    cfg = run.cfg
    rows = jax.ShapeDtypeStruct(
        (cfg.train.batch_size // cfg.train.accumulate, cfg.data.seq_len),
        "int32",
        sharding=run.batches.sharding("tokens"),
    )
    # 4 bytes a token of int32, so this is the tokens on a device times the bytes of their stream.
    stream = shard_bytes(rows) // 4 * cfg.model.embed * jax.numpy.dtype(cfg.model.dtype).itemsize
    # The residual stream lies split over tensor too.
    inputs = stream * cfg.model.layers // run.mesh.shape["tensor"]
    if cfg.model.remat.offloads("input"):
        inputs = 0
    # What is not trained has no gradient.
    changed = jax.tree.leaves(select(run.changed, run.abstract.params))
    return {
        **state_bytes(run),
        "gradients": sum(map(_shard_size, changed)),
        "layer inputs": inputs,
    }


def state_bytes(run: Run) -> dict[str, int]:
    """Return the bytes on one device of each part of the state, and of frozen weights."""
    params = dict(run.abstract.params)
    trees: dict[str, Any] = {"parameters": params}
    # A value head of PPO is part of the weights, but people look for it by name.
    if "value" in params:
        trees["value head"] = params.pop("value")
    trees["optimizer"] = run.abstract.opt
    if run.abstract.behind:
        trees["older weights"] = run.abstract.behind
    if run.objective.frozen:
        trees |= run.abstract_arguments[2]
    return {name: shard_bytes(tree) for name, tree in trees.items()}


def shard_bytes(tree: Any) -> int:
    """Return the bytes of one device's shards of a tree of shapes, without those in host memory."""
    return sum(
        _shard_size(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST
    )


def _shard_size(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def usable(device: Any, devices: int) -> int | None:
    """Return the bytes that programs may use on a device; for CPU devices, an equal share of the
    machine's memory. None if neither is known."""
    chip = by_kind(device.device_kind)
    if chip:
        return chip.for_programs
    memory = host_memory() if device.platform == "cpu" else None
    # CPU devices are threads of one machine and share its memory.
    return memory // devices if memory else None
