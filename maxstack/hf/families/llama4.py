"""Llama 4 (text): chunked attention with RoPE and full attention without, dense layers and mixtures
of experts, each in its own rhythm."""

from maxstack.hf.blocks import Both, Every, Layers
from maxstack.hf.families.parts import (
    BIASED,
    PRE_NORMED,
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
from maxstack.hf.table import Case, Derived, Key

NORM = rms(1e-5)
TUNED = {"scale": Key("attn_scale", 0.1), "length": Key("floor_scale", 8192)}
ABSENT = 8, 128
MIXERS = {
    "rope": attention(
        Rope(theta=500_000.0, interleaved=True),
        ABSENT,
        chunk=Key("attention_chunk_size", 8192, null=True),
        temperature=None,
        **BIASED,
        qk_norm=Case(
            "use_qk_norm",
            {True: rms(1e-5, scale=False), False: None},
            True,
        ),
        qk_norm_after_rope=True,
    ),
    "nope": attention(
        None,
        ABSENT,
        chunk=None,
        qk_norm=None,
        **BIASED,
        temperature=Case("attn_temperature_tuning", {True: TUNED, False: None, 4: TUNED}, True),
    ),
}
MLPS = {
    "dense": gated(hidden="intermediate_size_mlp"),
    "moe": experts(
        "num_local_experts",
        {"score": "sigmoid", "normalize": False, "scale_input": True},
        "intermediate_size",
        top_k=Key("num_experts_per_tok", 1),
        shared={"hidden": Derived(lambda source: source.need("intermediate_size")), "gate": False},
    ),
}

LLAMA4 = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    decoder(norm=NORM),
    Layers(
        {
            f"{mixer}_{mlp}": block(MIXERS[mixer], MLPS[mlp], NORM)
            for mixer in MIXERS
            for mlp in MLPS
        },
        Both(
            Every("nope", "rope", of="no_rope_layer_interval", default=4, flags="no_rope_layers"),
            Every(
                "moe",
                "dense",
                of="interleave_moe_layer_step",
                default=1,
                flags="moe_layers",
                # moe_layers holds the numbers of the layers, no_rope_layers a flag for each.
                indices=True,
            ),
        ),
    ),
    PRE_NORMED
    + rows("""
{layer}.feed_forward.gate_proj.weight               | mlp/gate             | f d -> d f
{layer}.feed_forward.up_proj.weight                 | mlp/up               | f d -> d f
{layer}.feed_forward.down_proj.weight               | mlp/down             | d f -> f d
{layer}.feed_forward.router.weight                  | mlp/router           | e d -> d e
{layer}.feed_forward.experts.gate_up_proj[e]        | mlp/gate: f, mlp/up: f | d (+) -> d +
{layer}.feed_forward.experts.down_proj[e]           | mlp/down             | f d
{layer}.feed_forward.shared_expert.gate_proj.weight | mlp/shared/gate      | f d -> d f
{layer}.feed_forward.shared_expert.up_proj.weight   | mlp/shared/up        | f d -> d f
{layer}.feed_forward.shared_expert.down_proj.weight | mlp/shared/down      | d f -> f d
"""),
    silent="""
    layer_types for_llm_compressor no_rope_layer_interval interleave_moe_layer_step
    intermediate_size_mlp attn_scale floor_scale attn_temperature_tuning
    """.split(),
)
