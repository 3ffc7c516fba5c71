"""Base class of layers: a layer is built from the parts that its configuration declares."""

import pkgutil
from typing import TYPE_CHECKING, Any

from flax import nnx

from maxstack.layers.weight import weight
from maxstack.schema.parts import Dim, Part, Weight


class Layer(nnx.Module):
    """Layer with an attribute for each part that `cfg` declares: placeholders of weights, inner
    layers, None for what this configuration leaves out."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        cfg: Part,
        width: Dim | int,
        *,
        std: float = 1.0,
        out_std: float = 1.0,
        dtype: str,
    ):
        """`width` is the size of the input; `std` and `out_std` scale the initial values of weights
        inside the layer and of those that write into the residual stream."""
        self.cfg = cfg
        width = Dim("embed", width) if isinstance(width, int) else width
        scales = {"": 1.0, "in": std, "out": out_std}
        for name, part in cfg.parts(width).items():
            if part is None:
                setattr(self, name, None)
            elif isinstance(part, Weight):
                param = weight(
                    part.shape,
                    part.axes,
                    # A rule of the step's own moves these by small
                    # amounts, which bfloat16 would round away.
                    dtype="float32" if part.carried else dtype,
                    std=part.std * scales[part.scaled],
                    fill=part.fill,
                    carried=part.carried,
                    use=part.use,
                    contract=part.contract,
                )
                setattr(self, name, param)
            else:
                inner = layer_of(part.section)
                built = inner(part.section, part.width, std=std, out_std=out_std, dtype=dtype)
                setattr(self, name, built)


def layer_of(section: Part) -> type[Layer]:
    """The class of the layer that a section configures."""
    layer: type[Layer] = pkgutil.resolve_name(section.LAYER)
    return layer
