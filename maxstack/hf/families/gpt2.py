"""GPT-2: LayerNorms, learned positions, matrices stored input first, queries, keys and values in
one."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import SILU, Table
from maxstack.hf.family import Family
from maxstack.hf.rows import rows
from maxstack.hf.table import Derived, Key, Source

NORM: Table = {
    "kind": "layer",
    "eps": Key("layer_norm_epsilon", 1e-5),
    "scale": True,
    "zero_centered": False,
    "bias": True,
}


def _head_dim(source: Source) -> int:
    return source.need("n_embd") // source.need("n_head")


GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    {
        "vocab": Key("vocab_size"),
        "embed": Key("n_embd"),
        "positions": Key("n_positions", 1024),
        "norm": NORM,
        "head": {"tied": Key("tie_word_embeddings", True), "bias": False, "soft_cap": None},
    },
    Layers(
        {
            "block": {
                "mixer": {
                    "kind": "attention",
                    "heads": Key("n_head"),
                    "kv_heads": Derived(lambda source: source.need("n_head")),
                    "head_dim": Derived(_head_dim),
                    "rope": None,
                    "qkv_bias": True,
                    "out_bias": True,
                },
                "mlp": {
                    "kind": "dense",
                    "hidden": Key("n_inner", lambda source: 4 * source.need("n_embd")),
                    "bias": True,
                    "activation": Key(
                        "activation_function", "gelu_new", words={"gelu_new": "gelu_tanh", **SILU}
                    ),
                },
                "norm": NORM,
            }
        },
        key="n_layer",
    ),
    rows("""
transformer.wte.weight     | embed            | v d
transformer.wpe.weight     | positions        | l d
transformer.ln_f.weight    | norm/scale       | d
transformer.ln_f.bias      | norm/bias        | d
lm_head.weight             | head             | v d -> d v
{layer}.ln_1.weight        | mixer_norm/scale | d
{layer}.ln_1.bias          | mixer_norm/bias  | d
{layer}.ln_2.weight        | mlp_norm/scale   | d
{layer}.ln_2.bias          | mlp_norm/bias    | d
{layer}.attn.c_attn.weight | mixer/query: n h, mixer/key: n h, mixer/value: n h                | d (+) -> d +
{layer}.attn.c_attn.bias   | mixer/query_bias: n h, mixer/key_bias: n h, mixer/value_bias: n h | (+) -> +
{layer}.attn.c_proj.weight | mixer/out        | (n h) d -> n h d
{layer}.attn.c_proj.bias   | mixer/out_bias   | d
{layer}.mlp.c_fc.weight    | mlp/up           | d f
{layer}.mlp.c_fc.bias      | mlp/up_bias      | f
{layer}.mlp.c_proj.weight  | mlp/down         | f d
{layer}.mlp.c_proj.bias    | mlp/down_bias    | d
"""),  # noqa: E501
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    silent="""
    n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj
    """.split(),
    layer="transformer.h.{}",
    body="transformer.",
    unused=(r".*\.attn\.(bias|masked_bias)",),
)

FAMILIES = (GPT2,)
