"""The configuration of MLPs and mixtures of experts, apart from their code so that it is checked
before jax is imported."""

import math
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from maxstack.config import Section, fault
from maxstack.schema import kernels as names
from maxstack.schema.mixers import NormConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class GatedMLPConfig(Section):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["gated"]
    """The feed-forward part of a block."""
    hidden: int = Field(ge=1)
    """Size of the hidden layer."""
    activation: Activation = "silu"
    """Applied to the gate."""
    bias: bool = False
    """Biases on all three projections."""


class DenseMLPConfig(Section):
    """MLP of one hidden layer."""

    kind: Literal["dense"]
    """The feed-forward part of a block."""
    hidden: int = Field(ge=1)
    """Size of the hidden layer."""
    activation: Activation = "gelu_tanh"
    """Of the hidden layer."""
    bias: bool = False
    """Biases on both projections."""


class RouterConfig(Section):
    """Which experts a token goes to, and with what weights; computed in float32."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits: over all experts, or each alone."""
    normalize: bool = True
    """Divide the weights of the chosen experts by their sum. (The softmax over chosen logits alone
    is this with score softmax.)"""
    scale: float = Field(1.0, gt=0)
    """Multiplies the weights of the chosen."""
    bias: bool = False
    """A learned bias on the logits."""
    selection_bias: bool = False
    """A bias that counts in choosing alone and follows the experts' load, not a gradient (Wang et
    al. 2024, arXiv:2408.15664)."""
    groups: int | None = Field(None, ge=1)
    """Experts are chosen from the best top_groups of this many groups; null: from all."""
    top_groups: int | None = Field(None, ge=1)
    """How many groups."""
    group_score: Literal["max", "top2"] = "top2"
    """A group is as good as its best expert, or as the sum of its two best."""
    scale_input: bool = False
    """Multiply an expert's input by its weight instead of its output (Llama 4)."""
    normed: bool = False
    """The router reads the residual stream, normalised and scaled per channel and by 1 /
    sqrt(embed); each expert's weight is scaled (Gemma 4)."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square where the router's input is normed."""
    balance_loss: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of each row: experts * sum(share of tokens * mean score)
    (Fedus 2021, arXiv:2101.03961, eq. 4)."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-partition of the logits (Zoph 2022, arXiv:2202.08906)."""
    bias_update: float = Field(0.0, ge=0)
    """Step of the selection bias towards balance; 0: it stays."""


class SharedExpertConfig(Section):
    """An expert that every token goes to."""

    hidden: int = Field(ge=1)
    """Size of its hidden layer."""
    gate: bool = False
    """Multiply its output by a sigmoid of a learned projection of the token (Qwen)."""


class MoEConfig(Section):
    """Mixture of gated experts."""

    kind: Literal["moe"]
    """The feed-forward part of a block."""
    experts: int = Field(ge=1)
    """How many."""
    top_k: int = Field(ge=1)
    """Experts a token."""
    hidden: int = Field(ge=1)
    """Size of an expert's hidden layer."""
    activation: Activation = "silu"
    """Applied to the gate."""
    clamp: float | None = Field(None, gt=0)
    """gpt-oss: gate and up are cut at this, the gate's sigmoid is of 1.702 times it, and 1 is added
    to up; null: a plain gated MLP."""
    bias: bool = False
    """Biases on the experts' projections."""
    router: RouterConfig = RouterConfig()
    """Who goes where."""
    capacity: float | None = Field(None, gt=0)
    """An expert takes at most this many times its even share (seq_len * top_k / experts) of the
    tokens of a row, the earliest first, and the others do without it (Lepikhin et al. 2020,
    arXiv:2006.16668); null: every token reaches its experts."""
    slack: float = Field(1.25, gt=0)
    """Without a capacity, over the mesh axis expert: rows that a device first sends to another, as
    a multiple of an even share; what does not fit follows in rounds a quarter as large, as many as
    it needs. Speed and memory hang on it, results do not."""
    shared: SharedExpertConfig | None = None
    """Beside the chosen experts; null: none."""
    backend: names.GroupedMatmul = "auto"
    """The kernel of the experts' matmuls; auto: the first that can serve."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "MoEConfig":
        groups, chosen = self.router.groups or 1, self.router.top_groups or self.router.groups or 1
        if self.experts % groups:
            raise fault("router.groups", f"groups={groups} does not divide experts={self.experts}")
        if chosen > groups:
            raise fault("router.top_groups", f"top_groups={chosen} of groups={groups}")
        if self.top_k > self.experts // groups * chosen:
            raise fault(
                "top_k",
                f"top_k={self.top_k} of {self.experts // groups * chosen} experts that "
                f"can be chosen (experts={self.experts}"
                f"{f', {chosen} of {groups} groups' if self.router.groups else ''})",
            )
        return self

    def limit(self, length: int) -> int | None:
        """How many tokens of a row of `length` an expert takes; None: all."""
        return (
            None
            if self.capacity is None
            else math.ceil(round(self.capacity * length * self.top_k / self.experts, 6))
        )


class ParallelMLPConfig(Section):
    """A gated MLP and a mixture of experts side by side, each with its own norms (Gemma 4)."""

    kind: Literal["parallel"]
    """The feed-forward part of a block."""
    dense: GatedMLPConfig
    """Reads the block's normed input; its output is normed."""
    moe: MoEConfig
    """Reads the residual stream through a norm of its own; its output is normed."""
    norm: NormConfig = NormConfig()
    """Of all three."""


MLPKind = Annotated[
    GatedMLPConfig | DenseMLPConfig | MoEConfig | ParallelMLPConfig, Field(discriminator="kind")
]
