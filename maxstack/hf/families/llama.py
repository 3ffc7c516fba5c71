"""Llama 2 and 3, Mistral, Mixtral."""

from maxstack.hf.families.parts import (
    BIASED,
    LLAMA_ROWS,
    PRE_NORMED,
    alike,
    attention,
    decoder,
    experts,
    gated,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Key

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    decoder(),
    alike(attention(Rope(), window=None, **BIASED), gated(bias=Key("mlp_bias", False))),
    LLAMA_ROWS,
    fixed={"rope_interleaved": False, "is_llama_config": True},
    silent=("pretraining_tp",),
)

MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    decoder(),
    # null: no window; absent: the class's default of 4,096.
    alike(attention(Rope(), (8, None), window=Key("sliding_window", None, absent=4096))),
    LLAMA_ROWS,
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    decoder(norm=rms(1e-5)),
    alike(
        attention(Rope(theta=1e6), (8, None), window=Key("sliding_window", None)),
        experts("num_local_experts", {"score": "softmax", "normalize": True}, "intermediate_size"),
        rms(1e-5),
    ),
    PRE_NORMED
    + rows("""
{layer}.block_sparse_moe.gate.weight           | mlp/router | e d -> d e
{layer}.block_sparse_moe.experts.{e}.w1.weight | mlp/gate   | f d -> d f
{layer}.block_sparse_moe.experts.{e}.w3.weight | mlp/up     | f d -> d f
{layer}.block_sparse_moe.experts.{e}.w2.weight | mlp/down   | d f -> f d
"""),
)
