"""The MLPs that every token goes through. Shapes: B batch  T time  D embed  F mlp hidden."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxstack.layers.context import Context
from maxstack.layers.layer import Layer
from maxstack.layers.weight import project
from maxstack.schema.mlps import DenseMLPConfig, GatedMLPConfig
from maxstack.sharding import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class GatedMLP(Layer):
    """act(x gate) * (x up) down (Shazeer 2020, arXiv:2002.05202)."""

    cfg: GatedMLPConfig | DenseMLPConfig

    def __call__(
        self, x_BTD: Array, residual_BTD: Array, context: Context
    ) -> tuple[Array, dict[str, Array]]:
        """-> ([B, T, D], no report); reads x alone."""
        h_BTF = constrain(self._hidden(x_BTD), "batch seq mlp")
        return checkpoint_name(project(h_BTF, self.down, self.down_bias), "mlp_out"), {}

    def _hidden(self, x_BTD: Array) -> Array:
        # Named so that a remat policy can keep what the backward pass of the gate reads.
        gate_BTF = checkpoint_name(project(x_BTD, self.gate, self.gate_bias), "mlp_gate")
        up_BTF = checkpoint_name(project(x_BTD, self.up, self.up_bias), "mlp_up")
        return gate(ACTIVATIONS[self.cfg.activation], gate_BTF, up_BTF)


class DenseMLP(GatedMLP):
    """act(x up) down."""

    def _hidden(self, x_BTD: Array) -> Array:
        up_BTF = checkpoint_name(project(x_BTD, self.up, self.up_bias), "mlp_up")
        return ACTIVATIONS[self.cfg.activation](up_BTF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate(act: Callable[[Array], Array], gate_BTF: Array, up_BTF: Array) -> Array:
    """act(gate) * up. The backward pass keeps gate and up alone and computes the activation again,
    which costs less than keeping its intermediate values."""
    return act(gate_BTF) * up_BTF


def _forward(act, gate_BTF, up_BTF):
    return act(gate_BTF) * up_BTF, (gate_BTF, up_BTF)


def _backward(act, saved, dh_BTF):
    # Without the barrier XLA merges this activation with the first one, and keeps its values.
    saved, dh_BTF = jax.lax.optimization_barrier((saved, dh_BTF))
    return jax.vjp(lambda gate_BTF, up_BTF: act(gate_BTF) * up_BTF, *saved)[1](dh_BTF)


gate.defvjp(_forward, _backward)
