"""Tables and rows that many families share.

Arguments named `absent` are values of absent keys: defaults of transformers' classes, which differ
between families. Files in the tests say what transformers reads where each key is deleted.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from maxstack.hf.blocks import Layers, Order, Types
from maxstack.hf.rows import rows
from maxstack.hf.table import Key, Mismatch, Sink, Source

log = logging.getLogger(__name__)
Table = Mapping[str, Any]
# The first word of a meaning is what exports write.
SILU = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
}
ACTIVATION = Key("hidden_act", "silu", words=SILU)


BIASED: Table = dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias", False))
WINDOWS = {"sliding_attention": "sliding", "full_attention": "full"}


def rms(eps: Any = 1e-6, **more: Any) -> Table:
    """Return the table of an RMS norm; `eps` is an entry, or the value of an absent key."""
    return {
        "kind": "rms",
        "eps": Key("rms_norm_eps", eps) if isinstance(eps, float) else eps,
        "scale": True,
        "zero_centered": False,
        "bias": False,
        **more,
    }


def decoder(
    *, tied: bool = False, norm: Table | None = None, soft_cap: Any = None, **more: Any
) -> Table:
    """Return the table around the layers; `tied` is the meaning of an absent key."""
    # The default of the class: families differ, and files leave the key out.
    head = {"tied": Key("tie_word_embeddings", tied), "bias": False, "soft_cap": soft_cap}
    return {
        "vocab": Key("vocab_size"),
        "embed": Key("hidden_size"),
        "norm": norm or rms(),
        "head": head,
        **more,
    }


def attention(
    rope: Any, absent: tuple[int | None, int | None] = (None, None), **more: Any
) -> Table:
    """Return the table of grouped-query attention. `absent`: values of absent keys, the number of
    key heads and the size of a head; None where these follow from the heads and the width."""
    kv_heads, head_dim = absent
    return {
        "kind": "attention",
        "heads": Key("num_attention_heads"),
        "kv_heads": Key(
            "num_key_value_heads",
            lambda source: source.need("num_attention_heads"),
            # Absent: the class's default. null: as many as query heads.
            absent=kv_heads,
        ),
        "head_dim": Key(
            "head_dim",
            lambda source: source.need("hidden_size") // source.need("num_attention_heads"),
            absent=head_dim,
        ),
        "rope": rope,
        **more,
    }


def gelu(key: str) -> Key:
    """Return the activation that a key names, by default the approximate GELU."""
    return Key(key, "gelu_pytorch_tanh", words=SILU)


def block(mixer: Table, mlp: Any = None, norm: Table | None = None, **more: Any) -> Table:
    """Return the table of a block: a mixer and an MLP, by default gated, each with a norm."""
    return {"mixer": mixer, "mlp": mlp or gated(), "norm": norm or rms(), **more}


def alike(*parts: Any, **more: Any) -> Layers:
    """Return layers that are all the same `block`."""
    return Layers({"block": block(*parts, **more)})


def windowed(
    order: Order, window: Any, ropes: tuple[Any, Any], mixer: Table, **more: Any
) -> Layers:
    """Return full and sliding layers that differ in RoPE and window alone; `mixer` are further
    arguments of `attention`."""
    full, sliding = (
        block(attention(rope, window=size, **mixer), **more)
        for rope, size in zip(ropes, (None, window), strict=True)
    )
    return Layers({"full": full, "sliding": sliding}, order)


def full_every(
    step: int, key: str | None = None, words: Mapping[str, str] = WINDOWS, last: bool = False
) -> Types:
    """Return the second kind of `words` in every `step`-th layer, or as `key` says, and with `last`
    in the last one; the first kind in the others."""
    other, full = words

    def absent(source: Source, layers: int) -> list[str]:
        n = source.get(key, step) if key else step
        numbers = range(1, layers + 1)
        return [full if i % n == 0 or (last and i == layers) else other for i in numbers]

    return Types(words, absent)


def gated(
    activation: Any = ACTIVATION,
    hidden: Any = "intermediate_size",
    **more: Any,
) -> Table:
    """Return the table of a gated MLP; `hidden` is the key of its size, or an entry."""
    return {
        "kind": "gated",
        "hidden": Key(hidden) if isinstance(hidden, str) else hidden,
        "activation": activation,
    } | more


def experts(count: Any, router: Any, hidden: Any = "moe_intermediate_size", **more: Any) -> Table:
    """Return the table of gated experts behind a router; `count` is the key of their number, or an
    entry."""
    own = {
        "kind": "moe",
        "experts": Key(count) if isinstance(count, str) else count,
        "top_k": Key("num_experts_per_tok"),
        "router": router,
    }
    return gated(hidden=hidden, **own | more)


@dataclasses.dataclass(frozen=True)
class Times:
    """The product of two keys; another entry writes the second."""

    key: str
    unit: str
    absent: int | None = None
    """Value of the first where its key is absent; None: it may not be."""

    def read(self, source: Source) -> int:
        times = source.need(self.key) if self.absent is None else source.get(self.key, self.absent)
        return times * source.need(self.unit)

    def write(self, value: Any, sink: Sink) -> None:
        # The other entry has written the unit already: tables are written in order.
        if value % sink[self.unit]:
            raise Mismatch(f"{value} is no multiple of {self.unit}={sink[self.unit]}")
        sink.put(self.key, value // sink[self.unit])


@dataclasses.dataclass(frozen=True)
class Further:
    """Multi-token prediction, as deep as the tensors show; the key may be absent or wrong."""

    block: str
    key: str | None = None

    def read(self, source: Source) -> dict[str, Any] | None:
        promised = (source.get(self.key) if self.key else 0) or 0
        # The tensors decide, and the key only where they are unknown (a folder without weights or
        # index).
        depth = promised if source.mtp is None else source.mtp
        if promised > depth:
            log.warning(
                "%s: %s=%s, but the tensors hold %s such modules; the others are left out",
                source.where,
                self.key,
                promised,
                depth,
            )
        return {"block": self.block, "depth": depth} if depth else None

    def write(self, value: Any, sink: Sink) -> None:
        if self.key:
            sink.put(self.key, value["depth"] if value else 0)


OUTER = rows("""
model.embed_tokens.weight | embed      | v d
model.norm.weight         | norm/scale | d
lm_head.weight            | head       | v d -> d v
score.weight              | score      | l d -> d l
""")
PRE_NORMS = rows("""
{layer}.input_layernorm.weight          | mixer_norm/scale | d
{layer}.post_attention_layernorm.weight | mlp_norm/scale   | d
""")
SANDWICH_NORMS = rows("""
{layer}.input_layernorm.weight            | mixer_norm/scale     | d
{layer}.post_attention_layernorm.weight   | mixer_out_norm/scale | d
{layer}.pre_feedforward_layernorm.weight  | mlp_norm/scale       | d
{layer}.post_feedforward_layernorm.weight | mlp_out_norm/scale   | d
""")
POST_NORMS = rows("""
{layer}.post_attention_layernorm.weight   | mixer_out_norm/scale | d
{layer}.post_feedforward_layernorm.weight | mlp_out_norm/scale   | d
""")
OUT = rows("""
{layer}.self_attn.o_proj.weight | mixer/out              | d (n h) -> n h d
{layer}.self_attn.o_proj.bias   | mixer/out_bias         | d
{layer}.self_attn.q_norm.weight | mixer/query_norm/scale | h
{layer}.self_attn.k_norm.weight | mixer/key_norm/scale   | h
{layer}.self_attn.sinks         | mixer/sinks            | n
""")
KEY_VALUE = rows("""
{layer}.self_attn.k_proj.weight | mixer/key        | (k h) d -> d k h
{layer}.self_attn.v_proj.weight | mixer/value      | (k h) d -> d k h
{layer}.self_attn.k_proj.bias   | mixer/key_bias   | (k h) -> k h
{layer}.self_attn.v_proj.bias   | mixer/value_bias | (k h) -> k h
""")
ATTENTION = (
    KEY_VALUE
    + OUT
    + rows("""
{layer}.self_attn.q_proj.weight | mixer/query      | (n h) d -> d n h
{layer}.self_attn.q_proj.bias   | mixer/query_bias | (n h) -> n h
""")
)
GATED = rows("""
{layer}.mlp.gate_proj.weight | mlp/gate      | f d -> d f
{layer}.mlp.up_proj.weight   | mlp/up        | f d -> d f
{layer}.mlp.down_proj.weight | mlp/down      | d f -> f d
{layer}.mlp.gate_proj.bias   | mlp/gate_bias | f
{layer}.mlp.up_proj.bias     | mlp/up_bias   | f
{layer}.mlp.down_proj.bias   | mlp/down_bias | d
""")
EXPERTS = rows("""
{layer}.mlp.gate.weight                 | mlp/router | e d -> d e
{layer}.mlp.experts.{e}.gate_proj.weight | mlp/gate   | f d -> d f
{layer}.mlp.experts.{e}.up_proj.weight   | mlp/up     | f d -> d f
{layer}.mlp.experts.{e}.down_proj.weight | mlp/down   | d f -> f d
""")
PRE_NORMED = OUTER + PRE_NORMS + ATTENTION
LLAMA_ROWS = PRE_NORMED + GATED
SANDWICHED = OUTER + SANDWICH_NORMS + ATTENTION + GATED
