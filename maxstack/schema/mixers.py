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
from maxstack.config.own_kinds import Open
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
    """Small number added to the mean square or variance."""
    scale: bool = True
    """Learn a factor per channel."""
    zero_centered: bool = False
    """Make the factor 1 + weight, with weights starting at 0, as in Gemma, instead of a weight that
    starts at 1."""
    bias: bool = False
    """Learn an offset per channel."""

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
    """Selects this scaling."""
    factor: PositiveFloat
    """Number to divide the frequencies by."""


class ProportionalScaling(Section):
    """Only a fraction of the head is rotated, with frequencies spaced as if the whole head were
    (Gemma 4)."""

    kind: Literal["proportional"]
    """Selects this scaling."""
    factor: PositiveFloat = 1.0
    """Number to divide the frequencies by."""


class Llama3Scaling(Section):
    """Frequencies of long wavelengths are divided by a factor, those of short ones are kept, and
    there is a ramp between them (Llama 3.1)."""

    kind: Literal["llama3"]
    """Selects this scaling."""
    factor: PositiveFloat
    """Number to divide the frequencies of long wavelengths by."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_length / low_freq_factor are scaled."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_length / high_freq_factor are kept."""
    original_length: SizeInt = 8192
    """Context length of pretraining."""


class YarnScaling(Section):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp by wavelength, and sharper attention."""

    kind: Literal["yarn"]
    """Selects this scaling."""
    factor: PositiveFloat
    """Factor by which the context is extended."""
    original_length: SizeInt
    """Context length of pretraining."""
    beta_fast: PositiveFloat = 32.0
    """Dimensions that make more rotations than this within original_length are not scaled."""
    beta_slow: PositiveFloat = 1.0
    """Dimensions that make fewer rotations than this are scaled fully."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention_factor: PositiveFloat | None = None
    """Factor by which cosines and sines are multiplied; null: from mscale and mscale_all_dim where
    given, else 0.1 ln(factor) + 1."""
    mscale: float | None = None
    """Numerator of the attention factor in DeepSeek's models: 0.1 mscale ln(factor) + 1."""
    mscale_all_dim: float | None = None
    """Denominator of the attention factor in DeepSeek's models, by the same formula; MLA's
    attention scale is also multiplied by its square."""


class LongRopeScaling(Section):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one divisor per frequency, in one list up to
    the original length and another beyond."""

    kind: Literal["longrope"]
    """Selects this scaling."""
    short_factor: Items[float]
    """Divisors for documents of at most original_length tokens."""
    long_factor: Items[float]
    """Divisors for longer documents."""
    original_length: SizeInt
    """Context length of pretraining."""
    factor: PositiveFloat = 1.0
    """Factor by which the context is extended; it sets the attention factor to sqrt(1 + ln(factor)
    / ln(original_length))."""
    attention_factor: PositiveFloat | None = None
    """Factor by which cosines and sines are multiplied; null: computed from factor."""


Scaling = Annotated[
    LinearScaling | ProportionalScaling | Llama3Scaling | YarnScaling | LongRopeScaling,
    Field(discriminator="kind"),
]


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

    theta: PositiveFloat = 10_000.0
    """Base of the geometric series of wavelengths."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of a head, from its start, that is rotated."""
    interleaved: bool = False
    """Rotate the pairs (2i, 2i + 1) instead of (i, i + half)."""
    scaling: Scaling | None = None
    """Scaling of the frequencies for long contexts; null: none."""


class TemperatureConfig(Section):
    """Multiplies queries by 1 + scale * ln(1 + floor((position + 1) / length)), as Llama 4 does in
    layers without RoPE."""

    scale: float = 0.1
    """`scale` in the formula: strength of the change."""
    length: SizeInt = 8192
    """`length` in the formula: queries at positions below it are not changed."""


class Reach(NamedTuple):
    """The earlier tokens that a position attends to: the last `window` positions including its own,
    or those of its own chunk; all without either."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The earliest position that `position` attends to."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0


class MixerPart(Part):
    """The section of a kind of mixer."""

    COMPONENT = "projections"
    OVER_CONTEXT: ClassVar[tuple[str, ...]] = ()
    """Ways in which it can split sequences over mesh.context: ring, ulysses."""

    @property
    def two_sided(self) -> bool:
        """Whether a position sees later ones."""
        return False

    @property
    def split_heads(self) -> int:
        """Heads that Ulysses splits over mesh.context."""
        raise NotImplementedError

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Rotations that need a table, with the size of the head that each rotates."""
        return ()

    @property
    def keys_of(self) -> str | None:
        """The block whose keys and values it uses instead of its own."""
        return None

    def cached(self) -> dict[str, Cached]:
        """Arrays to cache for inference, by name; none where it uses another block's."""
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
    """Selects this mixer."""
    heads: CountInt
    """Number of query heads."""
    kv_heads: CountInt | None = None
    """Number of key and value heads, each shared by heads / kv_heads query heads; null: as many as
    heads."""
    head_dim: SizeInt
    """Size of a head."""
    rope: RopeConfig | None = RopeConfig()
    """Rotary position embedding; null: none."""
    causal: bool = True
    """Attend only to the current position and those before it; false: also to later ones, as masked
    diffusion and encoders do. Attention never leaves a document either way."""
    window: SizeInt | None = None
    """Sliding window: number of positions to attend to, including the current one; with causal:
    false, that many on either side (2 window - 1 in all); null: no limit."""
    chunk: SizeInt | None = None
    """Attend only within chunks of this many positions, counted from the start of the document;
    null: no chunks."""
    soft_cap: PositiveFloat | None = None
    """Scores s become soft_cap * tanh(s / soft_cap); null: unchanged."""
    scale: PositiveFloat | None = None
    """Factor by which scores are multiplied; null: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """Learn an attention sink per head: a score that takes part in the softmax without a value
    (gpt-oss)."""
    temperature: TemperatureConfig | None = None
    """Scaling of queries at far positions; null: none."""
    qk_norm: NormConfig | None = None
    """Norm of queries and keys; null: none."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Normalise over each head, or over all heads together (OLMo 2)."""
    qk_norm_after_rope: bool = False
    """Normalise after the rotation instead of before it (Llama 4)."""
    value_norm: NormConfig | None = None
    """Norm of each head's values; null: none."""
    values_are_keys: bool = False
    """Use the projected keys, before their norm and rotation, as values (Gemma 4)."""
    share_kv: str | None = None
    """Name of a block of the prefix: use the keys and values of the last earlier layer with that
    block, instead of computing them (Gemma 4 E2B)."""
    gate: bool = False
    """Multiply the attention output by the sigmoid of a second query projection (Qwen3-Next)."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections."""
    key_bias: bool | None = None
    """Whether the key projection has a bias, if it differs from the others (DINOv3); null: as
    qkv_bias."""
    out_bias: bool = False
    """Add a bias to the output projection."""
    backend: names.Attention = "auto"
    """Attention kernel; auto: the first one that supports the case, which `maxstack kernels` and
    the log name."""

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
        """(heads, head size) of a query, and of a key or value."""
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
    """Selects this mixer."""
    heads: CountInt
    """Number of query, key and value heads."""
    q_lora: SizeInt | None = None
    """Dimension of the queries' latent; null: project queries directly."""
    kv_lora: SizeInt
    """Dimension of the latent of keys and values."""
    nope_dim: SizeInt
    """Size of the part of a query or key head without positions."""
    rope_dim: int = Field(ge=2, le=100_000_000, multiple_of=2)
    """Size of the part of a query or key head with RoPE; the key's part is shared by all heads."""
    causal: bool = True
    """Attend only to the current position and those before it; false: to all positions of the
    document."""
    value_dim: SizeInt
    """Size of a value head."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding of that part of the heads."""
    norm: NormConfig = NormConfig()
    """Norm of both latents."""
    bias: bool = False
    """Add biases to the projections from the residual stream and to the output projection."""
    backend: names.Attention = "auto"
    """Attention kernel; auto: the first one that supports the case."""

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
    convolution before it. The initial decay rates of heads have a median of 0.06 per position and a
    geometric standard deviation of 5.5, the spread of the usual product of a time step log-uniform
    in [0.001, 0.1] and a rate uniform in [0, 16]."""

    LAYER = "maxstack.layers.gated_delta:GatedDelta"
    OVER_CONTEXT = ("ulysses",)
    RATE_SPREAD: ClassVar[float] = 1.7
    RATE_OFFSET: ClassVar[float] = -2.8

    kind: Literal["gated_delta"]
    """Selects this mixer."""
    key_heads: CountInt
    """Number of query and key heads."""
    value_heads: CountInt
    """Number of value heads; a multiple of key_heads."""
    key_dim: SizeInt
    """Size of a key head."""
    value_dim: SizeInt
    """Size of a value head."""
    conv: CountInt = 4
    """Width of the causal convolution over queries, keys and values."""
    norm: NormConfig = NormConfig()
    """Norm of each value head of the output, before its gate."""
    chunk: SizeInt = 64
    """Positions to process as one block; affects speed only."""
    backend: names.GatedDelta = "auto"
    """Kernel of the recurrence; auto: the first one that supports the case."""

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
        """(heads, head size) of a query or key, and of a value."""
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


Mixer = Annotated[AttentionConfig | MLAConfig | GatedDeltaConfig, Open(MixerPart)]
