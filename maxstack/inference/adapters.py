"""Adapters that an engine serves beside its model, read out of folders in PEFT's format."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.inference.opened import adapted_run
from maxstack.state import flat
from maxstack.weights.adapter import lengthening

if TYPE_CHECKING:
    from maxstack.run import Run

Leaves = dict[str, Any]


class Adapters(NamedTuple):
    """Adapters by number, from 1."""

    names: tuple[str, ...] = ()
    weights: Mapping[str, Leaves] = {}
    """By path of a weight: leaves of adapted_rows.AdaptedRows, on every device; as tuples where the
    pattern repeats the weight."""


def read_adapters(run: "Run", params: Any, folders: Mapping[str, str]) -> Adapters:
    """The adapters in folders, by name, for the weights `params` of a run. ConfigError for a folder
    that holds none of this model's, or one that cannot be served."""
    read = [_leaves(run, params, folder) for folder in folders.values()]
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    weights: dict[str, Leaves] = {}
    for path in dict.fromkeys(path for leaves in read for path in leaves):
        own = [leaves.get(path) for leaves in read]
        if path.startswith("blocks/"):
            repeats = next(len(leaves["a"]) for leaves in own if leaves)
            layers = [
                _stacked([leaves and {k: v[i] for k, v in leaves.items()} for leaves in own])
                for i in range(repeats)
            ]
            together = {name: tuple(layer[name] for layer in layers) for name in layers[0]}
        else:
            together = _stacked(own)
        weights[path] = jax.device_put(
            jax.tree.map(lambda leaf: leaf.astype(run.cfg.model.dtype), together), everywhere
        )
    return Adapters(tuple(folders), weights)


def _leaves(run: "Run", params: Any, folder: str) -> dict[str, Leaves]:
    """By path: a [..., in..., rank] and b [..., rank, out...] times the scale, with DoRA `factor`
    [..., out...]; in front the repetitions of the pattern, if any."""
    adapted = adapted_run(run, folder)
    lora, weights = adapted.cfg.lora, adapted.weights
    assert lora
    read, rewrite = weights.adapter(folder), weights.rewrite
    bases = rewrite.under_adapters(flat(params))
    leaves: dict[str, Leaves] = {}
    for path, spec in rewrite.adapted.items():
        a, b = read[f"{path}/lora_a"], read[f"{path}/lora_b"]
        leaves[path] = {"a": a, "b": b * lora.scale}
        if lora.dora:
            factor = functools.partial(lengthening, lora, spec.contract)
            for _ in range(a.ndim - spec.contract - 1):
                factor = jax.vmap(factor)
            made = jax.jit(factor, out_shardings=NamedSharding(run.mesh, PartitionSpec()))
            base = rewrite.floats(path, bases)
            leaves[path]["factor"] = np.asarray(made(base, a, b, read[f"{path}/magnitude"]))
    return leaves


def _stacked(leaves: Sequence[Leaves | None]) -> Leaves:
    """Leaves of one weight with a dimension of adapters; those that are None change nothing. Ranks
    are padded to the largest."""
    present = [own for own in leaves if own]
    rank = max(own["a"].shape[-1] for own in present)
    inputs, outputs = present[0]["a"].shape[:-1], present[0]["b"].shape[1:]
    a = np.zeros((*inputs, len(leaves), rank), np.float32)
    b = np.zeros((len(leaves), rank, *outputs), np.float32)
    factor = np.ones((1 + len(leaves), *outputs), np.float32)
    for i, own in enumerate(leaves):
        if own:
            size = own["a"].shape[-1]
            a[..., i, :size], b[i, :size] = own["a"], own["b"]
            factor[i + 1] = own.get("factor", 1.0)
    dora = any("factor" in own for own in present)
    return {"a": a, "b": b} | ({"factor": factor} if dora else {})
