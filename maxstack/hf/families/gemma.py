"""Gemma, Gemma 2, Gemma 3 (text)."""

from typing import Any

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import (
    ATTENTION,
    BIASED,
    GATED,
    OUTER,
    PRE_NORMS,
    SANDWICH_NORMS,
    attention,
    block,
    decoder,
    full_every,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Derived, Key

NORM = rms(zero_centered=True)
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
            "block": block(
                attention(Rope(), window=None, **BIASED), gated(default="gelu_pytorch_tanh"), NORM
            )
        }
    ),
    OUTER + PRE_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent=("hidden_activation",),
)

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    decoder(**OUTSIDE, soft_cap=Key("final_logit_softcapping", 30.0, null=True)),
    Layers(
        {
            name: block(
                attention(
                    Rope(),
                    window=window,
                    scale=SCALE,
                    soft_cap=Key("attn_logit_softcapping", 50.0, null=True),
                    **BIASED,
                ),
                MLP,
                NORM,
                placement="sandwich",
            )
            for name, window in (("full", None), ("sliding", Key("sliding_window", 4096)))
        },
        full_every(2),
    ),
    OUTER + SANDWICH_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent=("hidden_act", "sliding_window_size"),
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
            name: block(
                attention(
                    rope,
                    window=window,
                    scale=SCALE,
                    soft_cap=Key("attn_logit_softcapping", None),
                    qk_norm=NORM,
                    **BIASED,
                    heads=Key("num_attention_heads", 8),
                    kv_heads=Key("num_key_value_heads", 4),
                    head_dim=Key("head_dim", 256),
                ),
                MLP,
                NORM,
                placement="sandwich",
            )
            for name, window, rope in ROPES
        },
        full_every(6, "sliding_window_pattern"),
    ),
    OUTER + SANDWICH_NORMS + ATTENTION + GATED,
    fixed=BIDIRECTIONAL,
    silent="sliding_window_pattern rope_local_base_freq hidden_act".split(),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
