"""Declarations of the parts of a layer. The layer is built from them, and mesh rules, FLOPs, memory
estimates and remat follow from them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

from maxstack.config import Section
from maxstack.config.own_kinds import Kind

Use = Literal["matmul", "experts", "rows", "head"]
"""matmul: `project` multiplies by it. experts: a grouped matmul does. rows: `lookup` takes rows of
it. head: the loss multiplies by it."""


class Dim(NamedTuple):
    """One dimension of a weight or of an activation."""

    axis: str
    """Logical axis; "" for none."""
    size: int
    key: str = ""
    """Key that sets the size: relative to the section that declares it, or from the root where it
    begins with `model.`; "" for none."""


Dims = tuple[Dim, ...]


class Count(NamedTuple):
    """Training FLOPs per token, forward and backward. `causal` counts the keys that a query sees on
    average, `full` the whole sequence."""

    causal: float
    full: float


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a layer."""

    dims: Dims
    use: Use | None = None
    """Operation that multiplies by it, if it may do so in another type than the compute dtype."""
    contract: int = 1
    """Leading dimensions that a matmul contracts."""
    std: float = 0.0
    """Standard deviation of the initial values, truncated at three of it."""
    scaled: Literal["", "in", "out"] = ""
    """in: `std` is multiplied by model.init_scale; out: and divided by sqrt(2 layers)."""
    fill: float = 0.0
    """Initial value where `std` is 0."""
    carried: bool = False
    """Updated by a rule of the model instead of the optimizer; float32."""
    rows: float = 0.0
    """Number of its rows that a token multiplies; of experts, in all of them together."""
    component: str = ""
    """Component that its FLOPs belong to; "": that of the section."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim.size for dim in self.dims)

    @property
    def axes(self) -> str:
        """Logical axes, separated by spaces."""
        return " ".join(dim.axis for dim in self.dims)

    @property
    def products(self) -> float:
        """Multiplications per token, forward."""
        each = self.shape[1:] if self.use == "experts" else self.shape
        return self.rows * math.prod(each)

    @property
    def outputs(self) -> float:
        """Outputs per token."""
        contracted = self.contract + 1 if self.use == "experts" else self.contract
        return self.rows * math.prod(self.shape[contracted:])


def matrix(*dims: Dim, contract: int = 1, out: bool = False) -> Weight:
    """A weight that `project` multiplies by, contracting its first dimensions. Its standard
    deviation is 1 / sqrt(fan in); `out` marks the last one before the residual stream."""
    fan_in = math.prod(dim.size for dim in dims[:contract])
    return Weight(dims, "matmul", contract, fan_in**-0.5, scaled="out" if out else "in", rows=1.0)


def vector(*dims: Dim, fill: float = 0.0) -> Weight:
    """A weight that is added or multiplied elementwise."""
    return Weight(dims, fill=fill)


@dataclasses.dataclass(frozen=True)
class Inner:
    """A layer inside a layer."""

    section: "Part"
    width: Dim
    """Dimension of its input."""
    key: str = ""
    """Key of its section, relative to the one around it; "" for none."""
    component: str = ""
    """Component that its FLOPs belong to; "": its own."""


class Cached(NamedTuple):
    """An array that inference caches, because later tokens read it."""

    dims: Dims
    per_request: bool = False
    """Kept once per request; else once per token."""
    dtype: str = ""
    """"": that of the activations."""


Parts = Mapping[str, Weight | Inner | None]
"""Parts by attribute of the layer; None for a part that this configuration leaves out."""


class Part(Kind, Section):
    """The section of a kind of layer: declares its weights, activations and FLOPs."""

    PLACES = ("LAYER",)
    LAYER: ClassVar[str] = ""
    """module:class that is built from it."""
    COMPONENT: ClassVar[str] = ""
    """Component that the FLOPs of its weights belong to, in MFU and plan."""

    def parts(self, width: Dim) -> Parts:
        """Weights and inner layers by name; `width` is the dimension of the input."""
        raise NotImplementedError

    def saved(self) -> Mapping[str, Dims]:
        """Tensors that a remat policy may keep, by checkpoint name: dimensions beside batch and
        time, without those of the size of the residual stream."""
        return {}

    def attended(self, seq_len: int) -> dict[str, Count]:
        """FLOPs beside those of weights, by component, in sequences of `seq_len`."""
        return {}


class ModelPart(Kind, Section):
    """The section of a kind of model."""

    PLACES = ("MODEL",)
    MODEL: ClassVar[str] = ""
    """module:class that is built from it."""


class Layer(NamedTuple):
    """A layer, or one inside it."""

    section: Part
    width: Dim
    key: str
    """Key of the section, from the root; inherited where it has none of its own."""
    path: str
    """Path of its weights below the outermost layer: "" or as in `shared/`."""
    component: str

    def whole(self, dims: Dims) -> Dims:
        """Dimensions of the layer with keys from the root."""
        return tuple(
            dim._replace(key=f"{self.key}.{dim.key}")
            if dim.key and not dim.key.startswith("model.")
            else dim
            for dim in dims
        )


def layers(
    section: Part, width: Dim, key: str = "", path: str = "", component: str = ""
) -> Iterator[Layer]:
    """A layer and all those inside it."""
    yield Layer(section, width, key, path, component or section.COMPONENT)
    for name, part in section.parts(width).items():
        if isinstance(part, Inner):
            inner = f"{key}.{part.key}" if part.key else key
            yield from layers(part.section, part.width, inner, f"{path}{name}/", part.component)


def weights(section: Part, width: Dim) -> Iterator[tuple[str, Weight, str]]:
    """(path, weight, component of its FLOPs) for every weight of a layer and of those inside it."""
    for layer in layers(section, width):
        for name, part in layer.section.parts(layer.width).items():
            if isinstance(part, Weight):
                yield f"{layer.path}{name}", part, part.component or layer.component


def activations(section: Part, width: Dim) -> Iterator[tuple[str, Dims]]:
    """(checkpoint name, dimensions beside batch and time) of every tensor that a remat policy may
    keep, of a layer and of those inside it."""
    for layer in layers(section, width):
        yield from layer.section.saved().items()
