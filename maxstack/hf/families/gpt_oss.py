"""gpt-oss: attention sinks, windows on every other layer, experts with biases and a clamped
activation, gate and up interleaved."""

from maxstack.hf.families.parts import (
    PRE_NORMED,
    decoder,
    experts,
    full_every,
    rms,
    windowed,
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
EXPERTS = experts(
    Key("num_local_experts", other="num_experts"),
    {"score": "softmax", "normalize": True, "bias": True},
    "intermediate_size",
    top_k=Key("num_experts_per_tok", other="experts_per_token"),
    activation="silu",
    clamp=Key("swiglu_limit", 7.0),
    bias=True,
)

GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    decoder(norm=NORM),
    windowed(
        full_every(2),
        Key("sliding_window", 128),
        (ROPE, ROPE),
        {"absent": (8, 64), "sinks": True, "qkv_bias": BIAS, "out_bias": BIAS},
        mlp=EXPERTS,
        norm=NORM,
    ),
    # Gate and up alternate along the outputs of gate_up_proj: (f +), each part one wide.
    PRE_NORMED
    + rows("""
{layer}.mlp.router.weight                | mlp/router                         | e d -> d e
{layer}.mlp.router.bias                  | mlp/router_bias                    | e
{layer}.mlp.experts.gate_up_proj[e]      | mlp/gate: 1, mlp/up: 1             | d (f +) -> d f
{layer}.mlp.experts.gate_up_proj_bias[e] | mlp/gate_bias: 1, mlp/up_bias: 1   | (f +) -> f
{layer}.mlp.experts.down_proj[e]         | mlp/down                           | f d
{layer}.mlp.experts.down_proj_bias[e]    | mlp/down_bias                      | d
"""),
    fixed={"hidden_act": ("silu", "swish"), "swiglu_alpha": 1.702},
    silent=("initial_context_length", "experts_per_token"),
)
