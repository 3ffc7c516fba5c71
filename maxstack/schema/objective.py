"""The sections of the objectives."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from maxstack.config import Fault, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from maxstack.schema.data import BYTE_IDS

if TYPE_CHECKING:
    from maxstack.schema.config import Config


class ObjectivePart(Section):
    """The section of a kind of objective."""

    OBJECTIVE: ClassVar[str] = ""
    """module:class that computes it."""
    RANDOM: ClassVar[bool] = False
    """True where a step draws random numbers."""

    def faults(self, cfg: "Config") -> Iterator[Fault]:
        """(key, what is wrong and what to do) of a model or data that it cannot be used with."""
        yield from ()

    def token_ids(self, vocab: int) -> int:
        """Number of ids of a model's table that a tokenizer may give."""
        return vocab


class NextTokenConfig(ObjectivePart):
    """Next-token cross-entropy."""

    OBJECTIVE = "maxstack.objectives.next_token:NextToken"

    kind: Literal["next_token"]
    """The objective."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)."""

    def faults(self, cfg: "Config") -> Iterator[Fault]:
        """A position that sees its target."""
        for name, block in cfg.model.blocks.items():
            if block.mixer.two_sided:
                yield (
                    f"model.blocks.{name}.mixer.causal",
                    "without a causal mask a position sees the token that next_token asks it for; "
                    "use causal: true, or objective.kind=masked_diffusion",
                )


class MaskedDiffusionConfig(ObjectivePart):
    """Masked diffusion (Sahoo et al. 2024, arXiv:2406.07524; Nie et al. 2025, arXiv:2502.09992):
    each token of a row is hidden with the row's probability t, and the hidden ones are predicted
    from both sides. The loss is a bound on the negative log-likelihood."""

    OBJECTIVE = "maxstack.objectives.masked_diffusion:MaskedDiffusion"
    RANDOM = True

    kind: Literal["masked_diffusion"]
    """The objective."""
    mask_token: NonNegativeInt | None = None
    """Id that stands for a hidden token; null: the last row of the model's table. The tokenizer
    must not give it."""
    least: float = Field(1e-3, gt=0, lt=1)
    """Smallest probability t; t is uniform between it and 1, stratified over the rows of a
    batch."""
    shift: bool = False
    """The state of position i predicts the token at i + 1, as an autoregressive model's does (Dream
    2025, arXiv:2508.15487), so that one can be started from."""
    eval_times: PositiveInt = 8
    """Evaluation takes the mean of the bound over so many fixed t, the middles of equal parts."""

    def faults(self, cfg: "Config") -> Iterator[Fault]:
        """A model that does not see both sides, or predicts further tokens."""
        for name, block in cfg.model.blocks.items():
            if not block.mixer.two_sided:
                yield (
                    f"model.blocks.{name}.mixer.causal",
                    "masked_diffusion predicts a hidden token from both sides; "
                    + (
                        f"set model.blocks.{name}.mixer.causal=false"
                        if "causal" in type(block.mixer).model_fields
                        else f"{block.mixer.kind} sees one side alone: use another mixer"
                    ),
                )
        if cfg.model.mtp:
            yield (
                "model.mtp",
                "predicts further tokens, which masked_diffusion has none of; drop it",
            )
        if self.mask_token is not None and any(
            self.mask_token < BYTE_IDS for data in cfg.data_sections.values() if data.cut_into_bytes
        ):
            yield (
                "objective.mask_token",
                f"mask_token={self.mask_token} is an id that data.tokenizer kind bytes gives; use "
                f"{BYTE_IDS} or more, or null: the last row of the model's table",
            )
        if self.mask_token is not None and self.mask_token >= cfg.model.vocab:
            yield (
                "objective.mask_token",
                f"mask_token={self.mask_token} is no row of model.vocab={cfg.model.vocab}; use "
                f"{cfg.model.vocab - 1} or less",
            )

    def token_ids(self, vocab: int) -> int:
        """All but the mask token, where that is the last."""
        return vocab - 1 if self.mask_token in (None, vocab - 1) else vocab


Objective = Annotated[NextTokenConfig | MaskedDiffusionConfig, Field(discriminator="kind")]
