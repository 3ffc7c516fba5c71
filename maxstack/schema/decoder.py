"""The models' configuration: a decoder is a pattern of named block specs."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from maxstack.config.annotations import listed
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted
from maxstack.schema.kernels import CrossEntropy
from maxstack.schema.mixers import Mixer, NormConfig
from maxstack.schema.mlps import MLPKind, MoEConfig
from maxstack.schema.parts import Dim, Dims, ModelPart, activations

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

    def saved(self, embed: int) -> dict[str, Dims]:
        """Tensors that a remat policy may keep, by checkpoint name: dimensions beside batch and
        time."""
        width = Dim("embed", embed, "model.embed")
        inside = {
            name: dims for part in (self.mixer, self.mlp) for name, dims in activations(part, width)
        }
        return {"input": (width,), **inside, "mixer_out": (width,), "mlp_out": (width,)}


class HeadConfig(Section):
    """From the last hidden state to logits."""

    scores: bool = False
    """One score a position in place of logits: a reward model, as transformers'
    ForSequenceClassification with one label."""
    value: bool = False
    """Beside the logits an estimate of the reward that is to come, which begins at 0 (PPO); exports
    leave it out."""
    tied: bool = False
    """Use the embedding table, transposed."""
    bias: bool = False
    """A bias per vocabulary entry."""
    soft_cap: PositiveFloat | None = None
    """Logits l become soft_cap * tanh(l / soft_cap); null: unchanged."""
    backend: CrossEntropy = "auto"
    """The kernel that makes the loss of hidden states and this matrix; auto: the first that can
    serve."""


class PerLayerConfig(Section):
    """A second, small embedding of each token for every layer, gated into the residual stream after
    the MLP (Gemma 4 E2B)."""

    vocab: int = Field(ge=2)
    """Rows of its table."""
    size: PositiveInt
    """Numbers a token and layer."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "gelu_tanh"
    """Activation of the gate."""


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3 2024, arXiv:2412.19437, section 2.2): a block that
    predicts one token further, kept for training."""

    block: str
    """The block spec that it uses."""
    depth: PositiveInt = 1
    """Tokens that are predicted further, one block each."""
    loss: NonNegativeFloat = 0.3
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
"""Costs by model.remat.policy; save and offload keep, beside this, the tensors in
model.remat.names."""


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

    def own_faults(self) -> Iterator[Fault]:
        if bool(self.names) != (self.policy in ("save", "offload")):
            yield (
                "names",
                f"names={list(self.names)} with policy={self.policy}: save and offload "
                "need names, the others take none",
            )

    def keeps(self, name: str) -> bool:
        """True if a tensor of a block, `input` or `context`, is kept for the backward pass."""
        return name in self.names or name == "input" or REMAT[self.policy].context

    def offloads(self, name: str) -> bool:
        """True if a tensor of a block goes to the host's memory."""
        return self.policy == "offload" and name in self.names


class DecoderConfig(ModelPart):
    """A decoder-only language model built from a repeated pattern of blocks."""

    MODEL = "maxstack.models.decoder:Decoder"

    kind: Literal["decoder"] = "decoder"
    """The topology."""
    vocab: int = Field(ge=2)
    """Rows of the embedding table; at least the tokenizer's vocabulary."""
    embed: PositiveInt
    """Size of the residual stream."""
    layers: PositiveInt
    """Blocks in all."""
    blocks: dict[str, BlockConfig] = Field(min_length=1)
    """Block specs by name; a spec may say `like: other` and give only what differs."""
    pattern: Items[str] = ()
    """Names of blocks, repeated until all layers are filled; whole periods are scanned. Empty: the
    only block."""
    prefix: Items[str] = ()
    """Names of blocks that come once before the pattern, unrolled."""
    positions: PositiveInt | None = None
    """Rows of a learned table of positions that is added to the embeddings; null: none."""
    norm: NormConfig = NormConfig()
    """The last norm, before the head."""
    head: HeadConfig = HeadConfig()
    """The output head."""
    embed_scale: PositiveFloat | None = None
    """Multiplies the embeddings; null: 1."""
    per_layer: PerLayerConfig | None = None
    """Embeddings for every layer; null: none."""
    mtp: MTPConfig | None = None
    """Heads that predict further tokens in training; null: none."""
    weights: str | None = None
    """Hugging Face folder, at a path or URL, or model of the hub at a commit (Org/Name@COMMIT),
    whose weights a fresh run starts from; `from:` sets it; null: random weights."""
    init_scale: PositiveFloat = 1.0
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
    unroll: PositiveInt = 1
    """Periods of the pattern unrolled in one step of the scan: more compile time, less copying."""

    def own_faults(self) -> Iterator[Fault]:
        named = {
            "pattern": self.pattern,
            "prefix": self.prefix,
            "mtp.block": (self.mtp.block,) if self.mtp else (),
        }
        if not self.pattern and len(self.blocks.keys() - {*self.prefix, *named["mtp.block"]}) > 1:
            yield (
                "pattern",
                f"with {len(self.blocks)} blocks ({listed([*self.blocks])}) the pattern "
                "must say their order",
            )
        for key, names in named.items():
            for name in names:
                if name not in self.blocks:
                    yield (
                        key,
                        f"{key} names block {quoted(name)}, but blocks holds "
                        f"{listed([*self.blocks])}",
                    )
        if len(self.prefix) > self.layers:
            yield "prefix", f"prefix names {len(self.prefix)} blocks, but layers={self.layers}"
        tensors = [
            *dict.fromkeys(name for block in self.blocks.values() for name in block.saved(1))
        ]
        for name in self.remat.names:
            if name not in tensors:
                yield (
                    "remat.names",
                    f"no block has a tensor {quoted(name)} to keep; allowed: {listed(tensors)}"
                    f"{did_you_mean(name, tensors)}",
                )
        for name, block in self.blocks.items():
            shared = block.mixer.keys_of
            if shared is not None and shared not in self.prefix:
                yield (
                    f"blocks.{name}.mixer.share_kv",
                    f"share_kv={quoted(shared)} is no block of the prefix "
                    f"({listed([*self.prefix]) or 'empty'}); keys and values are kept of layers in "
                    "the prefix alone",
                )

    @property
    def order(self) -> tuple[str, ...]:
        """The block name of every layer, in order."""
        rest = self.layers - len(self.prefix)
        return self.prefix + tuple(self.period[i % len(self.period)] for i in range(rest))

    @property
    def repetitions(self) -> int:
        """Repetitions of the whole pattern."""
        return (self.layers - len(self.prefix)) // len(self.period)

    @property
    def stacks(self) -> dict[str, str]:
        """A unique key for each place of the pattern -> its block's name: the name itself, numbered
        where it repeats."""
        names = self.period
        return {
            name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}": name
            for i, name in enumerate(names)
        }

    @property
    def period(self) -> tuple[str, ...]:
        """The pattern; where none is given, the one block that has no other use, or the only
        one."""
        used = {*self.prefix, self.mtp.block if self.mtp else ""}
        unused = (name for name in self.blocks if name not in used)
        return self.pattern or (next(unused, next(iter(self.blocks))),)
