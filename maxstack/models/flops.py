"""FLOPs of a training step by a token and component, for MFU and plan. Multiplications by weights
and inside mixers; norms, softmax, embedding lookups and the choice of experts are not counted, nor
is what the backward pass computes again."""

import collections
from collections.abc import Iterator
from typing import NamedTuple

from maxstack.schema.decoder import BlockConfig, DecoderConfig
from maxstack.schema.mixers import AttentionConfig, GatedDeltaConfig, MLAConfig
from maxstack.schema.mlps import DenseMLPConfig, GatedMLPConfig, MLPKind, MoEConfig


class Count(NamedTuple):
    """Training FLOPs a token, forward and backward. `causal` counts the keys that a query sees on
    average, `full` all of the sequence."""

    causal: float
    full: float


def flops_per_token(model: DecoderConfig, seq_len: int, adapters: int = 0) -> float:
    """Causal training FLOPs a token, all components."""
    return sum(count.causal for count in components(model, seq_len, adapters).values())


def components(model: DecoderConfig, seq_len: int, adapters: int = 0) -> dict[str, Count]:
    """6 per weight that multiplies a token (forward 2, backward 4), and what attention does with
    the keys that it sees, by component.

    With `adapters`, parameters of low-rank adapters, these count so, and other weights, which are
    frozen and have no gradient of their own, 4. Source: Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1, with the mean number of visible keys in place of the context.
    """
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for name, count in [
        *_parts(model, seq_len, 4.0 if adapters else 6.0),
        *([("adapters", _weights(adapters, 6.0))] if adapters else []),
    ]:
        total[name][0] += count.causal
        total[name][1] += count.full
    return {name: Count(*sums) for name, sums in total.items()}


def _parts(model: DecoderConfig, seq_len: int, each: float) -> Iterator[tuple[str, Count]]:
    yield "head", _weights(model.embed * model.vocab, each)
    for name in model.order:
        yield from _block(model.blocks[name], model.embed, seq_len, each)
    if extra := model.per_layer:
        yield "per-layer embeddings", _weights(model.layers * 3 * model.embed * extra.size, each)
    if model.mtp and model.mtp.loss:
        for _ in range(model.mtp.depth):
            yield "further tokens", _weights(2 * model.embed**2 + model.embed * model.vocab, each)
            yield from (
                ("further tokens", count)
                for _, count in _block(model.blocks[model.mtp.block], model.embed, seq_len, each)
            )


def _weights(number: float, each: float) -> Count:
    return Count(each * number, each * number)


def _block(
    block: BlockConfig, embed: int, seq_len: int, each: float
) -> Iterator[tuple[str, Count]]:
    kinds = {AttentionConfig: _attention, MLAConfig: _mla, GatedDeltaConfig: _gated_delta}
    projections, inside = kinds[type(block.mixer)](block.mixer, embed, seq_len)  # type: ignore[operator]
    yield "projections", _weights(projections, each)
    yield "attention" if not isinstance(block.mixer, GatedDeltaConfig) else "recurrence", inside
    yield from _mlp(block.mlp, embed, each)


def _attention(cfg: AttentionConfig, embed: int, seq_len: int) -> tuple[float, Count]:
    own = 0 if cfg.share_kv else 1 if cfg.values_are_keys else 2
    weights = embed * cfg.head_dim * (cfg.heads * (3 if cfg.gate else 2) + cfg.kv * own)
    span = min(cfg.window or seq_len, seq_len)
    keys = (span * (span + 1) / 2 + (seq_len - span) * span) / seq_len
    if cfg.chunk and cfg.chunk < seq_len:
        whole, rest = divmod(seq_len, cfg.chunk)
        keys = (whole * cfg.chunk * (cfg.chunk + 1) + rest * (rest + 1)) / 2 / seq_len
    if not cfg.causal:
        keys = 2 * keys - 1  # as many after the query as before it
    return weights, Count(
        12 * cfg.heads * cfg.head_dim * keys, 12 * cfg.heads * cfg.head_dim * seq_len
    )


def _mla(cfg: MLAConfig, embed: int, seq_len: int) -> tuple[float, Count]:
    head = cfg.nope_dim + cfg.rope_dim
    query = (
        embed * cfg.q_lora + cfg.q_lora * cfg.heads * head
        if cfg.q_lora
        else embed * cfg.heads * head
    )
    latent = embed * (cfg.kv_lora + cfg.rope_dim) + cfg.kv_lora * cfg.heads * (
        cfg.nope_dim + cfg.value_dim
    )
    a_key = 6 * cfg.heads * (head + cfg.value_dim)
    return query + latent + cfg.heads * cfg.value_dim * embed, Count(
        a_key * ((seq_len + 1) / 2 if cfg.causal else seq_len), a_key * seq_len
    )


def _gated_delta(cfg: GatedDeltaConfig, embed: int, seq_len: int) -> tuple[float, Count]:
    """Per token and head the state is read, corrected and read again: three products of key_dim by
    value_dim."""
    keys, values = cfg.key_heads * cfg.key_dim, cfg.value_heads * cfg.value_dim
    weights = embed * (2 * keys + 3 * values + 2 * cfg.value_heads) + cfg.conv * (2 * keys + values)
    return weights, Count(*(18.0 * cfg.value_heads * cfg.key_dim * cfg.value_dim,) * 2)


def _mlp(cfg: MLPKind, embed: int, each: float) -> Iterator[tuple[str, Count]]:
    if isinstance(cfg, GatedMLPConfig | DenseMLPConfig):
        yield (
            "mlp",
            _weights((3 if isinstance(cfg, GatedMLPConfig) else 2) * embed * cfg.hidden, each),
        )
    elif isinstance(cfg, MoEConfig):
        yield "experts", _weights(embed * (cfg.experts + 3 * cfg.top_k * cfg.hidden), each)
        if cfg.shared:
            yield (
                "shared experts",
                _weights(embed * (3 * cfg.shared.hidden + cfg.shared.gate), each),
            )
    else:
        yield from (*_mlp(cfg.dense, embed, each), *_mlp(cfg.moe, embed, each))
