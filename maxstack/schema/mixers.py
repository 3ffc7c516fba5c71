"""The configuration of norms and mixers, apart from their code so that a configuration is checked
before jax is imported."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault
from maxstack.schema import kernels as names


class NormConfig(Section):
    """A normalisation over the last axis, computed in float32."""

    kind: Literal["rms", "layer"] = "rms"
    """rms: root mean square (Zhang & Sennrich 2019, arXiv:1910.07467); layer: mean and variance (Ba
    2016, arXiv:1607.06450)."""
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square or variance."""
    scale: bool = True
    """A learned factor per channel."""
    zero_centered: bool = False
    """The factor is 1 + weight with the weight starting at 0, as Gemma's is, instead of a weight
    that starts at 1."""
    bias: bool = False
    """A learned offset per channel."""


class LinearScaling(Section):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"]
    """The scaling."""
    factor: float = Field(gt=0)
    """Divides the frequencies."""


class ProportionalScaling(Section):
    """The rotated share of the frequencies keeps the spacing of the whole head, and the rest of the
    head stands still (Gemma 4)."""

    kind: Literal["proportional"]
    """The scaling."""
    factor: float = Field(1.0, gt=0)
    """Divides the frequencies."""


class Llama3Scaling(Section):
    """Long wavelengths divided by a factor, short ones kept, a ramp between them (Llama 3.1)."""

    kind: Literal["llama3"]
    """The scaling."""
    factor: float = Field(gt=0)
    """Divides the frequencies of long wavelengths."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths above original_length / this are scaled."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths below original_length / this are kept."""
    original_length: int = Field(8192, ge=1)
    """The context length of pretraining."""


class YarnScaling(Section):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp by wavelength, and sharper attention."""

    kind: Literal["yarn"]
    """The scaling."""
    factor: float = Field(gt=0)
    """Extension of the context."""
    original_length: int = Field(ge=1)
    """The context length of pretraining."""
    beta_fast: float = Field(32.0, gt=0)
    """Dimensions that turn more often than this within original_length are kept."""
    beta_slow: float = Field(1.0, gt=0)
    """Dimensions that turn less often than this are scaled whole."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention_factor: float | None = Field(None, gt=0)
    """Multiplies cosines and sines; null: from mscale and mscale_all_dim where given, else 0.1
    ln(factor) + 1."""
    mscale: float | None = None
    """DeepSeek's numerator: 0.1 mscale ln(factor) + 1."""
    mscale_all_dim: float | None = None
    """DeepSeek's denominator, and the factor, squared, of the attention scale of MLA."""


class LongRopeScaling(Section):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each frequency, one list within
    the original length and one beyond."""

    kind: Literal["longrope"]
    """The scaling."""
    short_factor: Items[float]
    """Divisors for documents of at most original_length tokens."""
    long_factor: Items[float]
    """Divisors for longer documents."""
    original_length: int = Field(ge=1)
    """The context length of pretraining."""
    factor: float = Field(1.0, gt=0)
    """Extension of the context: sets the attention factor sqrt(1 + ln(factor) /
    ln(original_length))."""
    attention_factor: float | None = Field(None, gt=0)
    """Multiplies cosines and sines; null: from factor."""


Scaling = Annotated[
    LinearScaling | ProportionalScaling | Llama3Scaling | YarnScaling | LongRopeScaling,
    Field(discriminator="kind"),
]


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

    theta: float = Field(10_000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of a head, from its start, that is rotated."""
    interleaved: bool = False
    """Rotate the pairs (2i, 2i + 1) instead of (i, i + half)."""
    scaling: Scaling | None = None
    """How frequencies change for long contexts; null: not."""


class TemperatureConfig(Section):
    """Queries multiplied by 1 + scale * ln(1 + floor((position + 1) / length)), as Llama 4 does
    where there is no RoPE."""

    scale: float = 0.1
    """How much."""
    length: int = Field(8192, ge=1)
    """Positions up to which nothing changes."""


class AttentionConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    kind: Literal["attention"]
    """The mixer."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads, each shared by heads / kv_heads query heads; null: as many as heads."""
    head_dim: int = Field(ge=1)
    """Size of a head."""
    rope: RopeConfig | None = RopeConfig()
    """Rotary positions; null: none."""
    causal: bool = True
    """A query sees its own position and those before it; false: also those after it, as masked
    diffusion and encoders do. Only of its own document either way."""
    window: int | None = Field(None, ge=1)
    """A query sees this many positions, itself included; with causal: false this many on either
    side, itself included in both (2 window - 1 in all); null: no limit."""
    chunk: int | None = Field(None, ge=1)
    """A query sees only the positions of its own chunk of this many, counted from the start of its
    document; null: no chunks."""
    soft_cap: float | None = Field(None, gt=0)
    """Scores s become soft_cap * tanh(s / soft_cap); null: unchanged."""
    scale: float | None = Field(None, gt=0)
    """Multiplies the scores; null: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """A learned score per head that takes a share of the softmax and gives nothing (gpt-oss)."""
    temperature: TemperatureConfig | None = None
    """Sharper attention at far positions; null: none."""
    qk_norm: NormConfig | None = None
    """Norm of queries and keys; null: none."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Over each head, or over all heads together (OLMo 2)."""
    qk_norm_after_rope: bool = False
    """Normalise after the rotation instead of before (Llama 4)."""
    value_norm: NormConfig | None = None
    """Norm over each head of the values; null: none."""
    values_are_keys: bool = False
    """The values are the keys as projected, before their norm and rotation (Gemma 4)."""
    share_kv: str | None = None
    """No keys and values, nor norms of them, of its own: those of the last earlier layer of the
    prefix that is this block (Gemma 4 E2B)."""
    gate: bool = False
    """Multiply the context by the sigmoid of a second query projection (Qwen3-Next)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """A bias on the output projection."""
    backend: names.Attention = "auto"
    """The attention kernel; auto: the first that can serve, which `maxstack kernels` and the log
    name."""

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @pydantic.model_validator(mode="after")
    def _check(self) -> "AttentionConfig":
        if self.heads % self.kv:
            below = max(k for k in range(1, self.kv) if self.heads % k == 0)
            raise fault(
                "kv_heads",
                f"heads={self.heads} is not a multiple of kv_heads={self.kv} (ratio "
                f"{self.heads / self.kv:.2f}); "
                f"kv_heads={below} would share each among {self.heads // below} query heads",
            )
        if self.rope and self.head_dim * self.rope.fraction % 2:
            raise fault(
                "head_dim",
                f"RoPE rotates pairs, but head_dim={self.head_dim} times "
                f"fraction={self.rope.fraction} is not even; "
                "use an even head_dim, another rope.fraction or rope: null",
            )
        if self.rope and isinstance(self.rope.scaling, LongRopeScaling):
            pairs, found = (
                int(self.head_dim * self.rope.fraction) // 2,
                (len(self.rope.scaling.short_factor), len(self.rope.scaling.long_factor)),
            )
            if found != (pairs, pairs):
                raise fault(
                    "rope.scaling",
                    f"short_factor and long_factor hold {found[0]} and {found[1]} "
                    f"divisors; head_dim={self.head_dim} with "
                    f"fraction={self.rope.fraction} rotates {pairs} pairs, and each needs one",
                )
        if self.window and self.chunk:
            raise fault(
                "chunk",
                f"chunk={self.chunk} and window={self.window} exclude each other; set one to null",
            )
        return self


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434): keys and values come from a
    small shared latent."""

    kind: Literal["mla"]
    """The mixer."""
    heads: int = Field(ge=1)
    """Heads of queries, keys and values."""
    q_lora: int | None = Field(None, ge=1)
    """Size of the queries' latent; null: projected from the residual stream at once."""
    kv_lora: int = Field(ge=1)
    """Size of the latent of keys and values."""
    nope_dim: int = Field(ge=1)
    """Part of a query and key head without positions."""
    rope_dim: int = Field(ge=2, multiple_of=2)
    """Part with RoPE; the key's is shared by all heads."""
    causal: bool = True
    """A query sees its own position and those before it; false: all positions of its document."""
    value_dim: int = Field(ge=1)
    """Size of a value head."""
    rope: RopeConfig = RopeConfig()
    """Rotary positions of the rope part."""
    norm: NormConfig = NormConfig()
    """Of both latents."""
    bias: bool = False
    """Biases on the projections out of the residual stream and on the output."""
    backend: names.Attention = "auto"
    """The attention kernel; auto: the first that can serve."""


class GatedDeltaConfig(Section):
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464): a linear-time recurrence with a short
    convolution before it."""

    kind: Literal["gated_delta"]
    """The mixer."""
    key_heads: int = Field(ge=1)
    """Heads of queries and keys."""
    value_heads: int = Field(ge=1)
    """Heads of values; a multiple of key_heads."""
    key_dim: int = Field(ge=1)
    """Size of a key head."""
    value_dim: int = Field(ge=1)
    """Size of a value head."""
    conv: int = Field(4, ge=1)
    """Width of the causal convolution over queries, keys and values."""
    norm: NormConfig = NormConfig()
    """Over each value head of the output, before its gate."""
    chunk: int = Field(64, ge=1)
    """Positions handled as one block: a matter of speed, not of meaning."""
    backend: names.GatedDelta = "auto"
    """The kernel of the recurrence; auto: the first that can serve."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "GatedDeltaConfig":
        if self.value_heads % self.key_heads:
            raise fault(
                "value_heads",
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}",
            )
        return self


Mixer = Annotated[AttentionConfig | MLAConfig | GatedDeltaConfig, Field(discriminator="kind")]
