"""Vision transformers: patches, blocks that see both ways, features of the image, classes.

Shapes: B batch  S side of an image in pixels  G side in patches  C channels  T tokens  D embed  F
features  K classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxstack.kernels.sequences import arrange, natural
from maxstack.layers.context import Context, Table, position_keys_of
from maxstack.layers.patches import patch_weight, patches, sincos2d
from maxstack.layers.pool import MapPool
from maxstack.layers.rope import frequencies
from maxstack.layers.weight import project, weight
from maxstack.models.block import Aux, Batch
from maxstack.models.stack import Stack
from maxstack.schema.encoder import EncoderConfig
from maxstack.schema.encoder import MapPool as MapPoolConfig
from maxstack.schema.mixers import RopeConfig
from maxstack.sharding import constrain


class Encoder(Stack):
    """Patches and positions, blocks, norm, pool, head."""

    cfg: EncoderConfig

    def __init__(self, cfg: EncoderConfig):
        super().__init__(cfg)
        dtype, size = cfg.param_dtype, cfg.embed
        std = cfg.init_scale / size**0.5
        self.patch = patch_weight(cfg.patch, cfg.channels, size, cfg.init_scale, dtype)
        self.patch_bias = weight((size,), "norm", dtype=dtype)
        if cfg.cls:
            self.cls = weight((size,), "norm", dtype=dtype)
        if cfg.registers:
            self.registers = weight((cfg.registers, size), "latent norm", std=std, dtype=dtype)
        if cfg.mask_token:
            self.mask_token = weight((size,), "norm", dtype=dtype)
            # No objective here hides patches, so no gradient reaches it; it is kept for export.
            self.mask_token.set_metadata(frozen=True)
        if cfg.positions == "learned":
            rows = (cfg.image_size // cfg.patch) ** 2 + cfg.cls
            self.positions = weight((rows, size), "latent embed", std=std, dtype=dtype)
        self.pool = (
            MapPool(cfg.pool, size, std=cfg.init_scale, out_std=cfg.init_scale, dtype=dtype)
            if isinstance(cfg.pool, MapPoolConfig)
            else None
        )
        if cfg.classes:
            self.head = weight(
                (cfg.features, cfg.classes),
                "embed latent",
                std=0.0,
                dtype=dtype,
                use="matmul",
                beside_adapters=True,
            )
            self.head_bias = weight((cfg.classes,), "latent", dtype=dtype, beside_adapters=True)

    def trunk(self, batch: Batch) -> tuple[Array, Aux, Context]:
        """-> (the residual stream after the last block [B, T, D] in the compute dtype, reports of
        the blocks, the context), in the order of kernels/sequences.py, `arrange`. `batch` holds
        `pixels`, float [B, S, S, C], and in training with dropout `keys`, uint32 [B, 2], random
        keys of rows."""
        x_BTD = arrange(self.embed_patches(batch["pixels"]))
        x_BTD = constrain(x_BTD, "batch residual embed")
        return self.run_blocks(x_BTD, self._context(batch))

    @jax.named_scope("model.embed")
    def embed_patches(self, pixels_BSSC: Array) -> Array:
        """Pixels -> tokens [B, T, D] with their positions, in natural order."""
        cfg, rows = self.cfg, pixels_BSSC.shape[0]
        side, dtype = cfg.image_size // cfg.patch, jnp.dtype(cfg.dtype)
        x_BTD = project(patches(pixels_BSSC.astype(dtype), cfg.patch), self.patch, self.patch_bias)
        before = []
        if cfg.cls:
            before.append(self.cls[...][None])
        if cfg.registers:
            before.append(self.registers[...])
        if cfg.positions == "learned":
            places = self.positions[...].astype(dtype)
            x_BTD = x_BTD + places[int(cfg.cls) :]
            if cfg.cls:
                # A learned table's first row belongs to the
                # class token; registers have no positions.
                before[0] = before[0].astype(dtype) + places[:1]
        elif cfg.positions == "sincos2d":
            x_BTD = x_BTD + jnp.asarray(sincos2d(side, cfg.embed), dtype)
        first = [jnp.broadcast_to(part.astype(dtype), (rows, *part.shape)) for part in before]
        return jnp.concatenate([*first, x_BTD], axis=1)

    def _context(self, batch: Batch) -> Context:
        cfg = self.cfg
        tables = {
            (rope, size): arrange(self._table(rope, size))
            for block in cfg.blocks.values()
            for rope, size in block.mixer.ropes
        }
        keys_BT2 = arrange(position_keys_of(batch["keys"], cfg.tokens)) if "keys" in batch else None
        places_1T = arrange(jnp.arange(cfg.tokens)[None])
        return Context(places_1T, tables=tables, keys_BT2=keys_BT2)

    def _table(self, rope: RopeConfig, head_dim: int) -> Table:
        """Cosines and sines [1, T, 1, R] of rows and columns, counted from -1 to 1 across the
        image; tokens before the patches are not rotated (DINOv3, arXiv:2508.10104)."""
        side = self.cfg.image_size // self.cfg.patch
        # Half of the pairs turn by row, half by column.
        rates = frequencies(rope, head_dim // 2)[0]
        # Centres of patches, so that another image size keeps the same range.
        places = 2.0 * (np.arange(side) + 0.5) / side - 1.0
        turns = 2.0 * np.pi * places[:, None] * rates
        rows, columns = np.repeat(turns, side, axis=0), np.tile(turns, (side, 1))
        angles = np.concatenate([rows, columns], axis=1)
        # An angle of 0 leaves class token and registers as they are.
        angles = np.pad(angles, ((self.cfg.before, 0), (0, 0)))[None, :, None]
        return jnp.cos(jnp.asarray(angles, jnp.float32)), jnp.sin(jnp.asarray(angles, jnp.float32))

    @jax.named_scope("model.pool")
    def features(self, x_BTD: Array) -> Array:
        """The residual stream after the last block -> features of images [B, F]."""
        x_BTD = natural(self.norm(x_BTD))
        # Class token and registers come first, and are not pooled.
        patches_BTD = x_BTD[:, self.cfg.before :]
        if self.pool is not None:
            return self.pool(patches_BTD)
        # In float32, since it adds up all patches.
        mean_BD = patches_BTD.astype(jnp.float32).mean(axis=1).astype(x_BTD.dtype)
        parts = {
            "cls": [x_BTD[:, 0]],
            "mean": [mean_BD],
            "cls_mean": [x_BTD[:, 0], mean_BD],
        }
        return jnp.concatenate(parts[self.cfg.pool.kind], axis=-1)

    @jax.named_scope("model.head")
    def logits(self, features_BF: Array) -> Array:
        """Features -> float32 [B, K]."""
        logits_BK = project(features_BF, self.head).astype(jnp.float32)
        return logits_BK + self.head_bias[...].astype(jnp.float32)
