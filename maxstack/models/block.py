"""A block: a mixer and an MLP, each with norms before or after it (or both) and a residual
connection; optionally modulated by a condition, and with an embedding of the layer's own."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxstack.errors import ConfigError
from maxstack.kernels.backends import config_scope
from maxstack.layers.attention import Attention
from maxstack.layers.condition import Condition
from maxstack.layers.context import Context
from maxstack.layers.layer import Layer, layer_of
from maxstack.layers.mlp import ACTIVATIONS
from maxstack.layers.norm import Norm
from maxstack.layers.weight import project, weight
from maxstack.schema.decoder import PerLayerConfig
from maxstack.schema.dit import ConditionConfig, DiTConfig
from maxstack.schema.mixers import NormConfig
from maxstack.schema.stack import StackConfig
from maxstack.sharding import constrain

Batch = Mapping[str, Array]
Aux = dict[str, Any]


class Block(nnx.Module):
    """x + mixer(x), then x + mlp(x), with norms where the placement has them."""

    def __init__(self, name: str, model: StackConfig, per_layer: PerLayerConfig | None = None):
        self.name = name
        self.dtype = model.dtype
        cfg, size = model.blocks[name], model.embed
        dtype, scale = model.param_dtype, model.init_scale
        # 2 x layers outputs add up in the residual stream,
        # whose variance then does not grow with depth.
        stds = {"std": scale, "out_std": scale / (2 * model.layers) ** 0.5, "dtype": dtype}
        # "sandwich" has norms before and after.
        before, after = cfg.placement != "post", cfg.placement != "pre"

        def norm(wanted: bool, section: NormConfig = cfg.norm) -> Norm | None:
            return Norm(section, size, dtype=dtype) if wanted else None

        self.mixer_norm, self.mlp_norm = norm(before), norm(before, cfg.mlp_norm or cfg.norm)
        self.mixer = layer_of(cfg.mixer)(cfg.mixer, size, **stds)
        self.mlp = layer_of(cfg.mlp)(cfg.mlp, size, **stds)
        self.mixer_out_norm, self.mlp_out_norm = norm(after), norm(after)
        self.mixer_scale, self.mlp_scale = (
            weight((size,), "norm", dtype=dtype, fill=cfg.layer_scale) if cfg.layer_scale else None
            for _ in range(2)
        )
        if cfg.modulation:
            shape, axes = (size, 6, size), "embed latent norm"
            self.modulation = weight(shape, axes, dtype=dtype, use="matmul")
            self.modulation_bias = weight((6, size), "latent norm", dtype=dtype)
        # Diffusers' DiT has a condition in every block; with "shared" the model makes one for all.
        self.condition = condition_of(model) if cfg.modulation == "own" else None
        self.is_modulated = cfg.modulation is not None
        self.out_scalar = weight((), "", dtype=dtype, fill=1.0) if cfg.out_scalar else None
        if extra := per_layer:
            self.act = ACTIVATIONS[extra.activation]
            matmul = functools.partial(weight, dtype=dtype, use="matmul")
            self.per_layer_gate = matmul((size, extra.size), "embed latent", std=scale / size**0.5)
            std = stds["out_std"] / extra.size**0.5
            self.per_layer_out = matmul((extra.size, size), "latent embed", std=std)
            self.per_layer_norm = Norm(cfg.norm, size, dtype=dtype)

    def __call__(
        self, x_BTD: Array, context: Context, extra_BTP: Array | None = None
    ) -> tuple[Array, Aux]:
        """-> (x, the MLP's report); `extra_BTP` is the layer's own embedding of the tokens."""
        # Named for remat's policies that save or offload by name.
        x_BTD = checkpoint_name(x_BTD, "input")
        scope = f"model.blocks.{self.name}"
        # One path for blocks with and without conditions.
        before = after = UNMODULATED
        if self.is_modulated:
            before, after = self._modulations(context)
        with context.draw_with_keys(), config_scope(f"{scope}.mixer"):
            mixed_BTD = self.mixer(before.modulate(_apply(self.mixer_norm, x_BTD)), context)
        _check(self.mixer, mixed_BTD, x_BTD)
        mixed_BTD = _scale(_apply(self.mixer_out_norm, mixed_BTD), self.mixer_scale)
        # Gated last, so that a gate of zero, with which
        # training begins, makes the block the identity.
        mixed_BTD = before.gate_output(mixed_BTD)
        # Pinned after every sum, so that the residual stream is laid out alike in all layers.
        x_BTD = constrain(x_BTD + mixed_BTD, "batch residual embed")
        with context.draw_with_keys(), config_scope(f"{scope}.mlp"):
            out_BTD, aux = self.mlp(after.modulate(_apply(self.mlp_norm, x_BTD)), x_BTD, context)
        _check(self.mlp, out_BTD, x_BTD)
        out_BTD = after.gate_output(_scale(_apply(self.mlp_out_norm, out_BTD), self.mlp_scale))
        x_BTD = constrain(x_BTD + out_BTD, "batch residual embed")
        if extra_BTP is not None:
            with context.draw_with_keys():
                # After both parts, from the stream that they have changed.
                gated_BTP = self.act(project(x_BTD, self.per_layer_gate)) * extra_BTP
                out_BTD = project(gated_BTP, self.per_layer_out)
            x_BTD = x_BTD + self.per_layer_norm(out_BTD)
        if self.out_scalar is not None:
            x_BTD = x_BTD * self.out_scalar[...].astype(x_BTD.dtype)
        return x_BTD, {"mlp": aux} if aux else {}

    def _modulations(self, context: Context) -> tuple["Modulation", "Modulation"]:
        """The modulations of mixer and MLP by the condition."""
        condition_BD = context.condition_BD
        if self.condition is not None:
            assert context.time_B1 is not None and context.label_B1 is not None
            time_B, label_B = context.time_B1[:, 0], context.label_B1[:, 0]
            condition_BD = self.condition(time_B, label_B, self.dtype)
        assert condition_BD is not None
        with context.draw_with_keys():
            all_B6D = project(condition_BD, self.modulation, self.modulation_bias)
        parts = [all_B6D[:, i : i + 1] for i in range(6)]
        return Modulation(*parts[:3]), Modulation(*parts[3:])

    def keys_values(self, x_BTD: Array, context: Context) -> tuple[Array, Array]:
        """Keys and values for later layers that have none of their own."""
        assert isinstance(self.mixer, Attention)
        with context.draw_with_keys():
            return self.mixer.keys_values(_apply(self.mixer_norm, x_BTD), context)


def _check(layer: Layer, given: Any, x_BTD: Array) -> None:
    """ConfigError where a layer returns another shape than it takes: one of one's own might, and
    broadcasting would hide it."""
    if getattr(given, "shape", None) != x_BTD.shape:
        found = getattr(given, "shape", type(given).__name__)
        kind = vars(layer.cfg)["kind"]
        raise ConfigError(
            f"kind {kind}: its layer returned {found} for an input of {x_BTD.shape}; both are "
            "[batch, time, embed]"
        )


class Modulation(NamedTuple):
    """Shift and scale of a part's input and a gate on its output, each [B, 1, D], as adaptive norms
    have them (Peebles & Xie 2023, arXiv:2212.09748); None: no change."""

    shift: Array | None
    scale: Array | None
    gate: Array | None

    def modulate(self, x_BTD: Array) -> Array:
        """The input of the part."""
        if self.shift is None or self.scale is None:
            return x_BTD
        return x_BTD * (1 + self.scale) + self.shift

    def gate_output(self, x_BTD: Array) -> Array:
        """The output of the part."""
        return x_BTD if self.gate is None else x_BTD * self.gate


UNMODULATED = Modulation(None, None, None)


def condition_of(model: StackConfig) -> Condition:
    """The layer that makes a condition of a time and a class."""
    assert isinstance(model, DiTConfig)
    section, scale = ConditionConfig(classes=model.classes), model.init_scale
    dtype = model.param_dtype
    return Condition(section, model.embed, std=scale, out_std=scale, dtype=dtype)


def _apply(norm: Norm | None, x: Array) -> Array:
    return norm(x) if norm is not None else x


def _scale(x: Array, factors: nnx.Param | None) -> Array:
    return x if factors is None else x * factors[...].astype(x.dtype)
