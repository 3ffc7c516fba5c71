"""The models' configuration: a decoder is a pattern of named block specs."""

from typing import Literal

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, fault
from maxstack.layers.config import AttentionConfig, MLPConfig, NormConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots", "dots_no_batch", "save", "offload"]


class BlockConfig(Section):
    """One residual block: norm, mixer, norm, mlp."""

    mixer: AttentionConfig
    """What moves information between positions."""
    mlp: MLPConfig
    """What transforms each position."""
    norm: NormConfig = NormConfig()
    """Before the mixer and before the mlp."""


class HeadConfig(Section):
    """From the last hidden state to logits."""

    tied: bool = False
    """Use the embedding table, transposed."""
    bias: bool = False
    """A bias per vocabulary entry."""
    soft_cap: float | None = Field(None, gt=0)
    """Logits l become soft_cap * tanh(l / soft_cap); null: unchanged."""


class RematConfig(Section):
    """What the backward pass recomputes instead of keeping."""

    policy: Remat = "none"
    """none keeps everything; full keeps a block's input alone; dots keeps matmul outputs; dots_no_batch those without a batch dimension (no
    attention scores); save keeps the tensors in `names`; offload moves the tensors in `names` to host memory."""
    names: Items[Literal["query", "key", "value", "context", "mixer_out", "mlp_gate", "mlp_up", "mlp_out"]] = ()
    """The tensors of a block that save and offload keep."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RematConfig":
        if bool(self.names) != (self.policy in ("save", "offload")):
            raise fault("names", f"names={list(self.names)} with policy={self.policy}: save and offload need names, the others take none")
        return self


class DecoderConfig(Section):
    """A decoder-only language model built from a repeated pattern of blocks."""

    kind: Literal["decoder"] = "decoder"
    """The topology."""
    vocab: int = Field(ge=2)
    """Rows of the embedding table; at least the tokenizer's vocabulary."""
    embed: int = Field(ge=1)
    """Size of the residual stream."""
    layers: int = Field(ge=1)
    """Blocks in all."""
    blocks: dict[str, BlockConfig] = Field(min_length=1)
    """Block specs by name; a spec may say `like: other` and give only what differs."""
    pattern: Items[str] = ()
    """Names of blocks, repeated until all layers are filled; whole periods are scanned. Empty: the only block."""
    prefix: Items[str] = ()
    """Names of blocks that come once before the pattern, unrolled."""
    norm: NormConfig = NormConfig()
    """The last norm, before the head."""
    head: HeadConfig = HeadConfig()
    """The output head."""
    embed_scale: float | None = Field(None, gt=0)
    """Multiplies the embeddings; null: 1."""
    init_scale: float = Field(1.0, gt=0)
    """Multiplies the standard deviation of every initial matrix; 1: 1/sqrt(fan in), residual outputs divided by sqrt(2 layers)."""
    dtype: Dtype = "bfloat16"
    """Of activations and matmuls; softmax, norms and the loss are float32 whatever this says."""
    param_dtype: Dtype = "float32"
    """Of the weights that the optimizer updates."""
    remat: RematConfig = RematConfig()
    """What the backward pass recomputes."""
    unroll: int = Field(1, ge=1)
    """Periods of the pattern unrolled in one step of the scan: more compile time, less copying."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DecoderConfig":
        if not self.pattern and len(self.blocks) > 1:
            raise fault("pattern", f"with {len(self.blocks)} blocks ({', '.join(self.blocks)}) the pattern must say their order")
        for key in ("pattern", "prefix"):
            for name in getattr(self, key):
                if name not in self.blocks:
                    raise fault(key, f"{key} names block {name!r}, but blocks holds {', '.join(self.blocks)}")
        if len(self.prefix) > self.layers:
            raise fault("prefix", f"prefix names {len(self.prefix)} blocks, but layers={self.layers}")
        return self

    @property
    def order(self) -> tuple[str, ...]:
        """The block name of every layer, in order."""
        pattern = self.pattern or tuple(self.blocks)
        rest = self.layers - len(self.prefix)
        return self.prefix + tuple(pattern[i % len(pattern)] for i in range(rest))
