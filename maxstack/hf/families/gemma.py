"""Gemma, Gemma 2, 3 and 4 (text). Gemma 4: two kinds of heads, values that are keys, layers that
share keys and values, embeddings for every layer, experts beside the MLP."""

import dataclasses
from typing import Any

from maxstack.hf.blocks import Layers, Names
from maxstack.hf.families.parts import (
    BIASED,
    LLAMA_ROWS,
    SANDWICHED,
    SILU,
    alike,
    attention,
    block,
    decoder,
    experts,
    full_every,
    gated,
    gelu,
    rms,
    windowed,
)
from maxstack.hf.family import Family
from maxstack.hf.rope import Rope
from maxstack.hf.rows import rows
from maxstack.hf.table import Case, Derived, Key, Mismatch, Optional, Sink, Source

NORM = rms(zero_centered=True)
EMBED_SCALE = Derived(lambda source: source.need("hidden_size") ** 0.5)
OUTSIDE: dict[str, Any] = {"tied": True, "norm": NORM, "embed_scale": EMBED_SCALE}
SCALE = Key(
    "query_pre_attn_scalar",
    256,
    to=lambda scalar: scalar**-0.5,
    # Published scalars are whole numbers, which the square root would miss by a rounding.
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
GEMMA_ACTIVATION = Key("hidden_act", "gelu_pytorch_tanh", words=SILU | {"gelu": "gelu_tanh"})
"""Its first release says `gelu` and means the tanh form; transformers reads it so."""

GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    decoder(**OUTSIDE),
    alike(attention(Rope(), (16, 256), window=None, **BIASED), gated(GEMMA_ACTIVATION), NORM),
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
        MIXER | {"absent": (4, 256), "soft_cap": Key("attn_logit_softcapping", 50.0, null=True)},
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
            # The old spelling scales full layers alone, and sliding layers have a theta of their
            # own.
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

PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


@dataclasses.dataclass(frozen=True)
class OfGlobal:
    """A size of the full layers: `key` in per_layer_config, or else the key `own`, which is the one
    that exports write."""

    key: str
    own: str
    default: Any
    only_if: str | None = None

    def read(self, source: Source) -> Any:
        usual, own = source.need(self.key), source.get(self.own, self.default)
        # Two spellings: sizes of full layers by their numbers, or one key for all of them.
        by_layer = source.get("per_layer_config")
        if by_layer is None:
            applies = not self.only_if or source.get(self.only_if)
            return own if own is not None and applies else usual
        first, *others = [*by_layer.values()] or [{}]
        if any(sizes != first for sizes in others) or first.keys() - {
            "head_dim",
            "num_key_value_heads",
        }:
            raise source.fail(
                "per_layer_config",
                "only one head_dim and num_key_value_heads for all full layers is supported",
            )
        return first.get(self.key, usual)

    def write(self, value: Any, sink: Sink) -> None:
        if not self.only_if or sink.get(self.key) != value:
            sink.put(self.own, value)


@dataclasses.dataclass(frozen=True)
class Owner:
    """The block whose keys and values are used."""

    name: str

    def read(self, source: Source) -> str:
        return self.name

    def write(self, value: Any, sink: Sink) -> None:
        if value is None:
            raise Mismatch("it has keys and values of its own")


class Width:
    """The MLP's hidden size, which may be double in layers that share keys and values."""

    def read(self, source: Source) -> int:
        factor = 2 if source.get("use_double_wide_mlp", False) else 1
        return source.need("intermediate_size") * factor

    def write(self, value: Any, sink: Sink) -> None:
        sink.put("use_double_wide_mlp", value != sink.get("intermediate_size", value))


class Shared:
    """layer_types, with the last num_kv_shared_layers layers sharing."""

    types = full_every(6, last=True)

    def read(self, source: Source, layers: int) -> list[str]:
        own = layers - source.get("num_kv_shared_layers", 0)
        return [
            name if i < own else f"shared_{name}"
            for i, name in enumerate(self.types.read(source, layers))
        ]

    def write(self, names: Names, sink: Sink) -> None:
        shared = sum(name.startswith("shared_") for name in names)
        if any(name.startswith("shared_") for name in names[: len(names) - shared]):
            raise Mismatch("layers that share keys and values before others that do not")
        self.types.write([name.removeprefix("shared_") for name in names], sink)
        sink.put("num_kv_shared_layers", shared)


# Layers that share keys and values read those of the last layer of their type before them, which
# must lie outside of the scan.
def _unrolled(source: Source, layers: int) -> int:
    shared = source.get("num_kv_shared_layers", 0)
    return layers - shared if shared else 0


def _mixer(full: bool, owner: object) -> Any:
    common: dict[str, Any] = {
        "scale": 1.0,
        "qk_norm": rms(),
        "value_norm": rms(scale=False),
        **BIASED,
        "share_kv": owner,
    }
    if full:
        rope = Rope("full_attention", theta=1e6, partial=True, default=PROPORTIONAL)
        return attention(
            rope,
            window=None,
            values_are_keys=Key("attention_k_eq_v", False),
            **common
            | {
                "kv_heads": OfGlobal(
                    "num_key_value_heads", "num_global_key_value_heads", None, "attention_k_eq_v"
                ),
                "head_dim": OfGlobal("head_dim", "global_head_dim", 512),
            },
        )
    return attention(
        Rope("sliding_attention", old_scaling=False),
        (4, None),
        window=Key("sliding_window", 512),
        values_are_keys=False,
        **common | {"head_dim": Key("head_dim", 256)},
    )


def _mlp(hidden: Any = "intermediate_size") -> Case:
    dense = gated(gelu("hidden_activation"), hidden)
    moe = experts(
        "num_experts",
        {
            "score": "softmax",
            "normalize": True,
            "normed": True,
            "norm_eps": Key("rms_norm_eps", 1e-6),
        },
        top_k=Key("top_k_experts"),
        activation=dense["activation"],
        shared=None,
    )
    return Case(
        "enable_moe_block",
        {False: dense, True: {"kind": "parallel", "dense": dense, "moe": moe, "norm": rms()}},
        False,
    )


PER_LAYER = Optional(
    "hidden_size_per_layer_input",
    {
        "vocab": Key("vocab_size_per_layer_input", 262_144),
        "size": Key("hidden_size_per_layer_input"),
        "activation": Derived(
            lambda source: SILU[source.get("hidden_activation", "gelu_pytorch_tanh")]
        ),
    },
    off=0,
)
BLOCKS = {
    ("shared_" if shared else "") + name: block(
        _mixer(name == "full", Owner(name) if shared else None),
        _mlp(Width()) if shared else _mlp(),
        placement="sandwich",
        out_scalar=True,
    )
    for shared in (False, True)
    for name in ("sliding", "full")
}

GEMMA4 = Family(
    "Gemma4ForCausalLM",
    "gemma4_text",
    decoder(
        tied=True,
        soft_cap=Key("final_logit_softcapping", None),
        per_layer=PER_LAYER,
        embed_scale=EMBED_SCALE,
    ),
    Layers(BLOCKS, Shared(), unrolled=_unrolled),
    SANDWICHED
    + rows("""
{layer}.layer_scalar                      | out_scalar               | 1 ->
model.embed_tokens_per_layer.weight       | per_layer_embed          | v (l p) -> v l p
model.per_layer_model_projection.weight   | per_layer_project        | (l p) d -> d l p
model.per_layer_projection_norm.weight    | per_layer_norm/scale     | p
{layer}.per_layer_input_gate.weight       | per_layer_gate           | p d -> d p
{layer}.per_layer_projection.weight       | per_layer_out            | d p -> p d
{layer}.post_per_layer_input_norm.weight  | per_layer_norm/scale     | d
{layer}.mlp.gate_proj.weight              | mlp/dense/gate           | f d -> d f
{layer}.mlp.up_proj.weight                | mlp/dense/up             | f d -> d f
{layer}.mlp.down_proj.weight              | mlp/dense/down           | d f -> f d
{layer}.post_feedforward_layernorm_1.weight | mlp/dense_norm/scale   | d
{layer}.pre_feedforward_layernorm_2.weight  | mlp/moe_in_norm/scale  | d
{layer}.post_feedforward_layernorm_2.weight | mlp/moe_norm/scale     | d
{layer}.router.proj.weight                | mlp/moe/router           | e d -> d e
{layer}.router.scale                      | mlp/moe/router_scale     | d
{layer}.router.per_expert_scale           | mlp/moe/expert_scale     | e
{layer}.experts.gate_up_proj[e]           | mlp/moe/gate: f, mlp/moe/up: f | (+) d -> d +
{layer}.experts.down_proj[e]              | mlp/moe/down             | d f -> f d
"""),
    fixed={"use_bidirectional_attention": (None, "vision")},
    silent="""
    use_double_wide_mlp vocab_size_per_layer_input num_experts top_k_experts
    moe_intermediate_size hidden_act global_head_dim num_global_key_value_heads
    per_layer_config num_kv_shared_layers
    """.split(),
    # Files keep these also for layers that use another's keys and values.
    unused=(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",),
)
