"""What a run minimises."""

from typing import Literal

from pydantic import Field

from maxstack.config import (
    Section,
)


class ObjectiveConfig(Section):
    """What is minimised."""

    kind: Literal["next_token"] = "next_token"
    """Cross-entropy of the next token."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)."""
