"""The sections of the objectives."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from maxstack.config import Section


class ObjectivePart(Section):
    """The section of a kind of objective."""

    OBJECTIVE: ClassVar[str] = ""
    """module:class that computes it."""


class NextTokenConfig(ObjectivePart):
    """What is minimised."""

    OBJECTIVE: ClassVar[str] = "maxstack.objectives.next_token:NextToken"

    kind: Literal["next_token"]
    """Cross-entropy of the next token."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)."""


class MaskedDiffusionConfig(ObjectivePart):
    """Masked diffusion (Sahoo et al. 2024, arXiv:2406.07524; Nie et al. 2025, arXiv:2502.09992):
    each token of a row is hidden with the row's probability t, and the hidden ones are predicted
    from both sides. The loss is a bound on the negative log-likelihood."""

    OBJECTIVE: ClassVar[str] = "maxstack.objectives.masked_diffusion:MaskedDiffusion"

    kind: Literal["masked_diffusion"]
    """The objective."""
    mask_token: int | None = Field(None, ge=0)
    """Id that stands for a hidden token; null: the last row of the model's table. The tokenizer
    must not give it."""
    least: float = Field(1e-3, gt=0, lt=1)
    """Smallest probability t; t is uniform between it and 1, stratified over the rows of a
    batch."""
    shift: bool = False
    """The state of position i predicts the token at i + 1, as an autoregressive model's does (Dream
    2025, arXiv:2508.15487), so that one can be started from."""
    eval_times: int = Field(8, ge=1)
    """Evaluation takes the mean of the bound over so many fixed t, the middles of equal parts."""


Objective = Annotated[NextTokenConfig | MaskedDiffusionConfig, Field(discriminator="kind")]
