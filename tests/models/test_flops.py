"""FLOPs against an independent count, for every golden family: six for each weight that a token
meets, and the visible scores."""

import jax
import jax.numpy as jnp
import parity
import pytest
import tiny
from flax import nnx

from maxstack.hf.contents import Contents
from maxstack.kernels.attention.request import visibility_mask
from maxstack.layers.attention import request
from maxstack.models.flops import components, flops_per_token
from maxstack.models.model import abstract
from maxstack.schema.mixers import AttentionConfig, MLAConfig
from maxstack.schema.mlps import MoEConfig, ParallelMLPConfig


@pytest.mark.parametrize("limit", [{}, {"window": 5}, {"chunk": 5}, {"window": 40}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_counts_the_scores_that_its_mask_leaves(limit, causal):
    mixer = tiny.ATTENTION | {"causal": causal} | limit
    model = tiny.config(model=tiny.one_block(mixer, layers=1)).model
    asked = request(model.blocks["block"].mixer)
    at = jnp.arange(13)
    chunks = ((at[None] // asked.chunk,) * 2,) if asked.chunk else ()
    seen = int(visibility_mask(asked, at, at, chunks).sum())
    assert components(model, 13)["attention"] == pytest.approx(
        (12 * 4 * 8 * seen / 13, 12 * 4 * 8 * 13)
    )


def test_frozen_weights_count_four_and_adapters_six():
    cfg = tiny.config(lora={"rank": 4})
    run, whole = tiny.make_run(cfg), flops_per_token(cfg.model, 48)
    sizes = {path: leaf.size for path, leaf in run.weights.original.items() if "norm" not in path}
    base = sum(sizes.values()) - cfg.model.vocab * cfg.model.embed
    adapters = run.weights.adapters
    own = [leaf.size for path, leaf in run.weights.shapes.items() if "lora" in path]
    assert adapters == sum(own) > 0
    found = flops_per_token(cfg.model, 48, adapters)
    assert found == pytest.approx(whole - 2 * base + 6 * adapters)


def scores(mixer) -> float:
    """Training FLOPs inside a mixer for a token that sees one key."""
    if isinstance(mixer, AttentionConfig):
        return 12 * mixer.heads * mixer.head_dim
    if isinstance(mixer, MLAConfig):
        return 6 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim)
    return 18 * mixer.value_heads * mixer.key_dim * mixer.value_dim


def share(path: str, model) -> float:
    """The part of a weight that a token meets: of experts those that it goes to, of tables none."""
    *_, name = path.split("/")
    tables = "embed", "positions", "per_layer_embed", "sinks", "a_log", "dt_bias"
    if name in tables or "norm" in path or name.endswith(("bias", "scale", "scalar")):
        return 0.0
    alone = "/mlp/" not in path or "/shared/" in path or "/dense/" in path
    if name not in ("gate", "up", "down") or alone:
        return 1.0
    part, key = path.split("/")[:2]
    if part == "blocks":
        block = model.blocks[model.stacks[key]]
    else:
        first = len(model.prefix) + model.repetitions * len(model.period) if part == "rest" else 0
        block = model.blocks[model.order[int(key) + first]]
    moe = block.mlp.moe if isinstance(block.mlp, ParallelMLPConfig) else block.mlp
    return moe.top_k / moe.experts if isinstance(moe, MoEConfig) else 1.0


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_every_family_counts_the_weights_that_a_token_meets(family):
    model = Contents(parity.GOLDENS / family).model
    state = nnx.to_pure_dict(abstract(model)[1])
    met = sum(
        leaf.size * share(jax.tree_util.keystr(path, simple=True, separator="/"), model)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    )
    met += model.embed * model.vocab if model.head.tied else 0
    inside = sum(scores(model.blocks[name].mixer) for name in model.order)
    assert flops_per_token(model, 1) == pytest.approx(6 * met + inside)
