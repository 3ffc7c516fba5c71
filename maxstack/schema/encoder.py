"""The configuration of the encoder: patches of an image, blocks that attend to all of them, a
class."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    NonNegativeInt,
    Section,
    SizeInt,
)
from maxstack.schema.image_stack import ImageStackConfig
from maxstack.schema.mixers import NormConfig
from maxstack.schema.mlps import DenseMLPConfig
from maxstack.schema.parts import Dim, Inner, Part, Parts, matrix, vector
from maxstack.schema.stack import StackConfig


class TokenPool(Section):
    """The class token, the mean over the patches, or both concatenated (DINOv2)."""

    kind: Literal["cls", "mean", "cls_mean"]
    """How features are pooled. cls: the class token; mean: the mean over the patches; cls_mean:
    both, concatenated."""


class MapPool(Part):
    """Attention of a learned query over the patches, then an MLP with a residual (multihead
    attention pooling, Zhai et al. 2022, arXiv:2106.04560)."""

    LAYER = "maxstack.layers.pool:MapPool"
    COMPONENT = "pool"

    kind: Literal["map"]
    """Selects this attention pooling."""
    heads: CountInt
    """Number of attention heads."""
    hidden: SizeInt
    """Size of the MLP's hidden layer."""
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    """Activation of the hidden layer."""
    norm: NormConfig = NormConfig(kind="layer", bias=True)
    """Norm before the MLP."""

    def parts(self, width: Dim) -> Parts:
        """The query, four projections with biases, norm and MLP."""
        heads = Dim("heads", self.heads, "heads"), Dim("head_dim", width.size // self.heads)
        mlp = DenseMLPConfig(
            kind="dense", hidden=self.hidden, activation=self.activation, bias=True
        )
        return {
            "probe": vector(width._replace(axis="norm")),
            "query": matrix(width, *heads),
            "key": matrix(width, *heads),
            "value": matrix(width, *heads),
            "out": matrix(*heads, width, contract=2),
            "query_bias": vector(*heads),
            "key_bias": vector(*heads),
            "value_bias": vector(*heads),
            "out_bias": vector(width._replace(axis="norm")),
            "norm": Inner(self.norm, Dim("norm", width.size), "norm"),
            "mlp": Inner(mlp, width),
        }


Pool = Annotated[TokenPool | MapPool, Field(discriminator="kind")]


class EncoderConfig(ImageStackConfig):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

    MODEL = "maxstack.models.encoder:Encoder"
    OBJECTIVE = "classify"
    WHOLE = False

    kind: Literal["encoder"]
    """Selects this architecture."""
    patch: CountInt
    """Height and width of a patch. Where it does not divide image_size, the model ignores the rest
    at the right and lower edge, as SigLIP's So400m/14 does at 384."""
    cls: bool = True
    """Put a learned class token before the patches."""
    registers: NonNegativeInt = 0
    """Number of learned tokens between the class token and the patches (Darcet et al. 2024,
    arXiv:2309.16588)."""
    positions: Literal["learned", "sincos2d", "rope2d"] = "learned"
    """Positions of the patches. learned: a table that is added, with a row for the class token;
    sincos2d: a fixed table; rope2d: blocks with `rope` rotate by row and column, from -1 to 1
    across the image (DINOv3, arXiv:2508.10104)."""
    mask_token: bool = False
    """Keep the mask token that stood for hidden patches in pretraining (DINOv2); it is not used."""
    pool: Pool = TokenPool(kind="cls")
    """How the last hidden states are pooled into the image's features."""
    classes: SizeInt | None = None
    """Number of classes of the classification head; null: no head."""

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return super().tokens + self.before

    @property
    def before(self) -> int:
        """Number of tokens before the patches."""
        return self.cls + self.registers

    @property
    def features(self) -> int:
        """Dimension of an image's features."""
        return self.embed * (2 if self.pool.kind == "cls_mean" else 1)

    def products_outside_blocks(self, seq_len: int) -> Iterator[tuple[str, float]]:
        patches = (seq_len - self.before) / seq_len
        yield "patches", patches * self.patch**2 * self.channels * self.embed
        if isinstance(self.pool, MapPool):  # keys and values of patches; the rest once an image
            yield "pool", 2 * patches * self.embed**2
            yield "pool", (2 * self.embed**2 + 2 * self.embed * self.pool.hidden) / seq_len
        if self.classes:
            yield "head", self.features * self.classes / seq_len

    def head_changes(self, source: StackConfig) -> tuple[set[str], set[str]]:
        if not isinstance(source, EncoderConfig):
            return set(), set()
        if (self.classes, self.features) == (source.classes, source.features):
            return set(), set()
        head = {"head", "head_bias"}
        return head if self.classes else set(), head if source.classes else set()

    @property
    def position_rows(self) -> tuple[int, int] | None:
        patches = (self.image_size // self.patch) ** 2
        return (int(self.cls), patches) if self.positions == "learned" else None

    def placeholder(self, length: int) -> dict[str, Any]:
        return {"sources": [{"kind": "synthetic", "vocab": self.classes or 2}]}

    @property
    def has_head(self) -> bool:
        return self.classes is not None

    @property
    def outputs(self) -> int:
        return self.classes or 1

    def own_faults(self) -> Iterator[Fault]:
        yield from super().own_faults()
        if self.pool.kind in ("cls", "cls_mean") and not self.cls:
            yield "pool", f"kind {self.pool.kind} reads the class token: set cls: true, or use mean"
        if isinstance(self.pool, MapPool) and self.embed % self.pool.heads:
            yield "pool.heads", f"heads={self.pool.heads} does not divide embed={self.embed}"
        if self.positions == "sincos2d" and self.embed % 4:
            yield "embed", f"embed={self.embed} with positions: sincos2d must be a multiple of 4"
        for name, block in self.blocks.items():
            rotates = bool(block.mixer.ropes)
            if rotates != (self.positions == "rope2d"):
                yield (
                    f"blocks.{name}.mixer.rope",
                    "positions: rope2d needs a rope in every block"
                    if not rotates
                    else f"rotates, and positions={self.positions}: set rope: null, or "
                    "positions: rope2d",
                )
