"""The configuration of norms and mixers, apart from their code so that a configuration is checked
before jax is imported."""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    Items,
    PositiveFloat,
    Section,
    SizeInt,
)
from maxstack.schema import kernels as names
from maxstack.schema.parts import (
    Cached,
    Count,
    Dim,
    Dims,
    Inner,
    Part,
    Parts,
    Weight,
    matrix,
    vector,
)

Heads = tuple[Dim, Dim]
"""Heads, and their size."""


class NormConfig(Part):
    """A normalisation over the last axis, computed in float32."""

    LAYER = "maxstack.layers.norm:Norm"

    kind: Literal["rms", "layer"] = "rms"
    """rms: root mean square (Zhang & Sennrich 2019, arXiv:1910.07467); layer: mean and variance (Ba
    2016, arXiv:1607.06450)."""
    eps: PositiveFloat = 1e-6
    """Added to the mean square or variance."""
    scale: bool = True
    """A learned factor per channel."""
    zero_centered: bool = False
    """The factor is 1 + weight with the weight starting at 0, as Gemma's is, instead of a weight
    that starts at 1."""
    bias: bool = False
    """A learned offset per channel."""

    def parts(self, width: Dim) -> Parts:
        """Factor and offset."""
        channel = width._replace(axis="norm")
        return {
            "scale": vector(channel, fill=float(not self.zero_centered)) if self.scale else None,
            "bias": vector(channel) if self.bias else None,
        }


class LinearScaling(Section):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"]
    """The scaling."""
    factor: PositiveFloat
    """Divides the frequencies."""


class ProportionalScaling(Section):
    """The rotated share of the frequencies keeps the spacing of the whole head, and the rest of the
    head stands still (Gemma 4)."""

    kind: Literal["proportional"]
    """The scaling."""
    factor: PositiveFloat = 1.0
    """Divides the frequencies."""


class Llama3Scaling(Section):
    """Long wavelengths divided by a factor, short ones kept, a ramp between them (Llama 3.1)."""

    kind: Literal["llama3"]
    """The scaling."""
    factor: PositiveFloat
    """Divides the frequencies of long wavelengths."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_length / this are scaled."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_length / this are kept."""
    original_length: SizeInt = 8192
    """The context length of pretraining."""


class YarnScaling(Section):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp by wavelength, and sharper attention."""

    kind: Literal["yarn"]
    """The scaling."""
    factor: PositiveFloat
    """Extension of the context."""
    original_length: SizeInt
    """The context length of pretraining."""
    beta_fast: PositiveFloat = 32.0
    """Dimensions that turn more often than this within original_length are kept."""
    beta_slow: PositiveFloat = 1.0
    """Dimensions that turn less often than this are scaled whole."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention_factor: PositiveFloat | None = None
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
    original_length: SizeInt
    """The context length of pretraining."""
    factor: PositiveFloat = 1.0
    """Extension of the context: sets the attention factor sqrt(1 + ln(factor) /
    ln(original_length))."""
    attention_factor: PositiveFloat | None = None
    """Multiplies cosines and sines; null: from factor."""


Scaling = Annotated[
    LinearScaling | ProportionalScaling | Llama3Scaling | YarnScaling | LongRopeScaling,
    Field(discriminator="kind"),
]


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

    theta: PositiveFloat = 10_000.0
    """Base of the geometric series of wavelengths."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of a head, from its start, that is rotated."""
    interleaved: bool = False
    """Rotate the pairs (2i, 2i + 1) instead of (i, i + half)."""
    scaling: Scaling | None = None
    """Change of the frequencies for long contexts; null: none."""


class TemperatureConfig(Section):
    """Queries multiplied by 1 + scale * ln(1 + floor((position + 1) / length)), as Llama 4 does
    where there is no RoPE."""

    scale: float = 0.1
    """Strength of the change."""
    length: SizeInt = 8192
    """Positions up to which nothing changes."""


class Reach(NamedTuple):
    """Earlier tokens that a position reads: `window` positions that end with its own, or those of
    its own chunk; all without either."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The earliest position that is read from `position`."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0


class MixerPart(Part):
    """The section of a kind of mixer."""

    COMPONENT = "projections"
    OVER_CONTEXT: ClassVar[tuple[str, ...]] = ()
    """Ways of splitting sequences over mesh.context that it can do: ring, ulysses."""

    @property
    def two_sided(self) -> bool:
        """True where a position sees later ones."""
        return False

    @property
    def split_heads(self) -> int:
        """Heads that Ulysses splits over mesh.context."""
        raise NotImplementedError

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Rotations that it wants a table of, with the size of the head that each rotates."""
        return ()

    @property
    def keys_of(self) -> str | None:
        """The block whose keys and values it reads in place of its own."""
        return None

    def cached(self) -> dict[str, Cached]:
        """Arrays that inference keeps, by name; none where it reads another block's."""
        raise NotImplementedError

    @property
    def reach(self) -> Reach:
        """Tokens whose cached arrays a position reads."""
        return Reach()


class AttentionConfig(MixerPart):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    LAYER = "maxstack.layers.attention:Attention"
    OVER_CONTEXT = ("ring", "ulysses")

    kind: Literal["attention"]
    """The mixer."""
    heads: CountInt
    """Query heads."""
    kv_heads: CountInt | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; null: as many as heads."""
    head_dim: SizeInt
    """Size of a head."""
    rope: RopeConfig | None = RopeConfig()
    """Rotary positions; null: none."""
    causal: bool = True
    """A query sees its own position and those before it; false: also those after it, as masked
    diffusion and encoders do. Only of its own document either way."""
    window: SizeInt | None = None
    """A query sees this many positions, itself included; with causal: false this many on either
    side, itself included in both (2 window - 1 in all); null: no limit."""
    chunk: SizeInt | None = None
    """A query sees only the positions of its own chunk of this many, counted from the start of its
    document; null: no chunks."""
    soft_cap: PositiveFloat | None = None
    """Scores s become soft_cap * tanh(s / soft_cap); null: unchanged."""
    scale: PositiveFloat | None = None
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
    key_bias: bool | None = None
    """Another choice for the key projection (DINOv3); null: as the others."""
    out_bias: bool = False
    """A bias on the output projection."""
    backend: names.Attention = "auto"
    """The attention kernel; auto: the first that can serve, which `maxstack kernels` and the log
    name."""

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def two_sided(self) -> bool:
        return not self.causal

    @property
    def split_heads(self) -> int:
        return self.heads

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ((self.rope, self.head_dim),) if self.rope else ()

    @property
    def keys_of(self) -> str | None:
        return self.share_kv

    def cached(self) -> dict[str, Cached]:
        if self.share_kv is not None:
            return {}
        both = Dim("kv_heads", 2 * self.kv, "kv_heads" if self.kv_heads else "heads")
        return {"pages": Cached((both, Dim("head_dim", self.head_dim, "head_dim")))}

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk)

    def _dims(self) -> tuple[Heads, Heads]:
        """A query, and a key or value, as heads and their size."""
        size = Dim("head_dim", self.head_dim, "head_dim")
        kv = Dim("kv_heads", self.kv, "kv_heads" if self.kv_heads else "heads")
        return (Dim("heads", self.heads, "heads"), size), (kv, size)

    def parts(self, width: Dim) -> Parts:
        """Projections, biases, norms and sinks."""
        query, key = self._dims()
        keys = self.share_kv is None
        values = keys and not self.values_are_keys
        keys_biased = self.qkv_bias if self.key_bias is None else self.key_bias

        def norm(cfg: NormConfig | None, dims: Heads, over: str) -> Inner | None:
            size = math.prod(dim.size for dim in (dims if over == "all" else dims[1:]))
            return Inner(cfg, Dim("norm", size)) if cfg else None

        return {
            "query": matrix(width, *query),
            "key": matrix(width, *key) if keys else None,
            "value": matrix(width, *key) if values else None,
            "gate": matrix(width, *query) if self.gate else None,
            "out": matrix(*query, width, contract=2, out=True),
            "query_bias": vector(*query) if self.qkv_bias else None,
            "key_bias": vector(*key) if keys_biased and keys else None,
            "value_bias": vector(*key) if self.qkv_bias and values else None,
            "out_bias": vector(width._replace(axis="norm")) if self.out_bias else None,
            "query_norm": norm(self.qk_norm, query, self.qk_norm_over),
            "key_norm": norm(self.qk_norm, key, self.qk_norm_over) if keys else None,
            "value_norm": norm(self.value_norm, key, "head") if keys else None,
            "sinks": vector(query[0]) if self.sinks else None,
        }

    def saved(self) -> dict[str, Dims]:
        query, key = self._dims()
        return {"query": query, "key": key, "value": key, "context": query}

    def attended(self, seq_len: int) -> dict[str, Count]:
        """12 a query head's number and key: scores and context, forward and backward."""
        span = min(self.window or seq_len, seq_len)
        keys = (span * (span + 1) / 2 + (seq_len - span) * span) / seq_len
        if self.chunk and self.chunk < seq_len:
            whole, rest = divmod(seq_len, self.chunk)
            keys = (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / seq_len
        if not self.causal:
            keys = 2 * keys - 1  # as many after the query as before it
        each = 12 * self.heads * self.head_dim
        return {"attention": Count(each * keys, each * seq_len)}

    def own_faults(self) -> Iterator[Fault]:
        if self.heads % self.kv:
            below = max(k for k in range(1, self.kv) if self.heads % k == 0)
            yield (
                "kv_heads",
                f"heads={self.heads} is not a multiple of kv_heads={self.kv} (ratio "
                f"{self.heads / self.kv:.2f}); "
                f"kv_heads={below} would share each among {self.heads // below} query heads",
            )
        if self.rope and self.head_dim * self.rope.fraction % 2:
            yield (
                "head_dim",
                f"RoPE rotates pairs, but head_dim={self.head_dim} times "
                f"fraction={self.rope.fraction} is not even; "
                "use an even head_dim, another rope.fraction or rope: null",
            )
        if self.rope and isinstance(self.rope.scaling, LongRopeScaling):
            pairs, scaling = int(self.head_dim * self.rope.fraction) // 2, self.rope.scaling
            short, long = len(scaling.short_factor), len(scaling.long_factor)
            if (short, long) != (pairs, pairs):
                yield (
                    "rope.scaling",
                    f"short_factor and long_factor hold {short} and {long} divisors; "
                    f"head_dim={self.head_dim} with fraction={self.rope.fraction} rotates {pairs} "
                    "pairs, and each needs one",
                )
        if self.window and self.chunk:
            yield (
                "chunk",
                f"chunk={self.chunk} and window={self.window} exclude each other; set one to null",
            )


class MLAConfig(MixerPart):
    """Multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434): keys and values come from a
    small shared latent."""

    LAYER = "maxstack.layers.mla:MLA"
    OVER_CONTEXT = ("ring", "ulysses")

    kind: Literal["mla"]
    """The mixer."""
    heads: CountInt
    """Heads of queries, keys and values."""
    q_lora: SizeInt | None = None
    """Size of the queries' latent; null: projected from the residual stream at once."""
    kv_lora: SizeInt
    """Size of the latent of keys and values."""
    nope_dim: SizeInt
    """Part of a query and key head without positions."""
    rope_dim: int = Field(ge=2, le=100_000_000, multiple_of=2)
    """Part with RoPE; the key's is shared by all heads."""
    causal: bool = True
    """A query sees its own position and those before it; false: all positions of its document."""
    value_dim: SizeInt
    """Size of a value head."""
    rope: RopeConfig = RopeConfig()
    """Rotary positions of the rope part."""
    norm: NormConfig = NormConfig()
    """Norm of both latents."""
    bias: bool = False
    """Biases on the projections out of the residual stream and on the output."""
    backend: names.Attention = "auto"
    """The attention kernel; auto: the first that can serve."""

    @property
    def two_sided(self) -> bool:
        return not self.causal

    @property
    def split_heads(self) -> int:
        return self.heads

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ((self.rope, self.rope_dim),)

    def cached(self) -> dict[str, Cached]:
        """The normed latent, and the rotated key that all heads share."""
        size = Dim("latent", self.kv_lora + self.rope_dim)
        return {"pages": Cached((Dim("", 1), size))}

    def _heads(self, size: int, key: str) -> Heads:
        return Dim("heads", self.heads, "heads"), Dim("head_dim", size, key)

    def parts(self, width: Dim) -> Parts:
        """Projections down to the latents and up from them, their norms and biases."""
        kv = Dim("latent", self.kv_lora, "kv_lora")
        rope = Dim("head_dim", self.rope_dim, "rope_dim")
        query = self._heads(self.nope_dim + self.rope_dim, "nope_dim")
        value = self._heads(self.value_dim, "value_dim")
        latent = Dim("latent", self.q_lora, "q_lora") if self.q_lora else None
        return {
            "query": None if latent else matrix(width, *query),
            "query_down": matrix(width, latent) if latent else None,
            "query_down_bias": vector(latent) if latent and self.bias else None,
            "query_norm": Inner(self.norm, Dim("norm", latent.size)) if latent else None,
            "query_up": matrix(latent, *query) if latent else None,
            "kv_down": matrix(width, kv),
            "kv_down_bias": vector(kv) if self.bias else None,
            "key_rope": matrix(width, rope),
            "key_rope_bias": vector(rope) if self.bias else None,
            "kv_norm": Inner(self.norm, Dim("norm", self.kv_lora)),
            "key_up": matrix(kv, *self._heads(self.nope_dim, "nope_dim")),
            "value_up": matrix(kv, *value),
            "out": matrix(*value, width, contract=2, out=True),
            "out_bias": vector(width._replace(axis="norm")) if self.bias else None,
        }

    def saved(self) -> dict[str, Dims]:
        key = self._heads(self.nope_dim + self.rope_dim, "nope_dim")
        value = self._heads(self.value_dim, "value_dim")
        return {"query": key, "key": key, "value": value, "context": value}

    def attended(self, seq_len: int) -> dict[str, Count]:
        """6 a number of a key or value, head and key."""
        each = 6 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
        keys = (seq_len + 1) / 2 if self.causal else seq_len
        return {"attention": Count(each * keys, each * seq_len)}


class GatedDeltaConfig(MixerPart):
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464): a linear-time recurrence with a short
    convolution before it. Fresh heads forget at rates of median 0.06 a position, one standard
    deviation being a factor of 5.5: the spread of the usual product of a time step log-uniform in
    [0.001, 0.1] and a rate uniform in [0, 16]."""

    LAYER = "maxstack.layers.gated_delta:GatedDelta"
    OVER_CONTEXT = ("ulysses",)
    RATE_SPREAD: ClassVar[float] = 1.7
    RATE_OFFSET: ClassVar[float] = -2.8

    kind: Literal["gated_delta"]
    """The mixer."""
    key_heads: CountInt
    """Heads of queries and keys."""
    value_heads: CountInt
    """Heads of values; a multiple of key_heads."""
    key_dim: SizeInt
    """Size of a key head."""
    value_dim: SizeInt
    """Size of a value head."""
    conv: CountInt = 4
    """Width of the causal convolution over queries, keys and values."""
    norm: NormConfig = NormConfig()
    """Over each value head of the output, before its gate."""
    chunk: SizeInt = 64
    """Positions handled as one block: a matter of speed, not of meaning."""
    backend: names.GatedDelta = "auto"
    """The kernel of the recurrence; auto: the first that can serve."""

    @property
    def split_heads(self) -> int:
        return self.value_heads

    def cached(self) -> dict[str, Cached]:
        """The recurrence's state, and what the convolutions read of the last tokens."""
        key, value = self._dims()
        before = Dim("", self.conv - 1)
        tails = {"query": key, "key": key, "value": value}
        return {
            "state": Cached((value[0], key[1], value[1]), True, "float32"),
            **{f"last_{name}": Cached((before, *dims), True) for name, dims in tails.items()},
        }

    def _dims(self) -> tuple[Heads, Heads]:
        """A query or key, and a value, as heads and their size."""
        key = Dim("head_dim", self.key_dim, "key_dim")
        value = Dim("head_dim", self.value_dim, "value_dim")
        return (
            (Dim("kv_heads", self.key_heads, "key_heads"), key),
            (Dim("heads", self.value_heads, "value_heads"), value),
        )

    def parts(self, width: Dim) -> Parts:
        """Projections, convolutions, and the rates at which heads forget."""
        key, value = self._dims()

        def convolution(*dims: Dim) -> Weight:
            taps = Dim("norm", self.conv)
            return Weight((taps, *dims), std=self.conv**-0.5, scaled="in", rows=1.0)

        return {
            "query": matrix(width, *key),
            "key": matrix(width, *key),
            "value": matrix(width, *value),
            "gate": matrix(width, *value),
            "beta": matrix(width, value[0]),
            "decay": matrix(width, value[0]),
            "conv_query": convolution(*key),
            "conv_key": convolution(*key),
            "conv_value": convolution(*value),
            "a_log": Weight((value[0],), std=self.RATE_SPREAD),
            "dt_bias": vector(value[0], fill=self.RATE_OFFSET),
            "norm": Inner(self.norm, Dim("norm", self.value_dim)),
            "out": matrix(*value, width, contract=2, out=True),
        }

    def saved(self) -> dict[str, Dims]:
        key, value = self._dims()
        return {"query": key, "key": key, "value": value, "context": value}

    def attended(self, seq_len: int) -> dict[str, Count]:
        """Per token and head the state is read, corrected and read again: three products of key_dim
        by value_dim."""
        state = 18.0 * self.value_heads * self.key_dim * self.value_dim
        return {"recurrence": Count(state, state)}

    def own_faults(self) -> Iterator[Fault]:
        if self.value_heads % self.key_heads:
            yield (
                "value_heads",
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}",
            )


Mixer = Annotated[AttentionConfig | MLAConfig | GatedDeltaConfig, Field(discriminator="kind")]
