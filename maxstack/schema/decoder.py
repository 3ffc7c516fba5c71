"""The models' configuration: a decoder is a pattern of named block specs."""

from typing import ClassVar, Literal, NamedTuple

import pydantic
from pydantic import Field

from maxstack.config import Items, Section, did_you_mean, fault, quoted
from maxstack.config.annotations import listed
from maxstack.schema import kernels as names
from maxstack.schema.mixers import Mixer, NormConfig
from maxstack.schema.mlps import MLPKind, MoEConfig
from maxstack.schema.parts import Dim, ModelPart, activations

Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "full", "dots", "dots_no_batch", "save", "offload"]


class BlockConfig(Section):
    """One residual block: a mixer and an MLP, each with its norms."""

    mixer: Mixer
    """The part that moves information between positions."""
    mlp: MLPKind
    """The part that transforms each position."""
    norm: NormConfig = NormConfig()
    """Norm of both parts."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before each part, after it (OLMo 2), or both (Gemma 2); the residual stream itself is
    never normed."""
    out_scalar: bool = False
    """A learned factor on the block's output (Gemma 4)."""

    @property
    def experts(self) -> MoEConfig | None:
        """The mixture of experts, wherever it stands in the block."""
        return self.mlp.mixture

    def saved(self, embed: int) -> dict[str, tuple[Dim, ...]]:
        """Tensors that a remat policy may keep, by checkpoint name: dimensions beside batch and
        time."""
        width = Dim("embed", embed, "model.embed")
        inside = {
            name: dims for part in (self.mixer, self.mlp) for name, dims in activations(part, width)
        }
        return {"input": (width,), **inside, "mixer_out": (width,), "mlp_out": (width,)}


class HeadConfig(Section):
    """From the last hidden state to logits."""

    tied: bool = False
    """Use the embedding table, transposed."""
    bias: bool = False
    """A bias per vocabulary entry."""
    soft_cap: float | None = Field(None, gt=0)
    """Logits l become soft_cap * tanh(l / soft_cap); null: unchanged."""
    backend: names.CrossEntropy = "auto"
    """The kernel that makes the loss of hidden states and this matrix; auto: the first that can
    serve."""


class PerLayerConfig(Section):
    """A second, small embedding of each token for every layer, gated into the residual stream after
    the MLP (Gemma 4 E2B)."""

    vocab: int = Field(ge=2)
    """Rows of its table."""
    size: int = Field(ge=1)
    """Numbers a token and layer."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    """Activation of the gate."""


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3 2024, arXiv:2412.19437, section 2.2): a block that
    predicts one token further, kept for training."""

    block: str
    """The block spec that it uses."""
    depth: int = Field(1, ge=1)
    """How many tokens further, one block each."""
    loss: float = Field(0.3, ge=0)
    """Weight of its mean cross-entropy; 0: carried along, neither computed nor changed."""


class RematPolicy(NamedTuple):
    """Costs of a remat policy: numbers kept for the backward pass, and work done again."""

    recomputed: float
    """Share of the forward pass."""
    outputs: float
    """Numbers kept, as a multiple of those that matmuls give."""
    stream: float
    """Numbers kept, as a multiple of the size of the residual stream."""
    context: bool
    """True where the output of attention is kept."""
    searched: bool = False
    """True where `plan --search` tries it."""


REMAT = {
    "none": RematPolicy(0.0, 2.1, 4.0, context=True, searched=True),
    "dots": RematPolicy(0.0, 1.0, 1.0, context=True, searched=True),
    "full": RematPolicy(1.0, 0.0, 1.0, context=False, searched=True),
    "dots_no_batch": RematPolicy(0.05, 1.0, 1.0, context=False),
    "save": RematPolicy(0.2, 0.0, 1.0, context=False),
    "offload": RematPolicy(0.3, 0.0, 1.0, context=False),
}
"""By model.remat.policy; save and offload keep, beside this, the tensors in model.remat.names."""


class RematConfig(Section):
    """Recomputation in the backward pass, instead of keeping."""

    policy: Remat = "none"
    """none keeps everything; full keeps a block's input alone; dots keeps matmul outputs;
    dots_no_batch those without a batch dimension (no attention scores); save keeps the tensors in
    `names`; offload moves the tensors in `names` to host memory."""
    names: Items[str] = ()
    """The tensors of a block that save and offload keep: input, mixer_out, mlp_out, and what its
    mixer and MLP have (query, key, value, context; mlp_gate, mlp_up). The input is kept on the
    device, unless offload names it."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RematConfig":
        if bool(self.names) != (self.policy in ("save", "offload")):
            raise fault(
                "names",
                f"names={list(self.names)} with policy={self.policy}: save and offload "
                "need names, the others take none",
            )
        return self

    def keeps(self, name: str) -> bool:
        """True if a tensor of a block, `input` or `context`, is kept for the backward pass."""
        return name in self.names or name == "input" or REMAT[self.policy].context

    def offloads(self, name: str) -> bool:
        """True if a tensor of a block goes to the host's memory."""
        return self.policy == "offload" and name in self.names


class DecoderConfig(ModelPart):
    """A decoder-only language model built from a repeated pattern of blocks."""

    MODEL: ClassVar[str] = "maxstack.models.decoder:Decoder"

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
    """Names of blocks, repeated until all layers are filled; whole periods are scanned. Empty: the
    only block."""
    prefix: Items[str] = ()
    """Names of blocks that come once before the pattern, unrolled."""
    positions: int | None = Field(None, ge=1)
    """Rows of a learned table of positions that is added to the embeddings; null: none."""
    norm: NormConfig = NormConfig()
    """The last norm, before the head."""
    head: HeadConfig = HeadConfig()
    """The output head."""
    embed_scale: float | None = Field(None, gt=0)
    """Multiplies the embeddings; null: 1."""
    per_layer: PerLayerConfig | None = None
    """Embeddings for every layer; null: none."""
    mtp: MTPConfig | None = None
    """Heads that predict further tokens in training; null: none."""
    weights: str | None = None
    """Hugging Face folder, at a path or URL, or model of the hub at a commit (Org/Name@COMMIT),
    whose weights a fresh run starts from; `from:` sets it; null: random weights."""
    init_scale: float = Field(1.0, gt=0)
    """Multiplies the standard deviation of every initial matrix; 1: 1/sqrt(fan in), residual
    outputs divided by sqrt(2 layers)."""
    dtype: Dtype = "bfloat16"
    """Type of activations and matmuls; softmax, norms and the loss are float32 whatever this
    says."""
    param_dtype: Dtype = "float32"
    """Type of the weights that the optimizer updates; it computes in float32, and so is its state
    unless a transform says otherwise."""
    remat: RematConfig = RematConfig()
    """Recomputation in the backward pass."""
    unroll: int = Field(1, ge=1)
    """Periods of the pattern unrolled in one step of the scan: more compile time, less copying."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DecoderConfig":
        used = (*self.prefix, *self.pattern, *((self.mtp.block,) if self.mtp else ()))
        if not self.pattern and len({*self.blocks} - {*used}) > 1:
            raise fault(
                "pattern",
                f"with {len(self.blocks)} blocks ({listed([*self.blocks])}) the pattern "
                "must say their order",
            )
        for key, given in (
            ("pattern", self.pattern),
            ("prefix", self.prefix),
            ("mtp.block", used[len(self.prefix) + len(self.pattern) :]),
        ):
            for name in given:
                if name not in self.blocks:
                    raise fault(
                        key,
                        f"{key} names block {quoted(name)}, but blocks holds "
                        f"{listed([*self.blocks])}",
                    )
        if len(self.prefix) > self.layers:
            raise fault(
                "prefix", f"prefix names {len(self.prefix)} blocks, but layers={self.layers}"
            )
        tensors = [
            *dict.fromkeys(name for block in self.blocks.values() for name in block.saved(1))
        ]
        for name in self.remat.names:
            if name not in tensors:
                raise fault(
                    "remat.names",
                    f"no block has a tensor {quoted(name)} to keep; allowed: {listed(tensors)}"
                    f"{did_you_mean(name, tensors)}",
                )
        for name, block in self.blocks.items():
            shared = block.mixer.keys_of
            if shared is not None and shared not in self.prefix:
                raise fault(
                    f"blocks.{name}.mixer.share_kv",
                    f"share_kv={quoted(shared)} is no block of the prefix "
                    f"({listed([*self.prefix]) or 'empty'}); "
                    "keys and values are kept of layers in the prefix alone",
                )
        return self

    @property
    def order(self) -> tuple[str, ...]:
        """The block name of every layer, in order."""
        rest = self.layers - len(self.prefix)
        return self.prefix + tuple(self.period[i % len(self.period)] for i in range(rest))

    @property
    def period(self) -> tuple[str, ...]:
        """The pattern; where none is given, the one block that has no other use, or the only
        one."""
        used = {*self.prefix, *((self.mtp.block,) if self.mtp else ())}
        return (
            self.pattern
            or tuple(name for name in self.blocks if name not in used)[:1]
            or tuple(self.blocks)[:1]
        )
