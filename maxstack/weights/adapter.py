"""Weights with an adapter: LoRA (Hu et al. 2021, arXiv:2106.09685) and DoRA (Liu et al. 2024,
arXiv:2402.09353).

The base W is frozen and may be quantized. LoRA computes W x + scale B A x without making W + scale
B A. DoRA divides each column of that sum by its norm and multiplies it by a trained magnitude, so
it needs the norms of the merged columns at each step. Shapes: K contracted dimensions  N others
R rank.
"""

import contextlib
import contextvars
import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.context import position_keys
from maxstack.layers.weight import Substitute, Weight, multiply, project, values, weight
from maxstack.schema.lora import LoraConfig
from maxstack.sharding import holding
from maxstack.weights.spec import WeightSpec, stacked

# A column of zeros has no direction to scale.
TINY = 1e-12
_off: contextvars.ContextVar[bool] = contextvars.ContextVar("adapters_off", default=False)
LEAVES = "lora_a", "lora_b", "magnitude"
"""Names of an adapter's weights; the last with DoRA alone."""


def without_adapters() -> contextlib.AbstractContextManager[None]:
    """Context in which weights are traced without their adapters."""
    return holding(_off, True)


class AdaptedWeight(Substitute, nnx.Module):
    """W x + scale B A x, and with `magnitude` m (W + scale B A) x / |W + scale B A|, column by
    column; W is frozen."""

    def __init__(self, base: Weight, param: nnx.Param, path: str, cfg: LoraConfig):
        spec = WeightSpec.of(param)
        lead, split = param.shape[: param.ndim - len(spec.shape)], spec.contract
        outputs = spec.shape[split:]
        before, after = " ".join(spec.axes[:split]), " ".join(spec.axes[split:])
        self.base, self.path = base, path
        self.cfg, self.contract = cfg, split
        make = functools.partial(weight, dtype="float32")
        # The deviation of a uniform distribution up to 1 / sqrt(inputs).
        std = (3 * math.prod(spec.shape[:split])) ** -0.5
        shape_a = (*spec.shape[:split], cfg.rank)
        a = make(shape_a, f"{before} latent", std=std, use="matmul", contract=split)
        self.lora_a = stacked(a, lead)
        # B has no std, so it is zero and a new adapter changes nothing; A alone is random.
        self.lora_b = stacked(make((cfg.rank, *outputs), f"latent {after}", use="matmul"), lead)
        if cfg.dora:
            self.magnitude = stacked(make(outputs, after), lead)

    def project(self, x: Array) -> Array:
        """See weight.project."""
        if _off.get():
            return project(x, self.base)
        # Two thin products: making W + scale B A would take a matrix as large as W at each step.
        change = project(project(self._drop(x), self.lora_a), self.lora_b)
        y = project(x, self.base) + change * self.cfg.scale
        if not self.cfg.dora:
            return y
        # The norm is a constant of the gradient (section 4.3 of the paper).
        whole = jax.lax.stop_gradient(self._merge(None))
        return y * _factors(whole, self.magnitude[...], self.contract).astype(x.dtype)

    def values(self, dtype: Any) -> Array:
        """Return the merged weight."""
        if _off.get():
            return values(self.base, dtype)
        return self._merge(self.magnitude[...] if self.cfg.dora else None).astype(dtype)

    def _merge(self, magnitude: Array | None) -> Array:
        w = values(self.base, jnp.float32)
        return merge(self.cfg, self.contract, w, self.lora_a[...], self.lora_b[...], magnitude)

    def _drop(self, x: Array) -> Array:
        """Return x [B, T, ...] after dropout, and outside of training x itself."""
        # Evaluation and inference have no keys of positions.
        if not self.cfg.dropout or (keys_BT2 := position_keys()) is None:
            return x
        # The key of a position holds the seed, the step, the row of the global batch and the layer;
        # the path tells the weights of a layer apart. Drawn for arrays as devices hold them,
        # dropout on a ring over context hit other positions than on one device (gradients differed
        # by 63 %).
        word = int.from_bytes(hashlib.blake2b(self.path.encode(), digest_size=4).digest(), "little")

        def mask(key: Array) -> Array:
            own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), word)
            return jax.random.bernoulli(own, 1 - self.cfg.dropout, x.shape[2:])

        keep = jax.vmap(jax.vmap(mask))(keys_BT2)
        return jnp.where(keep, x / (1 - self.cfg.dropout), 0)


def merge(
    cfg: LoraConfig,
    contract: int,
    w: Array,
    a: Array,
    b: Array,
    magnitude: Array | None = None,
) -> Array:
    """Return W + scale B A in float32, with columns of the norms `magnitude` if given; the first
    `contract` dimensions are contracted."""
    # In float32: the change may be smaller than a step of W in bfloat16.
    whole = w + cfg.scale * multiply(a, b)
    return whole if magnitude is None else whole * _factors(whole, magnitude, contract)


def dora_factors(
    cfg: LoraConfig, contract: int, w: Array, a: Array, b: Array, magnitude: Array
) -> Array:
    """Return the factors by which DoRA multiplies the columns of W + scale B A."""
    return _factors(merge(cfg, contract, w, a, b), magnitude, contract)


def _factors(whole: Array, magnitude: Array, contract: int) -> Array:
    return magnitude / jnp.maximum(column_norms(whole, range(contract)), TINY)


def column_norms(w: Array, contracted: Iterable[int]) -> Array:
    """Return the Euclidean norm of each column, over the contracted dimensions."""
    return jnp.sqrt(jnp.sum(w * w, axis=tuple(contracted)))
