"""gpt-oss: attention sinks, windows on every other layer, experts with biases and a clamped
activation, gate and up interleaved."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import (
    ATTENTION,
    OUTER,
    PRE_NORMS,
    attention,
    block,
    decoder,
    full_every,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import ORIGINAL, Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Key

NORM = rms(1e-5)
BIAS = Key("attention_bias", True)
ROPE = Rope(
    theta=150_000.0,
    default={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        ORIGINAL: 4096,
    },
)
EXPERTS = {
    "kind": "moe",
    "experts": Key("num_local_experts", lambda source: source.need("num_experts")),
    "top_k": Key("num_experts_per_tok", lambda source: source.need("experts_per_token")),
    "hidden": Key("intermediate_size"),
    "activation": "silu",
    "clamp": Key("swiglu_limit", 7.0),
    "bias": True,
    "router": {"score": "softmax", "normalize": True, "bias": True},
}

GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    decoder(norm=NORM),
    Layers(
        {
            name: block(
                attention(ROPE, window=window, sinks=True, qkv_bias=BIAS, out_bias=BIAS),
                EXPERTS,
                NORM,
            )
            for name, window in (("full", None), ("sliding", Key("sliding_window", 128)))
        },
        full_every(2),
    ),
    OUTER
    + PRE_NORMS
    + ATTENTION
    + rows("""
{layer}.mlp.router.weight                | mlp/router                         | e d -> d e
{layer}.mlp.router.bias                  | mlp/router_bias                    | e
{layer}.mlp.experts.gate_up_proj[e]      | mlp/gate: 1, mlp/up: 1             | d (f +) -> d f
{layer}.mlp.experts.gate_up_proj_bias[e] | mlp/gate_bias: 1, mlp/up_bias: 1   | (f +) -> f
{layer}.mlp.experts.down_proj[e]         | mlp/down                           | f d
{layer}.mlp.experts.down_proj_bias[e]    | mlp/down_bias                      | d
"""),
    fixed={"hidden_act": "silu", "swiglu_alpha": 1.702},
    silent=("initial_context_length", "experts_per_token"),
)

FAMILIES = (GPT_OSS,)
