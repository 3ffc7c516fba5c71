"""A weight with an adapter beside it. Shapes: K contracted dimensions  N others  R rank."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.context import position_keys
from maxstack.layers.weight import Substitute, Weight, multiply, project, values, weight
from maxstack.schema.lora import LoraConfig

TINY = 1e-12


class Adapted(Substitute, nnx.Module):
    """W x + scale B A x, and with `magnitude` m (W + scale B A) x / |W + scale B A|, column by
    column; W is frozen."""

    def __init__(self, base: Weight, param: nnx.Param, path: str, cfg: LoraConfig):
        meta = param.get_metadata()
        shape, axes, contract = param.shape[-len(meta["axes"]) :], meta["axes"], meta["contract"]
        self.base, self.path, self.cfg, self.contract = base, path, cfg, contract
        lead = param.shape[: param.ndim - len(shape)]
        before, after = " ".join(axes[:contract]), " ".join(axes[contract:])
        inputs, outputs = shape[:contract], shape[contract:]
        std = (3 * math.prod(inputs)) ** -0.5
        self.lora_a = _stacked(
            weight(
                (*inputs, cfg.rank),
                f"{before} latent",
                dtype="float32",
                std=std,
                use="matmul",
                contract=contract,
            ),
            lead,
        )
        self.lora_b = _stacked(
            weight((cfg.rank, *outputs), f"latent {after}", dtype="float32", use="matmul"), lead
        )
        if cfg.dora:
            self.magnitude = _stacked(weight(outputs, after, dtype="float32"), lead)

    def project(self, x: jax.Array) -> jax.Array:
        """See weight.project."""
        y = project(x, self.base) + project(
            project(self._dropped(x), self.lora_a), self.lora_b
        ) * jnp.asarray(self.cfg.scale, x.dtype)
        return y * self._lengthened().astype(x.dtype) if self.cfg.dora else y

    def values(self, dtype: Any) -> jax.Array:
        """The merged weight."""
        magnitude = (self.magnitude[...],) if self.cfg.dora else ()
        return merged(
            self.cfg,
            self.contract,
            values(self.base, jnp.float32),
            self.lora_a[...],
            self.lora_b[...],
            *magnitude,
        ).astype(dtype)

    def _lengthened(self) -> jax.Array:
        """m / |W + scale B A| of each column; the length is no variable of the gradient (section
        4.3 of the paper)."""
        whole = jax.lax.stop_gradient(
            values(self.base, jnp.float32)
            + self.cfg.scale * multiply(self.lora_a[...], self.lora_b[...])
        )
        return _lengthening(whole, self.magnitude[...], self.contract)

    def _dropped(self, x: jax.Array) -> jax.Array:
        """x [B, T, ...] with some of it zero in training, drawn by the key of the position, which
        has the layer in it, and by the weight's path."""
        if not self.cfg.dropout or (keys_BT2 := position_keys()) is None:
            return x
        word = int.from_bytes(hashlib.blake2b(self.path.encode(), digest_size=4).digest(), "little")

        def kept(key: jax.Array) -> jax.Array:
            own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), word)
            return jax.random.bernoulli(own, 1 - self.cfg.dropout, x.shape[2:])

        keep = jax.vmap(jax.vmap(kept))(keys_BT2)
        return jnp.where(keep, x / jnp.asarray(1 - self.cfg.dropout, x.dtype), 0)


def merged(
    cfg: LoraConfig,
    contract: int,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    magnitude: jax.Array | None = None,
) -> jax.Array:
    """W + scale B A, with columns as long as `magnitude` says where it is given, float32; the
    weight contracts its first dimensions."""
    whole = w + cfg.scale * multiply(a, b)
    return whole if magnitude is None else whole * _lengthening(whole, magnitude, contract)


def _lengthening(whole: jax.Array, magnitude: jax.Array, contract: int) -> jax.Array:
    """What each column is to be multiplied by."""
    return magnitude / jnp.maximum(column_lengths(whole, range(contract)), TINY)


def column_lengths(w: jax.Array, contracted: Iterable[int]) -> jax.Array:
    """Euclidean, over the contracted dimensions."""
    return jnp.sqrt(jnp.sum(w * w, axis=tuple(contracted)))


def _stacked(param: nnx.Param, lead: tuple[int, ...]) -> nnx.Param:
    return nnx.Param(
        jnp.broadcast_to(param.get_value(), (*lead, *param.shape)), **param.get_metadata()
    )
