"""One decoder-only model, composed of block kinds by a pattern. Shapes: B batch  T time  D embed  V vocab."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.layers.attention import Attention
from maxstack.layers.mlp import MLP
from maxstack.layers.norm import RMSNorm
from maxstack.layers.rope import rope_table
from maxstack.layers.weight import draw, project, weight
from maxstack.models.config import BlockConfig, DecoderConfig, RematConfig
from maxstack.sharding import constrain

Batch = Mapping[str, jax.Array]


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, cfg: BlockConfig, model: DecoderConfig):
        scale, dtype = model.init_scale, model.param_dtype
        out_scale = scale / (2 * model.layers) ** 0.5
        self.mixer_norm = RMSNorm(cfg.norm, model.embed, dtype=dtype)
        self.mixer = Attention(cfg.mixer, model.embed, std=scale, out_std=out_scale, dtype=dtype)
        self.mlp_norm = RMSNorm(cfg.norm, model.embed, dtype=dtype)
        self.mlp = MLP(cfg.mlp, model.embed, std=scale, out_std=out_scale, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, tables: dict, segments_BT: jax.Array | None) -> jax.Array:
        x_BTD = constrain(x_BTD + self.mixer(self.mixer_norm(x_BTD), tables, segments_BT), "batch seq embed")
        return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD)), "batch seq embed")


class Decoder(nnx.Module):
    """Embedding, blocks, norm, head. Blocks of the pattern are stacked over its repetitions, along a leading axis named `layers`.

    Built, it holds placeholders; `initial` draws the weights. `change` maps each new block and example inputs to the block that is used.
    """

    def __init__(self, cfg: DecoderConfig, change: Callable[..., nnx.Module] | None = None):
        self.cfg = cfg
        dtype, std = cfg.param_dtype, cfg.init_scale / cfg.embed**0.5
        self.embed = weight((cfg.vocab, cfg.embed), "vocab embed", std=std, dtype=dtype)
        first, period, repeats = len(cfg.prefix), pattern_keys(cfg), periods(cfg)
        rest = cfg.order[first + repeats * len(period):]

        def block(name: str) -> Any:
            built, example = Block(cfg.blocks[name], cfg), jnp.zeros((1, 8, cfg.embed), cfg.dtype)
            return change(built, example, _tables(cfg, jnp.arange(8)[None]), None) if change else built

        self.prefix = nnx.Dict({f"{i}": block(name) for i, name in enumerate(cfg.prefix)})
        self.blocks = nnx.Dict({key: _stack(block(name), repeats) for key, name in period.items()} if repeats else {})
        self.rest = nnx.Dict({f"{i}": block(name) for i, name in enumerate(rest)})
        self.norm = RMSNorm(cfg.norm, cfg.embed, dtype=dtype)
        if not cfg.head.tied:
            self.head = weight((cfg.embed, cfg.vocab), "embed vocab", std=std, dtype=dtype)
        if cfg.head.bias:
            self.head_bias = weight((cfg.vocab,), "vocab", dtype=dtype)

    def hidden(self, batch: Batch) -> jax.Array:
        """The last hidden state [B, T, D] in the compute dtype.

        `batch` holds tokens [B, T] and, where rows hold several documents, positions and segments [B, T].
        """
        cfg, tokens_BT, segments_BT = self.cfg, batch["tokens"], batch.get("segments")
        positions_BT = batch.get("positions")
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        tables = _tables(cfg, positions_BT)
        x_BTD = constrain(self.embed[...].astype(cfg.dtype)[tokens_BT], "batch seq embed")
        if cfg.embed_scale:
            x_BTD = x_BTD * jnp.asarray(cfg.embed_scale, x_BTD.dtype)

        def run(block: Block, x_BTD: jax.Array) -> jax.Array:
            graph, state = nnx.split(block)
            return remat(cfg.remat, lambda state, x_BTD: nnx.merge(graph, state)(x_BTD, tables, segments_BT))(state, x_BTD)

        for block in self.prefix.values():
            x_BTD = run(block, x_BTD)
        if periods(cfg):
            graph, stacked = nnx.split(self.blocks)

            def period(x_BTD: jax.Array, state: Any) -> tuple[jax.Array, None]:
                blocks = nnx.merge(graph, state)
                for key in pattern_keys(cfg):
                    x_BTD = run(blocks[key], x_BTD)
                return x_BTD, None

            x_BTD, _ = jax.lax.scan(period, x_BTD, stacked, unroll=min(cfg.unroll, periods(cfg)))
        for block in self.rest.values():
            x_BTD = run(block, x_BTD)
        return self.norm(x_BTD)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Hidden state -> float32 logits [B, T, V]."""
        table = self.embed[...].T if self.cfg.head.tied else self.head[...]
        logits_BTV = constrain(project(x_BTD, table), "batch seq vocab").astype(jnp.float32)
        if self.cfg.head.bias:
            logits_BTV = logits_BTV + self.head_bias.astype(jnp.float32)
        cap = self.cfg.head.soft_cap
        return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV


def abstract(cfg: DecoderConfig, change: Callable[..., nnx.Module] | None = None) -> tuple[Any, nnx.State]:
    """The model's graph and its weights as shapes; `change` as in Decoder."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(cfg, change)))


def initial(cfg: DecoderConfig, seed: int) -> dict[str, Any]:
    """Fresh weights by path, as nested dicts."""
    drawn = {path: draw(param, path, seed) for path, param in nnx.to_flat_state(abstract(cfg)[1])}
    return nnx.traversals.unflatten_mapping(drawn)


def periods(cfg: DecoderConfig) -> int:
    """How often the whole pattern repeats."""
    return (cfg.layers - len(cfg.prefix)) // len(pattern_keys(cfg))


def pattern_keys(cfg: DecoderConfig) -> dict[str, str]:
    """A unique key for each place of the pattern -> its block's name: the name itself, numbered where it repeats."""
    names = cfg.pattern or tuple(cfg.blocks)
    return {name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}": name for i, name in enumerate(names)}


def remat(cfg: RematConfig, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`f`, keeping for its backward pass what the policy names."""
    if cfg.policy == "none":
        return f
    known = jax.checkpoint_policies
    policies = {
        "full": lambda: known.nothing_saveable,
        "dots": lambda: known.dots_saveable,
        "dots_no_batch": lambda: known.dots_with_no_batch_dims_saveable,
        "save": lambda: known.save_only_these_names(*cfg.names),
        "offload": lambda: known.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=list(cfg.names), offload_src="device", offload_dst="pinned_host"),
    }
    return jax.checkpoint(f, policy=policies[cfg.policy](), prevent_cse=False)


def _tables(cfg: DecoderConfig, positions_BT: jax.Array) -> dict:
    mixers = [block.mixer for block in cfg.blocks.values()]
    return {(m.rope, m.head_dim): rope_table(m.rope, positions_BT, m.head_dim) for m in mixers if m.rope}


def _stack(block: Block, repeats: int) -> Block:
    graph, state = nnx.split(block)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.broadcast_to(x, (repeats, *x.shape)), state))
