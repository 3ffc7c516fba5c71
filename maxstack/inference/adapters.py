"""Adapters that an engine serves beside its model, read from folders in PEFT's format.

The adapters of one weight are stacked and padded to the largest rank, so that a step multiplies by
all of them in one product and keeps each row's own (weights/multi_adapter.py). A gather of A and B
by row took a step of a 50 M model from 113 to 202 ms (4 adapters of rank 16), this to 119.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxstack.inference.trained_model import adapt_run
from maxstack.state import flat
from maxstack.weights.adapter import dora_factors
from maxstack.weights.rewrite import rebase
from maxstack.weights.spec import WeightSpec

if TYPE_CHECKING:
    from maxstack.run import Run

Leaves = dict[str, Any]


class Adapters(NamedTuple):
    """Adapters by number, from 1."""

    names: tuple[str, ...] = ()
    specs: Mapping[str, WeightSpec] = {}
    """By path: the weights that they change."""
    weights: Mapping[str, Any] = {}
    """By path: leaves of multi_adapter.MultiAdapter, on every device, with a dimension in front for
    the repetitions of the pattern where there are any."""


def read_adapters(run: "Run", params: Any, folders: Mapping[str, str]) -> Adapters:
    """Read the adapters in folders, by name, for the weights `params` of a run. ConfigError for a
    folder without an adapter of this model, and for one that cannot be served."""
    specs: dict[str, WeightSpec] = {}
    # `specs` is complete only after all are read: an adapter may change weights that others leave.
    read = [_leaves(run, params, folder, specs) for folder in folders.values()]
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    weights = {}
    for path, spec in specs.items():
        stacked = _stack([own.get(path) for own in read], spec.contract)
        for name, leaf in stacked.items():
            cast = leaf.astype(run.cfg.model.dtype)
            # On every device whole: adapters are small, and rows of all requests multiply by them.
            weights[f"{path}/{name}"] = jax.device_put(cast, everywhere)
    return Adapters(tuple(folders), specs, weights)


def _leaves(
    run: "Run", params: Any, folder: str, specs: dict[str, WeightSpec]
) -> dict[str, Leaves]:
    """Return by path a [..., in..., rank] and b [..., rank, out...] times the scale, with DoRA
    `factor` [..., out...]; in front the repetitions of the pattern, if any. Adds the weights to
    `specs`."""
    adapted = adapt_run(run, folder)
    lora, weights = adapted.cfg.lora, adapted.weights
    assert lora
    read, rewrite = weights.read_adapter(folder), weights.rewrite
    bases = rebase(flat(params), rewrite.adapted)
    specs |= rewrite.adapted
    leaves: dict[str, Leaves] = {}
    for path, spec in rewrite.adapted.items():
        a, b = read[f"{path}/lora_a"], read[f"{path}/lora_b"]
        leaves[path] = {"a": a, "b": b * lora.scale}
        if lora.dora:
            # DoRA's norms need the base weight, so they are computed once here and not in each
            # step.
            factor = functools.partial(dora_factors, lora, spec.contract)
            for _ in range(a.ndim - spec.contract - 1):
                factor = jax.vmap(factor)
            made = jax.jit(factor, out_shardings=NamedSharding(run.mesh, PartitionSpec()))
            base = rewrite.base_weight(path, bases)
            leaves[path]["factor"] = np.asarray(made(base, a, b, read[f"{path}/magnitude"]))
    return leaves


def _stack(leaves: Sequence[Leaves | None], contract: int) -> Leaves:
    """Stack the leaves of one weight along a new dimension of adapters; None changes nothing. Ranks
    are padded to the largest."""
    present = [own for own in leaves if own]
    rank = max(own["a"].shape[-1] for own in present)
    a, b = present[0]["a"], present[0]["b"]
    lead = a.ndim - contract - 1
    outputs = *b.shape[:lead], *b.shape[lead + 1 :]
    # Zeros change nothing: neither the padding of a smaller rank nor an adapter without this
    # weight.
    whole_a = np.zeros((*a.shape[:-1], len(leaves), rank), np.float32)
    whole_b = np.zeros((len(leaves), rank, *outputs), np.float32)
    # One more than there are adapters: factor 0 is that of rows without an adapter.
    factor = np.ones((1 + len(leaves), *outputs), np.float32)
    for i, own in enumerate(leaves):
        if own:
            size = own["a"].shape[-1]
            whole_a[..., i, :size] = own["a"]
            whole_b[i, :size] = np.moveaxis(own["b"], lead, 0)
            factor[i + 1] = own.get("factor", 1.0)
    made = {"a": whole_a, "b": np.moveaxis(whole_b, (0, 1), (lead, lead + 1))}
    dora = any("factor" in own for own in present)
    return made | ({"factor": np.moveaxis(factor, 0, lead)} if dora else {})
