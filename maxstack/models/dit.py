"""Diffusion transformers. Shapes: B batch  S side of an image in pixels  C channels  T tokens  D
embed."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.kernels.sequences import arrange, natural
from maxstack.layers.condition import Condition
from maxstack.layers.context import Context, position_keys_of
from maxstack.layers.patches import patch_weight, patches, pixels, sincos2d
from maxstack.layers.weight import project, weight
from maxstack.models.block import Aux, Batch, condition_of
from maxstack.models.stack import Stack
from maxstack.schema.dit import DiTConfig
from maxstack.sharding import constrain


class DiT(Stack):
    """Patches with fixed positions, blocks and a last norm that a condition modulates, and a
    projection back to pixels, which starts at zero."""

    cfg: DiTConfig

    def __init__(self, cfg: DiTConfig):
        super().__init__(cfg)
        dtype, size = cfg.param_dtype, cfg.embed
        scale = cfg.init_scale
        self.patch = patch_weight(cfg.patch, cfg.channels, size, scale, dtype)
        self.patch_bias = weight((size,), "norm", dtype=dtype)
        self.condition = None if cfg.own_conditions else condition_of(cfg)
        self.modulation = weight((size, 2, size), "embed latent norm", dtype=dtype, use="matmul")
        self.modulation_bias = weight((2, size), "latent norm", dtype=dtype)
        shape = cfg.patch, cfg.patch, cfg.output_channels
        axes = "latent latent latent"
        self.out = weight((size, *shape), f"embed {axes}", dtype=dtype, use="matmul")
        self.out_bias = weight(shape, axes, dtype=dtype)

    def __call__(self, batch: Batch) -> tuple[Array, Aux]:
        """-> (the prediction for each pixel, float32 [B, S, S, made], reports of the blocks).
        `batch` holds `pixels`, float [B, S, S, C], `time`, float32 [B], from 0 to 1000, `label`,
        int32 [B], `classes` for none, and in training with dropout `keys`."""
        cfg, context = self.cfg, self._context(batch)
        # Arranged after the embedding: pixels become tokens in natural order alone.
        x_BTD = constrain(arrange(self.embed_patches(batch["pixels"])), "batch residual embed")
        x_BTD, aux, _ = self.run_blocks(x_BTD, context)
        condition_BD = context.condition_BD
        if condition_BD is None:
            assert context.time_B1 is not None and context.label_B1 is not None
            condition_BD = self._first_condition()(
                context.time_B1[:, 0], context.label_B1[:, 0], cfg.dtype
            )
        moved_B2D = project(condition_BD, self.modulation, self.modulation_bias)
        # Shift first, as in diffusers.
        shift_B1D, scale_B1D = moved_B2D[:, :1], moved_B2D[:, 1:]
        # 1 + scale: projections that begin at zero leave the norm as it is.
        normed_BTD = self.norm(x_BTD) * (1 + scale_B1D) + shift_B1D
        with jax.named_scope("model.head"):
            made = natural(project(normed_BTD, self.out, self.out_bias))
        return pixels(made.astype(jnp.float32)), aux

    @jax.named_scope("model.embed")
    def embed_patches(self, pixels_BSSC: Array) -> Array:
        """Pixels -> [B, T, D] in the compute dtype, with positions."""
        cfg, side = self.cfg, self.cfg.image_size // self.cfg.patch
        cells = patches(pixels_BSSC.astype(cfg.dtype), cfg.patch)
        x_BTD = project(cells, self.patch, self.patch_bias)
        return x_BTD + jnp.asarray(sincos2d(side, cfg.embed, whole=False), x_BTD.dtype)

    def _context(self, batch: Batch) -> Context:
        cfg = self.cfg
        keys_BT2 = arrange(position_keys_of(batch["keys"], cfg.tokens)) if "keys" in batch else None
        places_1T = arrange(jnp.arange(cfg.tokens)[None])
        time_B, label_B = batch["time"], batch["label"]
        if self.condition is None:
            return Context(
                places_1T, keys_BT2=keys_BT2, time_B1=time_B[:, None], label_B1=label_B[:, None]
            )
        condition_BD = self.condition(time_B, label_B, cfg.dtype)
        return Context(places_1T, keys_BT2=keys_BT2, condition_BD=condition_BD)

    def _first_condition(self) -> Condition:
        """The condition of the first block, which the last norm reads too, as in diffusers."""
        if self.cfg.prefix:
            first = self.prefix["0"].condition
            assert first is not None
            return first
        stacked = self.blocks[next(iter(self.cfg.stacks))].condition
        assert stacked is not None
        # The weights of the first repetition, cut out of the stack.
        graph, state = nnx.split(stacked)
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
