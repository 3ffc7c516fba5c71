"""Diffusers' diffusion transformer."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import Table, block
from maxstack.hf.family import Family
from maxstack.hf.rows import modules, rows
from maxstack.hf.table import Derived, Key, Source
from maxstack.schema.dit import DiTConfig


def width(source: Source) -> int:
    """Size of the residual stream."""
    return source.get("num_attention_heads", 16) * source.get("attention_head_dim", 72)


def norm(eps: float | Key = 1e-6) -> Table:
    """A LayerNorm without weights."""
    return {"kind": "layer", "eps": eps, "scale": False, "zero_centered": False, "bias": False}


DIT = Family(
    "DiTTransformer2DModel",
    "",
    {
        "kind": "dit",
        "image_size": Key("sample_size", 32),
        "patch": Key("patch_size", 2),
        "channels": Key("in_channels", 4),
        "out_channels": Key("out_channels", None),
        "classes": Key("num_embeds_ada_norm", 1000),
        "embed": Derived(width),
        "norm": norm(),
    },
    Layers(
        {
            "block": block(
                {
                    "kind": "attention",
                    "causal": False,
                    "heads": Key("num_attention_heads", 16),
                    "kv_heads": Derived(lambda source: source.get("num_attention_heads", 16)),
                    "head_dim": Key("attention_head_dim", 72),
                    "rope": None,
                    "qkv_bias": Key("attention_bias", True),
                    "out_bias": True,
                },
                {
                    "kind": "dense",
                    "hidden": Derived(lambda source: 4 * width(source)),
                    "activation": Key(
                        "activation_fn",
                        "gelu-approximate",
                        words={"gelu-approximate": "gelu_tanh", "gelu": "gelu"},
                    ),
                    "bias": True,
                },
                norm(),
                mlp_norm=norm(Key("norm_eps", 1e-5)),
                modulation="own",
            )
        },
        key="num_layers",
    ),
    modules("""
pos_embed.proj | patch      | d c p q -> p q c d
proj_out_1     | modulation | (s e) d -> d s e
proj_out_2     | out        | (p q c) d -> d p q c
{layer}.norm1.emb.timestep_embedder.linear_1 | condition/time_in  | f d -> d f
{layer}.norm1.emb.timestep_embedder.linear_2 | condition/time_out | f d -> d f
{layer}.norm1.linear   | modulation  | (s e) d -> d s e
{layer}.attn1.to_q     | mixer/query | (n h) d -> d n h
{layer}.attn1.to_k     | mixer/key   | (n h) d -> d n h
{layer}.attn1.to_v     | mixer/value | (n h) d -> d n h
{layer}.attn1.to_out.0 | mixer/out   | d (n h) -> n h d
{layer}.ff.net.0.proj  | mlp/up      | f d -> d f
{layer}.ff.net.2       | mlp/down    | d f -> f d
""")
    + rows("{layer}.norm1.emb.class_embedder.embedding_table.weight | condition/table | k d"),
    fixed={
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "upcast_attention": False,
        "only_cross_attention": False,
        "double_self_attention": False,
        "use_linear_projection": False,
        "attention_type": "default",
    },
    silent=("dropout", "norm_num_groups", "num_vector_embeds", "cross_attention_dim"),
    layer="transformer_blocks.{}",
    # Sines and cosines of the patches' places, which follow from the sizes.
    unused=(r"pos_embed\.pos_embed",),
    body="",
    schema=DiTConfig,
)
