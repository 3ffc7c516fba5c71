"""GPT-2: LayerNorms, learned positions, matrices stored input first, queries, keys and values in
one."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import SILU, attention, block, decoder, gated, rms
from maxstack.hf.family import Family
from maxstack.hf.rows import rows
from maxstack.hf.table import Derived, Key

NORM = rms(kind="layer", eps=Key("layer_norm_epsilon", 1e-5), bias=True)
MIXER = attention(
    None,
    heads=Key("n_head"),
    kv_heads=Derived(lambda source: source.need("n_head")),
    head_dim=Derived(lambda source: source.need("n_embd") // source.need("n_head")),
    qkv_bias=True,
    out_bias=True,
)
MLP = gated(
    kind="dense",
    hidden=Key("n_inner", lambda source: 4 * source.need("n_embd")),
    bias=True,
    activation=Key("activation_function", "gelu_new", words={"gelu_new": "gelu_tanh", **SILU}),
)

GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    decoder(tied=True, norm=NORM, embed=Key("n_embd"), positions=Key("n_positions", 1024)),
    Layers({"block": block(MIXER, MLP, NORM)}, key="n_layer"),
    rows("""
transformer.wte.weight     | embed            | v d
transformer.wpe.weight     | positions        | l d
transformer.ln_f.weight    | norm/scale       | d
transformer.ln_f.bias      | norm/bias        | d
lm_head.weight             | head             | v d -> d v
score.weight               | score            | l d -> d l
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
    # Causal masks, which older files hold as tensors.
    unused=(r".*\.attn\.(bias|masked_bias)",),
)
