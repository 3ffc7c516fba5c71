"""The least memory of a run, by sums over shapes that take no compiler: for train before it
compiles, and for plan."""

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


def check_memory(run: Run, beside: Mapping[str, int] | None = None) -> None:
    """ConfigError, with the numbers, where a device has less than the least that a step holds;
    `beside`: further parts, and their bytes on a device."""
    parts, device = {**least(run), **(beside or {})}, run.mesh.local_devices[0]
    limit, needed = usable(device, run.mesh.size), sum(parts.values())
    if limit is not None and needed > limit:
        held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        raise ConfigError(
            f"mesh: a step needs at least {needed / GIB:.2f} GiB on each of "
            f"{run.mesh.size} devices ({held}), but {device.device_kind} has "
            f"{limit / GIB:.2f}; shard over more devices (mesh.fsdp, mesh.tensor), use "
            "model.remat or mesh.offload, or a smaller "
            + (
                "serve.max_requests; `maxstack plan` says what each part takes"
                if run.cfg.rollout
                else "train.batch_size; `maxstack plan --search` looks for a mesh that fits"
            )
        )


def least(run: Run) -> dict[str, int]:
    """Bytes that one device holds at once in any step: state, gradients, and the inputs of all
    layers, which the backward pass begins from."""
    cfg = run.cfg
    rows = jax.ShapeDtypeStruct(
        (cfg.train.batch_size // cfg.train.accumulate, cfg.data.seq_len),
        "int32",
        sharding=run.batches.sharding("tokens"),
    )
    stream = shard_bytes(rows) // 4 * cfg.model.embed * jax.numpy.dtype(cfg.model.dtype).itemsize
    inputs = (
        0
        if cfg.model.remat.offloads("input")
        else stream * cfg.model.layers // run.mesh.shape["tensor"]
    )
    changed = jax.tree.leaves(select(run.changed, run.abstract.params))
    return {
        **state_bytes(run),
        "gradients": sum(map(_shard_size, changed)),
        "layer inputs": inputs,
    }


def state_bytes(run: Run) -> dict[str, int]:
    """Bytes of the parts of the state on one device, and of other weights that a step takes."""
    params, older = dict(run.abstract.params), run.abstract.behind
    frozen = run.abstract_arguments[2] if run.objective.frozen else {}
    value = {"value head": params.pop("value")} if "value" in params else {}
    trees = {"parameters": params, **value, "optimizer": run.abstract.opt}
    trees |= {"older weights": older} if older else {}
    return {name: shard_bytes(tree) for name, tree in {**trees, **frozen}.items()}


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shards of a tree of shapes, without those in the host's memory."""
    return sum(
        _shard_size(leaf) for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST
    )


def _shard_size(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def usable(device: Any, devices: int) -> int | None:
    """Bytes that programs may use on a device; of a CPU's devices, each its share of the machine's
    memory. None where neither is known."""
    chip = by_kind(device.device_kind)
    if chip:
        return chip.for_programs
    memory = host_memory() if device.platform == "cpu" else None
    return memory // devices if memory else None
