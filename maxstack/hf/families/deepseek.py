"""DeepSeek V2 and V3 (Kimi K2 too): latent attention and routed experts; GLM-4 MoE: the experts of
V3 with plain attention."""

from typing import Any

from maxstack.hf.blocks import FirstDense, Layers
from maxstack.hf.families.parts import (
    EXPERTS,
    GATED,
    LLAMA_ROWS,
    OUTER,
    PRE_NORMS,
    Further,
    Table,
    Times,
    attention,
    block,
    decoder,
    experts,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Case, Key, Optional

BIAS = Key("attention_bias", False)
SHARED = Optional(
    "n_shared_experts",
    {"hidden": Times("n_shared_experts", "moe_intermediate_size"), "gate": False},
    off=None,
)
LATENT_ROWS = rows("""
{layer}.self_attn.q_proj.weight             | mixer/query                                 | (n h) d -> d n h
{layer}.self_attn.q_a_proj.weight           | mixer/query_down                            | q d -> d q
{layer}.self_attn.q_a_proj.bias             | mixer/query_down_bias                       | q
{layer}.self_attn.q_a_layernorm.weight      | mixer/query_norm/scale                      | q
{layer}.self_attn.q_b_proj.weight           | mixer/query_up                              | (n h) q -> q n h
{layer}.self_attn.kv_a_proj_with_mqa.weight | mixer/kv_down: l, mixer/key_rope: r         | (+) d -> d +
{layer}.self_attn.kv_a_proj_with_mqa.bias   | mixer/kv_down_bias: l, mixer/key_rope_bias: r | (+) -> +
{layer}.self_attn.kv_a_layernorm.weight     | mixer/kv_norm/scale                         | l
{layer}.self_attn.kv_b_proj.weight          | mixer/key_up: p, mixer/value_up: v          | (n +) l -> l n +
{layer}.self_attn.o_proj.weight             | mixer/out                                   | d (n v) -> n v d
{layer}.self_attn.o_proj.bias               | mixer/out_bias                              | d
""")  # noqa: E501
SHARED_ROWS = rows("""
{layer}.mlp.gate.e_score_correction_bias    | mlp/selection_bias | e
{layer}.mlp.shared_experts.gate_proj.weight | mlp/shared/gate    | f d -> d f
{layer}.mlp.shared_experts.up_proj.weight   | mlp/shared/up      | f d -> d f
{layer}.mlp.shared_experts.down_proj.weight | mlp/shared/down    | d f -> f d
""")
FURTHER_ROWS = rows("""
{further}.enorm.weight              | embed_norm/scale  | d
{further}.hnorm.weight              | hidden_norm/scale | d
{further}.eh_proj.weight            | project           | o (two d) -> two d o
{further}.shared_head.norm.weight   | norm/scale        | d
{further}.embed_tokens.weight       | embed             | v d        | copy
{further}.shared_head.head.weight   | head              | v d -> d v | copy
""")
ROWS = OUTER + PRE_NORMS + LATENT_ROWS + GATED + EXPERTS + SHARED_ROWS


def _latent(interleaved: object) -> Table:
    return {
        "kind": "mla",
        "heads": Key("num_attention_heads", also=("num_key_value_heads",)),
        "q_lora": Key("q_lora_rank", null=True),
        "kv_lora": Key("kv_lora_rank"),
        "nope_dim": Key("qk_nope_head_dim"),
        "rope_dim": Key("qk_rope_head_dim"),
        "value_dim": Key("v_head_dim"),
        "rope": Rope(interleaved=interleaved),
        # Norms of latents have this eps in transformers, whatever rms_norm_eps says.
        "norm": {**rms(), "eps": 1e-6},
        "bias": BIAS,
    }


def _layers(mixer: Table, router: Any, first: int, norm: Table | None = None) -> Layers:
    moe = {**experts("n_routed_experts", router, shared=SHARED), "activation": "silu"}
    mlps = {"moe": moe, "dense": gated()}
    return Layers({name: block(mixer, mlp, norm) for name, mlp in mlps.items()}, FirstDense(first))


BY_MAX = {
    "score": "softmax",
    "normalize": False,
    "scale": Key("routed_scaling_factor", 1.0),
    "selection_bias": False,
}
ALL_GROUPS = {"groups": 1, "top_groups": 1}
LIMITED = {"groups": Key("n_group"), "top_groups": Key("topk_group"), "group_score": "max"}


def _by_top_two(scale: float, groups: int, top_groups: int) -> Table:
    """Return the router of V3; the arguments are the values of absent keys."""
    return {
        "score": "sigmoid",
        "normalize": Key("norm_topk_prob", True),
        "scale": Key("routed_scaling_factor", 1.0, absent=scale),
        "selection_bias": True,
        "groups": Key("n_group", 1, absent=groups),
        "top_groups": Key("topk_group", 1, absent=top_groups),
        "group_score": "top2",
    }


SILENT = ("head_dim", "qk_head_dim", "pretraining_tp")

DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    decoder(),
    _layers(
        _latent(True),
        Case(
            "topk_method",
            {"greedy": BY_MAX | ALL_GROUPS, "group_limited_greedy": BY_MAX | LIMITED},
            "greedy",
        ),
        first=0,
    ),
    ROWS,
    fixed={
        "hidden_act": ("silu", "swish"),
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    silent=(*SILENT, "n_group", "topk_group"),
)

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    decoder(mtp=Further("moe", "num_nextn_predict_layers")),
    _layers(_latent(Key("rope_interleave", True)), _by_top_two(2.5, 8, 4), first=3),
    ROWS + FURTHER_ROWS,
    fixed={
        "hidden_act": ("silu", "swish"),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    silent=SILENT,
    further="model.layers.{}",
    further_after=True,
)

GLM_NORM = rms(1e-5)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    decoder(norm=GLM_NORM, mtp=Further("moe", "num_nextn_predict_layers")),
    _layers(
        attention(
            Rope(fraction=0.5),
            absent=(8, None),
            window=None,
            qkv_bias=BIAS,
            qk_norm=Case("use_qk_norm", {True: GLM_NORM, False: None}, False),
        ),
        _by_top_two(1.0, 1, 1),
        first=1,
        norm=GLM_NORM,
    ),
    LLAMA_ROWS + EXPERTS + SHARED_ROWS + FURTHER_ROWS,
    fixed={"hidden_act": ("silu", "swish"), "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    further="model.layers.{}",
    further_after=True,
)
