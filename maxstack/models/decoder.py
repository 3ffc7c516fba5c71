"""The decoder-only language model, composed of kinds of blocks by a pattern.

There is one decoder for all families: a scalar difference between them is a field of the
configuration, a structural one a kind of mixer, MLP or norm; names of families occur in
hf/families/ alone. Shapes: B batch  T time  D embed  V vocab  P per-layer embedding  L layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.kernels.sequences import arrange, natural
from maxstack.layers.cache import LayerCache, Rows
from maxstack.layers.context import Context, Table, position_keys_of
from maxstack.layers.norm import Norm
from maxstack.layers.rope import rope_table
from maxstack.layers.weight import Substitute, Weight, lookup, multiply, project, values, weight
from maxstack.models.block import Aux, Batch, Block
from maxstack.models.stack import Stack, layer_slice
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.mixers import LongRopeScaling, RopeConfig
from maxstack.sharding import constrain


class Decoder(Stack):
    """Embedding, blocks, norm, head."""

    cfg: DecoderConfig

    def __init__(self, cfg: DecoderConfig):
        super().__init__(cfg)
        dtype, std = cfg.param_dtype, cfg.init_scale / cfg.embed**0.5
        drawn = functools.partial(weight, std=std, dtype=dtype)
        self.embed = drawn((cfg.vocab, cfg.embed), "vocab embed", use="rows")
        if cfg.positions:
            self.positions = drawn((cfg.positions, cfg.embed), "latent embed")
        if extra := cfg.per_layer:
            # One table for all layers: their embeddings of a token lie together.
            sizes = cfg.layers, extra.size
            self.per_layer_embed = drawn(
                (extra.vocab, *sizes), "vocab latent latent", std=extra.size**-0.5, use="rows"
            )
            self.per_layer_project = drawn((cfg.embed, *sizes), "embed latent latent", use="matmul")
            self.per_layer_norm = Norm(cfg.norm, extra.size, dtype=dtype)

        self.mtp = nnx.Dict(
            {f"{i}": MTPModule(cfg) for i in range(cfg.mtp.depth)} if cfg.mtp else {}
        )
        if cfg.mtp and not cfg.mtp.loss:
            for _, param in nnx.iter_graph(self.mtp):
                if isinstance(param, nnx.Param):
                    # No gradient reaches it, and weight decay alone would shrink it.
                    param.set_metadata(frozen=True)
        if cfg.head.scores:
            self.score = weight(
                (cfg.embed, 1),
                "embed latent",
                std=std,
                dtype=dtype,
                use="matmul",
                beside_adapters=True,
            )
        elif not cfg.head.tied:
            self.head = drawn((cfg.embed, cfg.vocab), "embed vocab", use="head")
        if cfg.head.value:
            self.value = weight(
                (cfg.embed, 1),
                "embed latent",
                std=0.0,
                dtype=dtype,
                use="matmul",
                beside_adapters=True,
            )
        if cfg.head.bias:
            self.head_bias = weight((cfg.vocab,), "vocab", dtype=dtype)

    def block(self, name: str) -> Block:
        return Block(name, self.cfg, self.cfg.per_layer)

    def trunk(self, batch: Batch) -> tuple[Array, Aux, Context]:
        """-> (the residual stream after the last block [B, T, D] in the compute dtype, reports of
        the blocks by path, the context); all in the order of kernels/sequences.py, `arrange`.

        `batch` holds tokens [B, T] and, where rows hold several documents, positions and segments
        [B, T]; for mixtures of experts on rows of one document with padding, `real`, bool [B, T];
        in training with dropout, `keys`, uint32 [B, 2], random keys of rows; and optionally
        `embedding_noise` [B, T, D], added to the embeddings.
        """
        cfg, tokens_BT = self.cfg, arrange(batch["tokens"])
        context = _context(cfg, batch, tokens_BT.shape[1])
        x_BTD, extra_LBTP = self._embed_inputs(tokens_BT, context)
        # NEFTune's, by rows of the global batch, and so in natural order until here.
        if "embedding_noise" in batch:
            x_BTD = x_BTD + arrange(batch["embedding_noise"]).astype(x_BTD.dtype)
        return self.run_blocks(x_BTD, context, extra_LBTP)

    def _embed_inputs(self, tokens_BT: Array, context: Context) -> tuple[Array, Array | None]:
        """The residual stream before the first block, and the layers' own embeddings."""
        x_BTD = self.embed_tokens(tokens_BT)
        if self.cfg.positions:
            # By position in the document, so packed rows count from 0 in each.
            x_BTD = x_BTD + self.positions[...].astype(self.cfg.dtype)[context.positions_BT]
        with context.draw_with_keys():
            return x_BTD, self._per_layer(tokens_BT, x_BTD) if self.cfg.per_layer else None

    def decode_inputs(self, rows: Rows, length: int) -> tuple[Array, Context, list[Array | None]]:
        """Begin a step of inference -> the residual stream [R, 1, D] before the first block, what
        all blocks share, and each layer's own embedding of the tokens [R, 1, P] or None. `length`
        is the largest number of tokens of a request.

        The caller runs the blocks (inference/layer_programs.py), one after the other and unrolled:
        a scan over stacked weights would copy them.
        """
        context = self._decode_context(rows, length)
        x_R1D, extra_LR1P = self._embed_inputs(rows.tokens_R[:, None], context)
        return x_R1D, context, [layer_slice(extra_LR1P, i) for i in range(self.cfg.layers)]

    def decode_further(
        self, module: int, x_R1D: Array, rows: Rows, cache: LayerCache, length: int
    ) -> Array:
        """Run a module of multi-token prediction on the state [R, 1, D] after the last block, or of
        the module before -> its state [R, 1, D]. `rows` holds the tokens whose embeddings the
        module reads: for module 0 the token after each row's own, and so on. Reads and writes
        `cache`."""
        context = dataclasses.replace(self._decode_context(rows, length), cache=cache)
        next_R1D = self.embed_tokens(rows.tokens_R[:, None])
        return self.mtp[f"{module}"](x_R1D, next_R1D, context)[0]

    def _decode_context(self, rows: Rows, length: int) -> Context:
        batch = {
            # -1, of an unused row, has no place in a table of positions.
            "positions": jnp.maximum(rows.positions_R, 0)[:, None],
            # Unused rows may choose no expert.
            "real": (rows.positions_R >= 0)[:, None],
        }
        return _context(self.cfg, batch, 1, length)

    def __call__(self, tokens_BT: Array, **fields: Array) -> Array:
        """Tokens, and further fields of a batch (`trunk`) -> float32 logits [B, T, V]."""
        return self.logits(self.hidden({"tokens": tokens_BT, **fields}))

    def hidden(self, batch: Batch) -> Array:
        """The normalised residual stream that the head reads [B, T, D], in natural order."""
        return natural(self.norm(self.trunk(batch)[0]))

    @jax.named_scope("model.embed")
    def embed_tokens(self, tokens_BT: Array) -> Array:
        """Tokens -> [B, T, D] in the compute dtype."""
        # The residual stream lies split over tensor as well, between a gather and a scatter that
        # tensor parallelism has anyway.
        x_BTD = constrain(lookup(self.embed, tokens_BT, self.cfg.dtype), "batch residual embed")
        return x_BTD * self.cfg.embed_scale if self.cfg.embed_scale else x_BTD

    def readout(self, x_BTD: Array) -> tuple[Array, Array, Array | None, str]:
        """The normalised residual stream as the head reads it, the head's matrix [D, V] and bias
        [V], and the logical axes of the matrix as it is stored."""
        head = self.cfg.head
        # A tied head is stored as the embedding, [V, D]; the last result names axes in that order.
        kept: Weight = self.embed if head.tied else self.head
        table = values(kept, self.cfg.param_dtype)
        bias_V = self.head_bias[...] if head.bias else None
        if isinstance(kept, Substitute):
            x_BTD = kept.read(x_BTD)
        if head.tied:
            return x_BTD, table.T, bias_V, "vocab embed"
        return x_BTD, table, bias_V, "embed vocab"

    def logits(self, x_BTD: Array) -> Array:
        """Normalised residual stream -> float32 logits [B, T, V]."""
        # A substitute multiplies in its own way; a plain weight as the loss does, from `readout`.
        kept: Weight = self.embed if self.cfg.head.tied else self.head
        if isinstance(kept, Substitute):
            logits_BTV = kept.scores(x_BTD, self.cfg.head.tied, self.cfg.param_dtype)
        else:
            logits_BTV = multiply(x_BTD, self.readout(x_BTD)[1])
        # Pinned before the cast, so that nothing is resharded in float32.
        logits_BTV = constrain(logits_BTV, "batch seq vocab").astype(jnp.float32)
        if self.cfg.head.bias:
            logits_BTV = logits_BTV + self.head_bias[...].astype(jnp.float32)
        cap = self.cfg.head.soft_cap
        return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV

    def scores(self, x_BTD: Array) -> Array:
        """Normalised residual stream -> float32 scores [B, T], in natural order."""
        scores_BT1 = project(x_BTD, self.score)
        return natural(scores_BT1[:, :, 0].astype(jnp.float32))

    def values(self, x_BTD: Array) -> Array:
        """Normalised residual stream -> float32 value estimates [B, T], in natural order."""
        values_BT1 = project(x_BTD, self.value)
        return natural(values_BT1[:, :, 0].astype(jnp.float32))

    def _per_layer(self, tokens_BT: Array, x_BTD: Array) -> Array:
        """[L, B, T, P]: the mean, times sqrt 2, of the layer's embedding of each token and of a
        projection of the model's (Gemma 4)."""
        assert self.cfg.per_layer
        size = self.cfg.per_layer.size
        own_BTLP = lookup(self.per_layer_embed, tokens_BT, x_BTD.dtype) * size**0.5
        seen_BTLP = project(x_BTD, self.per_layer_project) * self.cfg.embed**-0.5
        # Layers first, since each block takes one, by slice or by scan.
        return jnp.moveaxis((own_BTLP + self.per_layer_norm(seen_BTLP)) * 0.5**0.5, 2, 0)


class MTPModule(nnx.Module):
    """A step of multi-token prediction: from position t's state and the embedding of the next token
    to a state that predicts the one after (DeepSeek-V3 2024, arXiv:2412.19437, eq. 21-23)."""

    def __init__(self, cfg: DecoderConfig):
        assert cfg.mtp
        dtype = cfg.param_dtype
        self.embed_norm, self.hidden_norm, self.norm = (
            Norm(cfg.norm, cfg.embed, dtype=dtype) for _ in range(3)
        )
        # One weight for both inputs: contracting two dimensions adds their projections up.
        self.project = weight(
            (2, cfg.embed, cfg.embed),
            "latent embed norm",
            std=(2 * cfg.embed) ** -0.5,
            dtype=dtype,
            use="matmul",
            contract=2,
        )
        # Without embeddings per layer: its token has none.
        self.block = Block(cfg.mtp.block, cfg)

    def __call__(self, x_BTD: Array, next_BTD: Array, context: Context) -> tuple[Array, Aux]:
        """(state, embedding of the next token) -> (state one token further, the block's report)."""
        both_BT2D = jnp.stack([self.embed_norm(next_BTD), self.hidden_norm(x_BTD)], axis=2)
        with context.draw_with_keys():
            return self.block(project(both_BT2D, self.project), context)


def _context(cfg: DecoderConfig, batch: Batch, length: int, longest: int | None = None) -> Context:
    """The context of a batch that is in natural order, arranged for the devices. `longest`: the
    `length` of rope_table."""
    positions_BT = batch.get("positions", jnp.arange(length)[None])
    segments_BT = batch.get("segments")
    # Once a step: everything that follows from them is in the order of the devices too.
    places_BT, documents_BT = arrange(positions_BT), arrange(segments_BT)
    # Padding of packed rows is segment 0.
    real_BT = arrange(batch.get("real")) if documents_BT is None else documents_BT > 0

    def table(rope: RopeConfig, size: int) -> Table:
        # LongRoPE depends on where documents end, which only the natural order shows.
        if isinstance(rope.scaling, LongRopeScaling):
            return arrange(rope_table(rope, positions_BT, segments_BT, size, longest))
        return rope_table(rope, places_BT, documents_BT, size)

    ropes = [rope for block in cfg.blocks.values() for rope in block.mixer.ropes]
    keys_BT2 = arrange(position_keys_of(batch["keys"], length)) if "keys" in batch else None
    tables = {key: table(*key) for key in ropes}
    return Context(places_BT, documents_BT, tables, real_BT=real_BT, keys_BT2=keys_BT2)
