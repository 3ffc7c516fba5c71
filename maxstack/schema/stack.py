"""What kinds of models have in common: blocks in a repeated pattern, their types, what is
recomputed."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    Items,
    PositiveFloat,
    Section,
    SizeInt,
)
from maxstack.config.annotations import listed
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted
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
    mlp_norm: NormConfig | None = None
    """Norm before the MLP; null: as `norm`."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before each part, after it (OLMo 2), or both (Gemma 2); the residual stream itself is
    never normed."""
    out_scalar: bool = False
    """A learned factor on the block's output (Gemma 4)."""
    layer_scale: PositiveFloat | None = None
    """Initial value of learned factors, one a channel, on what each part adds (CaiT, Touvron et al.
    2021, arXiv:2103.17239); null: none."""

    modulation: Literal["shared", "own"] | None = None
    """Norms shifted and scaled, and what is added scaled, by a time and a class (adaLN-zero, of
    model.kind=dit). shared: by one vector of the model; own: each block makes its own, as diffusers
    stores it; null: not."""

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


class NewRows(NamedTuple):
    """Rows that are added to a table."""

    dim: int
    """The table's dimension of rows."""
    before: int
    """Rows that there are."""
    like: Literal["mean"] | int
    """What a new one is: the mean of those, or a copy of that of a number."""

    def shape_before(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the table without them."""
        return *shape[: self.dim], self.before, *shape[self.dim + 1 :]


class StackConfig(ModelPart):
    """Keys of a model whose blocks follow a repeated pattern."""

    OBJECTIVE: ClassVar[str] = ""
    """The usual objective.kind."""

    kind: str

    embed: SizeInt
    """Size of the residual stream."""
    layers: CountInt
    """Blocks in all."""
    blocks: dict[str, BlockConfig] = Field(min_length=1)
    """Block specs by name; a spec may say `like: other` and give only what differs."""
    pattern: Items[str] = ()
    """Names of blocks, repeated until all layers are filled; whole periods are scanned. Empty: the
    only block."""
    prefix: Items[str] = ()
    """Names of blocks that come once before the pattern, unrolled."""
    norm: NormConfig = NormConfig()
    """The last norm, before the head."""
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
    unroll: CountInt = 1
    """Periods of the pattern unrolled in one step of the scan: more compile time, less copying."""

    def own_faults(self) -> Iterator[Fault]:
        named = {"pattern": self.pattern, "prefix": self.prefix} | self.apart
        apart = {name for names in self.apart.values() for name in names}
        if not self.pattern and len(self.blocks.keys() - {*self.prefix, *apart}) > 1:
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
    def tokens(self) -> int | None:
        """Tokens of a row, where the model's own sizes say it; None: as long as the data makes
        it."""
        return None

    @property
    def as_exported(self) -> Self:
        """The model without what no folder of transformers holds."""
        return self

    def lengthened(self, source: "StackConfig") -> "dict[str, NewRows]":
        """By path: tables with more rows than those of `source`, whose weights the model starts
        from. ConfigError where the further ones are not made."""
        return {}

    def exchanged(self, source: "StackConfig") -> tuple[set[str], set[str]]:
        """Weights of this model that are drawn anew where it starts from those of `source`, and
        weights of `source` that it leaves: heads, by path."""
        return set(), set()

    @property
    def places(self) -> tuple[int, int] | None:
        """Rows of a table of positions: those that are no patches', and patches', which another
        size of images has more or fewer of; None where there is none."""
        return None

    def placeholder(self, length: int) -> dict[str, Any]:
        """Data of a run of this model that has none yet, in rows of at most `length`."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Modules that predict further tokens."""
        return 0

    @property
    def has_head(self) -> bool:
        """True where it makes more of its last states than these."""
        return True

    @property
    def scores(self) -> bool:
        """True where the head gives a score and no logits."""
        return False

    @property
    def vocabulary(self) -> Dim | None:
        """The dimension of a table and a head that are split over a mesh; None where there are
        none."""
        return None

    @property
    def outputs(self) -> int:
        """Numbers that the head makes of a hidden state."""
        raise NotImplementedError

    @property
    def ids(self) -> int:
        """Ids that a model of tokens knows; of another model, the outputs."""
        return self.vocabulary.size if self.vocabulary else self.outputs

    def outside(self, seq_len: int) -> Iterator[tuple[str, float]]:
        """(component, multiplications by weights a token) of what stands outside of the blocks."""
        raise NotImplementedError

    @property
    def further(self) -> tuple[str, ...]:
        """Names of blocks that are computed beside the layers."""
        return ()

    @property
    def apart(self) -> dict[str, tuple[str, ...]]:
        """Names of blocks that stand outside of prefix and pattern, by the key that names them."""
        return {}

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
        used = {*self.prefix, *(name for names in self.apart.values() for name in names)}
        unused = (name for name in self.blocks if name not in used)
        return self.pattern or (next(unused, next(iter(self.blocks))),)
