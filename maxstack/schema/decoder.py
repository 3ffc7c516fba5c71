"""The decoder's configuration: embedding, a pattern of named block specs, head."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field

from maxstack.config import (
    CountInt,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
    SizeInt,
)
from maxstack.errors import ConfigError
from maxstack.schema.kernels import CrossEntropy
from maxstack.schema.parts import Dim
from maxstack.schema.stack import NewRows, StackConfig


class HeadConfig(Section):
    """The output head, which maps the last hidden state to logits."""

    scores: bool = False
    """Output one score per position instead of logits, for a reward model, like transformers'
    ForSequenceClassification with one label."""
    value: bool = False
    """Add a value head, which estimates the future reward and starts at 0 (PPO), next to the
    logits; exports leave it out."""
    tied: bool = False
    """Tie the weights: use the embedding table, transposed, as the output matrix."""
    bias: bool = False
    """Add a bias for each vocabulary entry."""
    soft_cap: PositiveFloat | None = None
    """Logits l become soft_cap * tanh(l / soft_cap); null: unchanged."""
    backend: CrossEntropy = "auto"
    """Kernel that computes the loss from the hidden states and the head's matrix; auto: the first
    one that supports the case."""


class PerLayerConfig(Section):
    """A second, small embedding of each token for every layer, gated into the residual stream after
    the MLP (Gemma 4 E2B)."""

    vocab: int = Field(ge=2, le=100_000_000)
    """Number of rows of this embedding table."""
    size: SizeInt
    """Embedding dimension for each layer."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    """Activation of the gate."""


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3 2024, arXiv:2412.19437, section 2.2): extra blocks that
    predict further tokens, for training."""

    block: str
    """Name of the block to use."""
    depth: CountInt = 1
    """Number of further tokens to predict, with one block for each."""
    loss: NonNegativeFloat = 0.3
    """Weight of its mean cross-entropy in the loss; 0: keep its weights without using or changing
    them."""


class DecoderConfig(StackConfig):
    """A decoder-only language model built from a repeated pattern of blocks."""

    MODEL = "maxstack.models.decoder:Decoder"
    OBJECTIVE = "next_token"

    kind: Literal["decoder"] = "decoder"
    """Selects this architecture."""
    vocab: int = Field(ge=2, le=100_000_000)
    """Number of rows of the embedding table, at least the tokenizer's vocabulary size. If it is
    larger than in the model that `from` names, rows are added."""
    new_tokens: Literal["mean"] | NonNegativeInt = "mean"
    """Initial value of added rows of the embedding and the head: the mean of the others, or, given
    a token's id, a copy of that token's row."""
    positions: SizeInt | None = None
    """Number of rows of a learned position table that is added to the embeddings; null: no
    table."""
    head: HeadConfig = HeadConfig()
    """The output head."""
    embed_scale: PositiveFloat | None = None
    """Factor by which embeddings are multiplied; null: 1."""
    per_layer: PerLayerConfig | None = None
    """Per-layer embeddings; null: none."""
    mtp: MTPConfig | None = None
    """Multi-token prediction in training; null: none."""

    @property
    def extra_blocks(self) -> dict[str, tuple[str, ...]]:
        return {"mtp.block": (self.mtp.block,)} if self.mtp else {}

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        return (self.mtp.block,) * self.mtp.depth if self.mtp and self.mtp.loss else ()

    @property
    def as_exported(self) -> Self:
        return self.model_copy(update={"head": self.head.model_copy(update={"value": False})})

    def extended_tables(self, source: StackConfig) -> dict[str, NewRows]:
        if not isinstance(source, DecoderConfig) or self.vocab <= source.vocab:
            return {}
        if self.new_tokens != "mean" and self.new_tokens >= source.vocab:
            raise ConfigError(
                f"model.new_tokens={self.new_tokens}: is no token of {self.weights}, which has "
                f"{source.vocab}; give one of them, or mean"
            )
        dims = {"embed": 0, "head": 1, "head_bias": 0}
        return {path: NewRows(dim, source.vocab, self.new_tokens) for path, dim in dims.items()}

    def head_changes(self, source: StackConfig) -> tuple[set[str], set[str]]:
        if not isinstance(source, DecoderConfig):
            return set(), set()
        fresh, left = set[str](), set[str]()
        if self.scores and not source.scores:
            fresh, left = {"score"}, {"head", "head_bias"}
        if self.head.value:
            return fresh if source.head.value else fresh | {"value"}, left
        return fresh, left | {"value"}

    def placeholder(self, length: int) -> dict[str, Any]:
        source = {"kind": "synthetic", "vocab": self.vocab}
        return {"sources": [source], "seq_len": self.positions or length}

    @property
    def mtp_depth(self) -> int:
        return self.mtp.depth if self.mtp else 0

    @property
    def scores(self) -> bool:
        return self.head.scores

    @property
    def vocabulary(self) -> Dim | None:
        return Dim("vocab", self.vocab, "model.vocab")

    @property
    def outputs(self) -> int:
        return (1 if self.head.scores else self.vocab) + self.head.value

    def products_outside_blocks(self, seq_len: int) -> Iterator[tuple[str, float]]:
        yield "head", self.embed * self.outputs
        if self.per_layer:
            yield "per-layer embeddings", self.layers * 3 * self.embed * self.per_layer.size
        if self.mtp and self.mtp.loss:
            yield "further tokens", self.mtp.depth * (2 * self.embed**2 + self.embed * self.vocab)
