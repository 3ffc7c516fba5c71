"""Gemma, Gemma 2, Gemma 3 (text)."""

from typing import Any

from maxstack.hf.families.parts import (
    BIASED,
    LLAMA_ROWS,
    SANDWICHED,
    alike,
    attention,
    decoder,
    full_every,
    gated,
    gelu,
    rms,
    windowed,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.table import Derived, Key

NORM = rms(zero_centered=True)
EMBED_SCALE = Derived(lambda source: source.need("hidden_size") ** 0.5)
OUTSIDE: dict[str, Any] = {"tied": True, "norm": NORM, "embed_scale": EMBED_SCALE}
SCALE = Key(
    "query_pre_attn_scalar",
    256,
    to=lambda scalar: scalar**-0.5,
    back=lambda scale: round(scale**-2),
)
MIXER = {"scale": SCALE, **BIASED}
BLOCK: dict[str, Any] = {
    "mlp": gated(gelu("hidden_activation")),
    "norm": NORM,
    "placement": "sandwich",
}
WINDOW = Key("sliding_window", 4096)
BIDIRECTIONAL = {"use_bidirectional_attention": (None, False)}

GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    decoder(**OUTSIDE),
    alike(attention(Rope(), window=None, **BIASED), gated(gelu("hidden_act")), NORM),
    LLAMA_ROWS,
    fixed=BIDIRECTIONAL,
    silent=("hidden_activation",),
)

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    decoder(**OUTSIDE, soft_cap=Key("final_logit_softcapping", 30.0, null=True)),
    windowed(
        full_every(2),
        WINDOW,
        (Rope(), Rope()),
        MIXER | {"soft_cap": Key("attn_logit_softcapping", 50.0, null=True)},
        **BLOCK,
    ),
    SANDWICHED,
    fixed=BIDIRECTIONAL,
    silent=("hidden_act", "sliding_window_size"),
)

GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    decoder(
        **OUTSIDE, vocab=Key("vocab_size", 262_208), soft_cap=Key("final_logit_softcapping", None)
    ),
    windowed(
        full_every(6, "sliding_window_pattern"),
        WINDOW,
        (
            Rope("full_attention", theta=1e6),
            Rope("sliding_attention", old_theta="rope_local_base_freq", old_scaling=False),
        ),
        MIXER
        | {
            "soft_cap": Key("attn_logit_softcapping", None),
            "qk_norm": NORM,
            "heads": Key("num_attention_heads", 8),
            "kv_heads": Key("num_key_value_heads", 4),
            "head_dim": Key("head_dim", 256),
        },
        **BLOCK,
    ),
    SANDWICHED,
    fixed=BIDIRECTIONAL,
    silent="sliding_window_pattern rope_local_base_freq hidden_act".split(),
)
