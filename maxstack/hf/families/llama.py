"""Llama 2 and 3, Mistral, Mixtral."""

from maxstack.hf.blocks import Layers
from maxstack.hf.families.parts import (
    ATTENTION,
    GATED,
    OUTER,
    PRE_NORMS,
    attention,
    decoder,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Key

BIAS = Key("attention_bias", False)
WINDOW = Key("sliding_window", None)

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    decoder(),
    Layers(
        {
            "block": {
                "mixer": attention(Rope(), window=None, qkv_bias=BIAS, out_bias=BIAS),
                "mlp": gated(bias=Key("mlp_bias", False)),
                "norm": rms(),
            }
        }
    ),
    OUTER + PRE_NORMS + ATTENTION + GATED,
    silent=frozenset({"pretraining_tp"}),
)

MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    decoder(),
    Layers({"block": {"mixer": attention(Rope(), window=WINDOW), "mlp": gated(), "norm": rms()}}),
    OUTER + PRE_NORMS + ATTENTION + GATED,
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    decoder(norm=rms(eps=Key("rms_norm_eps", 1e-5))),
    Layers(
        {
            "block": {
                "mixer": attention(Rope(theta=1e6), window=WINDOW),
                "mlp": gated(
                    kind="moe",
                    experts=Key("num_local_experts"),
                    top_k=Key("num_experts_per_tok"),
                    router={"score": "softmax", "normalize": True},
                ),
                "norm": rms(eps=Key("rms_norm_eps", 1e-5)),
            }
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
