"""The layers' configuration, apart from their code so that a configuration is checked before jax is imported."""

from typing import Literal

import pydantic
from pydantic import Field

from maxstack.config import Section, fault

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class NormConfig(Section):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467), computed in float32."""

    kind: Literal["rms"] = "rms"
    """The normalisation."""
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square."""
    zero_centered: bool = False
    """Scale by 1 + weight with the weight starting at 0, as Gemma does, instead of by a weight that starts at 1."""


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the two halves of a head."""

    kind: Literal["default"] = "default"
    """How the frequencies follow from theta."""
    theta: float = Field(10_000.0, gt=0)
    """Base of the geometric series of wavelengths."""


class AttentionConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    kind: Literal["attention"] = "attention"
    """The mixer."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads, each shared by heads / kv_heads query heads; null: as many as heads."""
    head_dim: int = Field(ge=1)
    """Size of a head."""
    rope: RopeConfig | None = RopeConfig()
    """Rotary positions; null: none."""
    window: int | None = Field(None, ge=1)
    """A query sees this many positions, itself included; null: all before it."""
    soft_cap: float | None = Field(None, gt=0)
    """Scores s become soft_cap * tanh(s / soft_cap); null: unchanged."""
    scale: float | None = Field(None, gt=0)
    """Multiplies the scores; null: 1 / sqrt(head_dim)."""
    qk_norm: NormConfig | None = None
    """Norm over each head of the queries and keys before RoPE; null: none."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """A bias on the output projection."""
    backend: Literal["auto", "reference", "blockwise"] = "auto"
    """The attention kernel; auto: the fastest that can serve, which the log names."""

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @pydantic.model_validator(mode="after")
    def _check(self) -> "AttentionConfig":
        if self.heads % self.kv:
            below = max(k for k in range(1, self.kv) if self.heads % k == 0)
            raise fault("kv_heads", f"heads={self.heads} is not a multiple of kv_heads={self.kv} (ratio {self.heads / self.kv:.2f}); "
                        f"kv_heads={below} would share each among {self.heads // below} query heads")
        if self.rope and self.head_dim % 2:
            raise fault("head_dim", f"head_dim={self.head_dim} is odd, but RoPE rotates pairs; use an even head_dim or rope: null")
        return self


class MLPConfig(Section):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["gated"] = "gated"
    """The feed-forward part of a block."""
    hidden: int = Field(ge=1)
    """Size of the hidden layer."""
    activation: Activation = "silu"
    """Applied to the gate."""
    bias: bool = False
    """Biases on all three projections."""
