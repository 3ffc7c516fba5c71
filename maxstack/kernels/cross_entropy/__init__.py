"""Cross-entropy of a linear head without its logits in memory, by several backends, and
`cross_entropy` of logits.

A token's loss is weighted by a number that is known before, so the sum of weighted losses fixes all
gradients but for a factor, and they can be made in the forward pass, while a block's logits are
there (the trick of Liger-Kernel, Hsu et al. 2024, arXiv:2410.10989): no logits are kept, and none
are made twice. The backward pass multiplies the waiting gradients by the cotangent of the total
(differentiable.py). Only `Losses.total` is differentiable. layout.py splits the call over a mesh,
row_blocks.py loops over blocks of rows, softmax.py handles slices of the vocabulary.

Shapes: B batch  T time  D embed  V vocab.
"""

import jax

from maxstack import sharding
from maxstack.kernels.backends import Backend, Device, Op
from maxstack.kernels.cross_entropy.layout import Layout
from maxstack.kernels.cross_entropy.request import CrossEntropyCase, Losses, Request
from maxstack.kernels.cross_entropy.softmax import cross_entropy

__all__ = [
    "OP",
    "CrossEntropyCase",
    "Losses",
    "Request",
    "cross_entropy",
    "linear_cross_entropy",
]
OP = Op(
    "linear_cross_entropy",
    (
        Backend("pallas_tpu", f"{__name__}.pallas_tpu", ("tpu",)),
        Backend("blockwise", f"{__name__}.blockwise"),
        Backend("reference", f"{__name__}.reference"),
    ),
)


def linear_cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    request: Request,
    backend: str = "auto",
    bias_V: jax.Array | None = None,
    kept: str = "embed vocab",
) -> Losses:
    """Losses, in nats and float32, of tokens whose logits are x head + bias, and their sum weighted
    by `weights_BT`.

    The head is multiplied in x's dtype, accumulated in float32. `total` is differentiable by x,
    head and bias; nll and log_z [B, T] are not, and targets and weights have no gradient. `kept`
    names the logical axes of the head's weight on a mesh: "vocab embed" for a tied embedding,
    passed here transposed. ConfigError if the requested backend cannot serve.
    """
    vocab, embed = head_DV.shape[1], x_BTD.shape[2]
    layout = Layout.of(x_BTD.shape, vocab, kept) if sharding.current() else None
    rows = sharding.size_of(*layout.rows) if layout else 1
    columns = sharding.size_of(*layout.vocab) if layout else 1
    # Sizes of one device, which are what its kernel is chosen by.
    case = CrossEntropyCase(
        request,
        targets_BT.size // rows,
        embed,
        vocab // columns,
        x_BTD.dtype.name,
        bias_V is not None,
        columns > 1,
        Device.here(),
    )
    choice = OP.choose(case, backend)
    arrays = x_BTD, targets_BT, weights_BT
    # On a mesh rows stay [B, T], since those two dimensions may be split over different axes.
    if not layout:
        arrays = x_BTD.reshape(-1, embed), targets_BT.reshape(-1), weights_BT.reshape(-1)
    x, targets, weights = arrays
    with jax.named_scope("cross_entropy"):
        total, *per_token = OP[choice.backend].run(
            x, head_DV, targets, weights, request, bias_V, choice.blocks, layout=layout
        )
    return Losses(total, *(x.reshape(targets_BT.shape) for x in per_token))
