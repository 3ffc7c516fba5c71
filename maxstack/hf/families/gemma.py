"""Gemma, Gemma 2, Gemma 3 (text)."""

from typing import Any

from maxstack.hf.blocks import Layers, Types
from maxstack.hf.families.parts import (
    ATTENTION,
    GATED,
    OUTER,
    PRE_NORMS,
    SANDWICH_NORMS,
    attention,
    decoder,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Derived, Key

NORM = rms(zero_centered=True)
BIAS = Key("attention_bias", False)
TYPES = {"sliding_attention": "sliding", "full_attention": "full"}
OUTSIDE: dict[str, Any] = {
    "tied": True,
    "norm": NORM,
    "embed_scale": Derived(lambda source: source.need("hidden_size") ** 0.5),
}
SCALE = Key(
    "query_pre_attn_scalar",
    256,
    to=lambda scalar: scalar**-0.5,
    back=lambda scale: round(scale**-2),
)
MLP = gated("hidden_activation", default="gelu_pytorch_tanh")
BIDIRECTIONAL = {"use_bidirectional_attention": (None, False)}

GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    decoder(**OUTSIDE),
    Layers(
        {
            "block": {
                "mixer": attention(Rope(), window=None, qkv_bias=BIAS, out_bias=BIAS),
                "mlp": gated(default="gelu_pytorch_tanh"),
                "norm": NORM,
            }
        }
    ),
    OUTER + PRE_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent=frozenset({"hidden_activation"}),
)

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    decoder(**OUTSIDE, soft_cap=Key("final_logit_softcapping", 30.0, null=True)),
    Layers(
        {
            name: {
                "mixer": attention(
                    Rope(),
                    window=window,
                    scale=SCALE,
                    soft_cap=Key("attn_logit_softcapping", 50.0, null=True),
                    qkv_bias=BIAS,
                    out_bias=BIAS,
                ),
                "mlp": MLP,
                "norm": NORM,
                "placement": "sandwich",
            }
            for name, window in (("full", None), ("sliding", Key("sliding_window", 4096)))
        },
        Types(
            TYPES,
            lambda source, layers: [
                "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
            ],
        ),
    ),
    OUTER + SANDWICH_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent=frozenset({"hidden_act", "sliding_window_size"}),
)

ROPES = (
    ("full", None, Rope("full_attention", theta=1e6)),
    (
        "sliding",
        Key("sliding_window", 4096),
        Rope("sliding_attention", old_theta="rope_local_base_freq", old_scaling=False),
    ),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    decoder(
        **OUTSIDE, vocab=Key("vocab_size", 262_208), soft_cap=Key("final_logit_softcapping", None)
    ),
    Layers(
        {
            name: {
                "mixer": attention(
                    rope,
                    window=window,
                    scale=SCALE,
                    soft_cap=Key("attn_logit_softcapping", None),
                    qk_norm=NORM,
                    qkv_bias=BIAS,
                    out_bias=BIAS,
                    heads=Key("num_attention_heads", 8),
                    kv_heads=Key("num_key_value_heads", 4),
                    head_dim=Key("head_dim", 256),
                ),
                "mlp": MLP,
                "norm": NORM,
                "placement": "sandwich",
            }
            for name, window, rope in ROPES
        },
        Types(
            TYPES,
            lambda source, layers: [
                "sliding_attention"
                if (i + 1) % source.get("sliding_window_pattern", 6)
                else "full_attention"
                for i in range(layers)
            ],
        ),
    ),
    OUTER + SANDWICH_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent=frozenset({"sliding_window_pattern", "rope_local_base_freq", "hidden_act"}),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
