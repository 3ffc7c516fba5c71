"""Phi-3: queries, keys and values in one matrix, gate and up in another, LongRoPE."""

from maxstack.hf.families.parts import (
    OUT,
    OUTER,
    PRE_NORMS,
    alike,
    attention,
    decoder,
    rms,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Key

NORM = rms(1e-5)

PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    decoder(norm=NORM),
    # The original length, on which LongRoPE's factors depend, stands beside rope_parameters.
    alike(
        attention(Rope(partial=True, outside=True), window=Key("sliding_window", None)), norm=NORM
    ),
    OUTER
    + PRE_NORMS
    + OUT
    + rows("""
{layer}.self_attn.qkv_proj.weight | mixer/query: n h, mixer/key: k h, mixer/value: k h | (+) d -> d +
{layer}.mlp.gate_up_proj.weight   | mlp/gate: f, mlp/up: f                             | (+) d -> d +
{layer}.mlp.down_proj.weight      | mlp/down                                           | d f -> f d
"""),  # noqa: E501
    fixed={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    silent=("full_attn_mod", "interpolate_factor"),
)
