"""The MLPs that every token goes through. Shapes: B batch  T time  D embed  F mlp hidden."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxstack.layers.context import Context
from maxstack.layers.weight import project, weight
from maxstack.schema.mlps import DenseMLPConfig, GatedMLPConfig
from maxstack.sharding import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class GatedMLP(nnx.Module):
    """act(x gate) * (x up) down (Shazeer 2020, arXiv:2002.05202); `out_std` is the initial scale of
    `down`."""

    def __init__(self, cfg: GatedMLPConfig, embed: int, *, std: float, out_std: float, dtype: str):
        self.act = ACTIVATIONS[cfg.activation]
        self.gate = weight(
            (embed, cfg.hidden), "embed mlp", std=std / embed**0.5, dtype=dtype, use="matmul"
        )
        self.up = weight(
            (embed, cfg.hidden), "embed mlp", std=std / embed**0.5, dtype=dtype, use="matmul"
        )
        self.down = weight(
            (cfg.hidden, embed),
            "mlp embed",
            std=out_std / cfg.hidden**0.5,
            dtype=dtype,
            use="matmul",
        )
        if cfg.bias:
            self.gate_bias = weight((cfg.hidden,), "mlp", dtype=dtype)
            self.up_bias = weight((cfg.hidden,), "mlp", dtype=dtype)
            self.down_bias = weight((embed,), "norm", dtype=dtype)
        self.bias = cfg.bias

    def __call__(
        self, x_BTD: jax.Array, residual_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """-> ([B, T, D], no report); reads x alone."""
        gate_BTF, up_BTF = project(x_BTD, self.gate), project(x_BTD, self.up)
        if self.bias:
            gate_BTF, up_BTF = (
                gate_BTF + self.gate_bias.astype(x_BTD.dtype),
                up_BTF + self.up_bias.astype(x_BTD.dtype),
            )
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
        h_BTF = constrain(gated(self.act, gate_BTF, up_BTF), "batch seq mlp")
        out_BTD = project(h_BTF, self.down)
        if self.bias:
            out_BTD = out_BTD + self.down_bias.astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "mlp_out"), {}


class DenseMLP(nnx.Module):
    """act(x up) down; `out_std` is the initial scale of `down`."""

    def __init__(self, cfg: DenseMLPConfig, embed: int, *, std: float, out_std: float, dtype: str):
        self.act = ACTIVATIONS[cfg.activation]
        self.up = weight(
            (embed, cfg.hidden), "embed mlp", std=std / embed**0.5, dtype=dtype, use="matmul"
        )
        self.down = weight(
            (cfg.hidden, embed),
            "mlp embed",
            std=out_std / cfg.hidden**0.5,
            dtype=dtype,
            use="matmul",
        )
        if cfg.bias:
            self.up_bias = weight((cfg.hidden,), "mlp", dtype=dtype)
            self.down_bias = weight((embed,), "norm", dtype=dtype)
        self.bias = cfg.bias

    def __call__(
        self, x_BTD: jax.Array, residual_BTD: jax.Array, context: Context
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """-> ([B, T, D], no report); reads x alone."""
        up_BTF = project(x_BTD, self.up)
        if self.bias:
            up_BTF = up_BTF + self.up_bias.astype(x_BTD.dtype)
        h_BTF = constrain(self.act(checkpoint_name(up_BTF, "mlp_up")), "batch seq mlp")
        out_BTD = project(h_BTF, self.down)
        if self.bias:
            out_BTD = out_BTD + self.down_bias.astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "mlp_out"), {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(
    act: Callable[[jax.Array], jax.Array], gate_BTF: jax.Array, up_BTF: jax.Array
) -> jax.Array:
    """act(gate) * up. Its backward pass keeps gate and up alone and does the activation again,
    which costs less than to keep what it went through."""
    return act(gate_BTF) * up_BTF


def _forward(act, gate_BTF, up_BTF):
    return act(gate_BTF) * up_BTF, (gate_BTF, up_BTF)


def _backward(act, saved, dh_BTF):
    saved, dh_BTF = jax.lax.optimization_barrier(
        (saved, dh_BTF)
    )  # else XLA finds the first activation again, and keeps it
    return jax.vjp(lambda gate_BTF, up_BTF: act(gate_BTF) * up_BTF, *saved)[1](dh_BTF)


gated.defvjp(_forward, _backward)
