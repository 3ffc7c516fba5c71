"""FLOPs of a training step by a token, for MFU. Multiplications by weights and inside attention; norms, softmax and routing are not counted."""

from maxstack.layers.config import AttentionConfig, DenseMLPConfig, GatedDeltaConfig, GatedMLPConfig, MLAConfig, MLPKind, MoEConfig
from maxstack.models.config import BlockConfig, DecoderConfig


def flops_per_token(model: DecoderConfig, seq_len: int) -> float:
    """6 per weight that multiplies a token (forward 2, backward 4), and what attention does with the keys that it sees on average.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1, with the mean number of visible keys in place of the context.
    """
    total = 6.0 * model.embed * model.vocab
    total += sum(_block(model.blocks[name], model.embed, seq_len) for name in model.order)
    if extra := model.per_layer:
        total += 6 * model.layers * 3 * model.embed * extra.size
    if model.mtp and model.mtp.loss:
        step = 6 * (2 * model.embed**2 + model.embed * model.vocab) + _block(model.blocks[model.mtp.block], model.embed, seq_len)
        total += model.mtp.depth * step
    return total


def _block(block: BlockConfig, embed: int, seq_len: int) -> float:
    mixer = block.mixer
    kinds = {AttentionConfig: _attention, MLAConfig: _mla, GatedDeltaConfig: _gated_delta}
    weights, inside = kinds[type(mixer)](mixer, embed, seq_len)  # type: ignore[operator]
    return 6 * (weights + _mlp(block.mlp, embed)) + inside


def _attention(cfg: AttentionConfig, embed: int, seq_len: int) -> tuple[float, float]:
    own = 0 if cfg.share_kv else 1 if cfg.values_are_keys else 2
    weights = embed * cfg.head_dim * (cfg.heads * (3 if cfg.gate else 2) + cfg.kv * own)
    span = min(cfg.window or seq_len, seq_len)
    keys = (span * (span + 1) / 2 + (seq_len - span) * span) / seq_len
    if cfg.chunk and cfg.chunk < seq_len:
        whole, rest = divmod(seq_len, cfg.chunk)
        keys = (whole * cfg.chunk * (cfg.chunk + 1) + rest * (rest + 1)) / 2 / seq_len
    return weights, 12 * cfg.heads * cfg.head_dim * keys


def _mla(cfg: MLAConfig, embed: int, seq_len: int) -> tuple[float, float]:
    head = cfg.nope_dim + cfg.rope_dim
    query = embed * cfg.q_lora + cfg.q_lora * cfg.heads * head if cfg.q_lora else embed * cfg.heads * head
    latent = embed * (cfg.kv_lora + cfg.rope_dim) + cfg.kv_lora * cfg.heads * (cfg.nope_dim + cfg.value_dim)
    return query + latent + cfg.heads * cfg.value_dim * embed, 6 * cfg.heads * (head + cfg.value_dim) * (seq_len + 1) / 2


def _gated_delta(cfg: GatedDeltaConfig, embed: int, seq_len: int) -> tuple[float, float]:
    """Per token and head the state is read, corrected and read again: three products of key_dim by value_dim."""
    keys, values = cfg.key_heads * cfg.key_dim, cfg.value_heads * cfg.value_dim
    weights = embed * (2 * keys + 3 * values + 2 * cfg.value_heads) + cfg.conv * (2 * keys + values)
    return weights, 18 * cfg.value_heads * cfg.key_dim * cfg.value_dim


def _mlp(cfg: MLPKind, embed: int) -> float:
    if isinstance(cfg, GatedMLPConfig | DenseMLPConfig):
        return (3 if isinstance(cfg, GatedMLPConfig) else 2) * embed * cfg.hidden
    if isinstance(cfg, MoEConfig):
        return embed * (cfg.experts + 3 * (cfg.top_k * cfg.hidden + (cfg.shared.hidden if cfg.shared else 0)))
    return _mlp(cfg.dense, embed) + _mlp(cfg.moe, embed)
