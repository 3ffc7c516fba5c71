"""Llama 2 and 3, Mistral, Mixtral."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import (
    ATTENTION,
    BIASED,
    GATED,
    OUTER,
    PRE_NORMS,
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
from maxstack.hf.table import Key

WINDOW = Key("sliding_window", None)

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    decoder(),
    Layers(
        {
            "block": block(
                attention(Rope(), window=None, **BIASED), gated(bias=Key("mlp_bias", False))
            )
        }
    ),
    OUTER + PRE_NORMS + ATTENTION + GATED,
    silent=("pretraining_tp",),
)

MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    decoder(),
    Layers({"block": block(attention(Rope(), window=WINDOW))}),
    OUTER + PRE_NORMS + ATTENTION + GATED,
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    decoder(norm=rms(1e-5)),
    Layers(
        {
            "block": block(
                attention(Rope(theta=1e6), window=WINDOW),
                experts(
                    "num_local_experts",
                    {"score": "softmax", "normalize": True},
                    "intermediate_size",
                ),
                rms(1e-5),
            )
        }
    ),
    OUTER
    + PRE_NORMS
    + ATTENTION
    + rows("""
{layer}.block_sparse_moe.gate.weight           | mlp/router | e d -> d e
{layer}.block_sparse_moe.experts.{e}.w1.weight | mlp/gate   | f d -> d f
{layer}.block_sparse_moe.experts.{e}.w3.weight | mlp/up     | f d -> d f
{layer}.block_sparse_moe.experts.{e}.w2.weight | mlp/down   | d f -> f d
"""),
)

FAMILIES = (LLAMA, MISTRAL, MIXTRAL)
