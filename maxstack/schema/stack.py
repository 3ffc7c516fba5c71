"""What kinds of models have in common: blocks in a repeated pattern, their types, recomputation."""

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
    """The mixer, the part of the block that combines positions, such as attention."""
    mlp: MLPKind
    """The MLP, the part of the block that transforms each position by itself."""
    norm: NormConfig = NormConfig()
    """Norm of both parts."""
    mlp_norm: NormConfig | None = None
    """Norm before the MLP; null: as `norm`."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Where norms are. pre: before each part; post: after it (OLMo 2); sandwich: both (Gemma 2).
    The residual stream itself is never normalised."""
    out_scalar: bool = False
    """Learn a scalar that multiplies the block's output (Gemma 4)."""
    layer_scale: PositiveFloat | None = None
    """Initial value of learned factors per channel on what each part adds (CaiT, Touvron et al.
    2021, arXiv:2103.17239); null: none."""

    modulation: Literal["shared", "own"] | None = None
    """Shift and scale the norms, and scale what is added, depending on a time and a class
    (adaLN-zero, of model.kind=dit). shared: one vector of the model for all blocks; own: each block
    makes its own, as diffusers stores it; null: none."""

    @property
    def experts(self) -> MoEConfig | None:
        """The mixture of experts in the block."""
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
    """Costs of a remat policy: numbers kept for the backward pass, and recomputation."""

    recomputed: float
    """Fraction of the forward pass."""
    outputs: float
    """Numbers kept, as a multiple of those that matmuls give."""
    stream: float
    """Numbers kept, as a multiple of the size of the residual stream."""
    context: bool
    """Whether the output of attention is kept."""
    searched: bool = False
    """Whether `plan --search` tries it."""


REMAT = {
    "none": RematPolicy(0.0, 2.1, 4.0, context=True, searched=True),
    "dots": RematPolicy(0.0, 1.0, 1.0, context=True, searched=True),
    "full": RematPolicy(1.0, 0.0, 1.0, context=False, searched=True),
    "dots_no_batch": RematPolicy(0.05, 1.0, 1.0, context=False),
    "save": RematPolicy(0.2, 0.0, 1.0, context=False),
    "offload": RematPolicy(0.3, 0.0, 1.0, context=False),
}
"""Costs by model.remat.policy; save and offload also keep the tensors in model.remat.names."""


class RematConfig(Section):
    """Recomputation in the backward pass to save memory."""

    policy: Remat = "none"
    """none: keep everything; full: keep only a block's input; dots: keep matmul outputs;
    dots_no_batch: keep matmul outputs without a batch dimension (no attention scores); save: keep
    the tensors in `names`; offload: move the tensors in `names` to host memory."""
    names: Items[str] = ()
    """Tensors of a block that save and offload keep: input, mixer_out, mlp_out, and those of its
    mixer and MLP (query, key, value, context; mlp_gate, mlp_up). The input stays on the device,
    unless offload names it."""

    def own_faults(self) -> Iterator[Fault]:
        if bool(self.names) != (self.policy in ("save", "offload")):
            yield (
                "names",
                f"names={list(self.names)} with policy={self.policy}: save and offload "
                "need names, the others take none",
            )

    def keeps(self, name: str) -> bool:
        """Whether a tensor of a block, `input` or `context`, is kept for the backward pass."""
        return name in self.names or name == "input" or REMAT[self.policy].context

    def offloads(self, name: str) -> bool:
        """Whether a tensor of a block moves to host memory."""
        return self.policy == "offload" and name in self.names


class NewRows(NamedTuple):
    """Rows to add to a table."""

    dim: int
    """The table's dimension of rows."""
    before: int
    """Number of rows before."""
    like: Literal["mean"] | int
    """Value of a new row: the mean of the old ones, or a copy of the row with this number."""

    def shape_before(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the table before."""
        return *shape[: self.dim], self.before, *shape[self.dim + 1 :]


class StackConfig(ModelPart):
    """Keys shared by models with a repeated pattern of blocks."""

    OBJECTIVE: ClassVar[str] = ""
    """The usual objective.kind."""

    kind: str

    embed: SizeInt
    """Dimension of the residual stream."""
    layers: CountInt
    """Number of blocks."""
    blocks: dict[str, BlockConfig] = Field(min_length=1)
    """Block specs by name; a spec may say `like: other` and give only what differs."""
    pattern: Items[str] = ()
    """Names of blocks, repeated until all layers are filled; complete repetitions run in a scan.
    Empty: the only block."""
    prefix: Items[str] = ()
    """Names of blocks that come before the pattern, outside the scan."""
    norm: NormConfig = NormConfig()
    """Final norm, before the head."""
    weights: str | None = None
    """Weights that a new run starts from: a Hugging Face folder, at a path or URL, a .gguf file, or
    a model on the Hugging Face Hub at a commit (Org/Name@COMMIT); set by `from:`. null: random
    weights."""
    init_scale: PositiveFloat = 1.0
    """Factor by which the standard deviation of every initial matrix is multiplied. At 1 it is
    1/sqrt(fan in), divided by sqrt(2 layers) for residual outputs."""
    dtype: Dtype = "bfloat16"
    """Type of activations and matmuls; softmax, norms and the loss are always float32."""
    param_dtype: Dtype = "float32"
    """Type of the weights that the optimizer updates. The optimizer computes in float32, and keeps
    its state in float32 unless a transform says otherwise."""
    remat: RematConfig = RematConfig()
    """Recomputation in the backward pass."""
    unroll: CountInt = 1
    """Periods of the pattern per iteration of the scan: more compile time, less copying."""

    def own_faults(self) -> Iterator[Fault]:
        named = {"pattern": self.pattern, "prefix": self.prefix} | self.extra_blocks
        apart = {name for names in self.extra_blocks.values() for name in names}
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
                    f"share_kv={quoted(shared)} is not a block of the prefix "
                    f"({listed([*self.prefix]) or 'empty'}); keys and values are kept of layers in "
                    "the prefix alone",
                )

    @property
    def tokens(self) -> int | None:
        """Tokens per row, where the model's own sizes determine it; None: the data decides."""
        return None

    @property
    def as_exported(self) -> Self:
        """The model without the parts that transformers cannot hold."""
        return self

    def extended_tables(self, source: "StackConfig") -> "dict[str, NewRows]":
        """Tables with more rows than in `source`, whose weights the model starts from, by path.
        ConfigError where the new rows cannot be made."""
        return {}

    def head_changes(self, source: "StackConfig") -> tuple[set[str], set[str]]:
        """Heads, by path: those of this model that are initialized anew where it starts from the
        weights of `source`, and those of `source` that it drops."""
        return set(), set()

    @property
    def position_rows(self) -> tuple[int, int] | None:
        """Rows of a position table: those of no patch, and those of patches, which change with the
        image size; None where there is no table."""
        return None

    def placeholder(self, length: int) -> dict[str, Any]:
        """Data for a run of this model that has none yet, in rows of at most `length`."""
        raise NotImplementedError

    @property
    def mtp_depth(self) -> int:
        """Number of modules that predict further tokens."""
        return 0

    @property
    def has_head(self) -> bool:
        """Whether the model ends with a head."""
        return True

    @property
    def scores(self) -> bool:
        """Whether the head gives a score instead of logits."""
        return False

    @property
    def vocabulary(self) -> Dim | None:
        """The vocabulary dimension, which a mesh may split; None where there is none."""
        return None

    @property
    def outputs(self) -> int:
        """Outputs of the head per hidden state."""
        raise NotImplementedError

    @property
    def ids(self) -> int:
        """Number of token ids; for other models, the outputs."""
        return self.vocabulary.size if self.vocabulary else self.outputs

    def products_outside_blocks(self, seq_len: int) -> Iterator[tuple[str, float]]:
        """(component, multiplications by weights per token) of what lies outside the blocks."""
        raise NotImplementedError

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        """Names of blocks that are computed beside the layers."""
        return ()

    @property
    def extra_blocks(self) -> dict[str, tuple[str, ...]]:
        """Names of blocks outside of prefix and pattern, by the key that names them."""
        return {}

    @property
    def order(self) -> tuple[str, ...]:
        """The block name of every layer, in order."""
        rest = self.layers - len(self.prefix)
        return self.prefix + tuple(self.period[i % len(self.period)] for i in range(rest))

    @property
    def repetitions(self) -> int:
        """Number of whole repetitions of the pattern."""
        return (self.layers - len(self.prefix)) // len(self.period)

    @property
    def stacks(self) -> dict[str, str]:
        """A unique key for each place in the pattern -> its block's name: the name itself, numbered
        where it repeats."""
        names = self.period
        return {
            name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}": name
            for i, name in enumerate(names)
        }

    @property
    def period(self) -> tuple[str, ...]:
        """The pattern; where none is given, the first block without another use."""
        used = {*self.prefix, *(name for names in self.extra_blocks.values() for name in names)}
        unused = (name for name in self.blocks if name not in used)
        return self.pattern or (next(unused, next(iter(self.blocks))),)
