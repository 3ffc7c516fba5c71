"""The configuration of MLPs and mixtures of experts, apart from their code so that it is checked
before jax is imported."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Optional, Self

from maxstack.config import (
    CountInt,
    Fault,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    SizeInt,
)
from maxstack.config.own_kinds import Open
from maxstack.schema import kernels as names
from maxstack.schema.mixers import NormConfig
from maxstack.schema.parts import Dim, Dims, Inner, Part, Parts, Weight, matrix, vector

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class MLPPart(Part):
    """The section of a kind of MLP."""

    COMPONENT = "mlp"

    @property
    def mixture(self) -> Optional["MoEConfig"]:
        """The mixture of experts that it is or holds."""
        return None

    def dropless(self) -> Self:
        """The same section without expert capacity."""
        return self


class GatedMLPConfig(MLPPart):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    LAYER = "maxstack.layers.mlp:GatedMLP"

    kind: Literal["gated"]
    """Selects this MLP."""
    hidden: SizeInt
    """Dimension of the hidden layer."""
    activation: Activation = "silu"
    """Activation of the gate."""
    bias: bool = False
    """Add biases to all three projections."""

    def parts(self, width: Dim) -> Parts:
        """Three projections and their biases."""
        hidden = Dim("mlp", self.hidden, "hidden")
        return {
            "gate": matrix(width, hidden),
            "up": matrix(width, hidden),
            "down": matrix(hidden, width, out=True),
            "gate_bias": vector(hidden) if self.bias else None,
            "up_bias": vector(hidden) if self.bias else None,
            "down_bias": vector(width._replace(axis="norm")) if self.bias else None,
        }

    def saved(self) -> dict[str, Dims]:
        hidden = (Dim("mlp", self.hidden, "hidden"),)
        return {"mlp_gate": hidden, "mlp_up": hidden}


class DenseMLPConfig(MLPPart):
    """MLP with one hidden layer."""

    LAYER = "maxstack.layers.mlp:DenseMLP"

    kind: Literal["dense"]
    """Selects this MLP."""
    hidden: SizeInt
    """Dimension of the hidden layer."""
    activation: Activation = "gelu_tanh"
    """Activation of the hidden layer."""
    bias: bool = False
    """Add biases to both projections."""

    def parts(self, width: Dim) -> Parts:
        """Two projections and their biases."""
        hidden = Dim("mlp", self.hidden, "hidden")
        return {
            "up": matrix(width, hidden),
            "down": matrix(hidden, width, out=True),
            "up_bias": vector(hidden) if self.bias else None,
            "down_bias": vector(width._replace(axis="norm")) if self.bias else None,
        }

    def saved(self) -> dict[str, Dims]:
        return {"mlp_up": (Dim("mlp", self.hidden, "hidden"),)}


class RouterConfig(Section):
    """How a token's experts and their weights are chosen, computed in float32."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function applied to the router's logits: softmax over all experts, or sigmoid of each."""
    normalize: bool = True
    """Divide the weights of the chosen experts by their sum. (A softmax over the chosen logits only
    is this with score: softmax.)"""
    scale: PositiveFloat = 1.0
    """Factor by which the weights of the chosen experts are multiplied."""
    bias: bool = False
    """Learn a bias on the logits."""
    selection_bias: bool = False
    """Add a bias that is used only to choose experts, and that follows their load instead of a
    gradient (Wang et al. 2024, arXiv:2408.15664)."""
    groups: CountInt | None = None
    """Number of expert groups, of which the best top_groups are eligible; null: all experts are."""
    top_groups: CountInt | None = None
    """Number of groups to choose experts from."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert, or the sum of its two best."""
    scale_input: bool = False
    """Multiply an expert's input by its weight instead of its output (Llama 4)."""
    normed: bool = False
    """Route by the residual stream, normalised and scaled by a learned factor per channel and by 1
    / sqrt(embed), and scale the weight of each expert by a learned factor (Gemma 4)."""
    norm_eps: PositiveFloat = 1e-6
    """With `normed`, small number added to the mean square of the router's input."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of each row: experts * sum(fraction of tokens * mean score)
    (Fedus 2021, arXiv:2101.03961, eq. 4)."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-partition of the logits (Zoph 2022, arXiv:2202.08906)."""
    bias_update: NonNegativeFloat = 0.0
    """Step size of updates to the selection bias; 0: fixed."""


class SharedExpertConfig(Section):
    """An expert that every token goes to."""

    hidden: SizeInt
    """Dimension of its hidden layer."""
    gate: bool = False
    """Multiply its output by the sigmoid of a learned projection of the token (Qwen)."""

    def mlp(self, activation: Activation) -> GatedMLPConfig:
        """The layer, with the activation of the experts beside it."""
        return GatedMLPConfig(kind="gated", hidden=self.hidden, activation=activation)


class MoEConfig(MLPPart):
    """Mixture of gated experts."""

    LAYER = "maxstack.layers.moe:MoE"
    COMPONENT = "experts"

    kind: Literal["moe"]
    """Selects this MLP."""
    experts: CountInt
    """Number of experts."""
    top_k: CountInt
    """Experts per token."""
    hidden: SizeInt
    """Dimension of an expert's hidden layer."""
    activation: Activation = "silu"
    """Activation of the gate."""
    clamp: PositiveFloat | None = None
    """gpt-oss's activation: clamp gate and up at this value, multiply the gate by sigmoid(1.702
    gate), and add 1 to up; null: a plain gated MLP."""
    bias: bool = False
    """Add biases to the experts' projections."""
    router: RouterConfig = RouterConfig()
    """How experts are chosen for each token."""
    capacity: PositiveFloat | None = None
    """Capacity factor: an expert takes at most this many times its even share (seq_len * top_k /
    experts) of a row's tokens, the earliest first, and the others skip it (Lepikhin et al. 2020,
    arXiv:2006.16668); null: dropless."""
    slack: PositiveFloat = 1.25
    """Without `capacity`, if experts are sharded over the mesh axis expert: number of rows that a
    device sends to another one in the first round, as a multiple of an even share; the rest follows
    in rounds a quarter as large, as many as needed. Affects speed and memory, not results."""
    shared: SharedExpertConfig | None = None
    """Shared expert, used in addition to the chosen ones; null: none."""
    backend: names.GroupedMatmul = "auto"
    """Kernel of the experts' matmuls; auto: the first one that supports the case."""

    @property
    def mixture(self) -> "MoEConfig":
        return self

    def dropless(self) -> Self:
        return self.model_copy(update={"capacity": None})

    def parts(self, width: Dim) -> Parts:
        """The router, the matrices of all experts, their biases, and the shared expert."""
        expert = Dim("expert", self.experts, "experts")
        hidden, scores = Dim("mlp", self.hidden, "hidden"), Dim("norm", self.experts)
        channel, router = width._replace(axis="norm"), self.router

        def experts(first: Dim, last: Dim, scaled: Literal["in", "out"]) -> Weight:
            dims = (expert, first, last)
            return Weight(dims, "experts", 1, first.size**-0.5, scaled, rows=self.top_k)

        def bias(*dims: Dim) -> Weight | None:
            return vector(*dims) if self.bias else None

        shared, std = self.shared, width.size**-0.5
        return {
            "router": Weight((width, scores), std=std, scaled="in", rows=1.0),
            "router_bias": vector(scores) if router.bias else None,
            "selection_bias": Weight((scores,), carried=True) if router.selection_bias else None,
            "router_scale": vector(channel, fill=1.0) if router.normed else None,
            "expert_scale": vector(scores, fill=1.0) if router.normed else None,
            "gate": experts(width, hidden, "in"),
            "up": experts(width, hidden, "in"),
            "down": experts(hidden, width, "out"),
            "gate_bias": bias(expert, hidden),
            "up_bias": bias(expert, hidden),
            "down_bias": bias(expert, channel),
            "shared": Inner(shared.mlp(self.activation), width, "shared", "shared experts")
            if shared
            else None,
            "shared_gate": Weight(
                (channel,), std=std, scaled="in", rows=1.0, component="shared experts"
            )
            if shared and shared.gate
            else None,
        }

    def saved(self) -> dict[str, Dims]:
        hidden = (Dim("", self.top_k), Dim("mlp", self.hidden, "hidden"))
        return {"mlp_gate": hidden, "mlp_up": hidden}

    def own_faults(self) -> Iterator[Fault]:
        groups, chosen = self.router.groups or 1, self.router.top_groups or self.router.groups or 1
        if self.experts % groups:
            yield "router.groups", f"groups={groups} does not divide experts={self.experts}"
        if chosen > groups:
            yield "router.top_groups", f"top_groups={chosen} of groups={groups}"
        if self.top_k > self.experts // groups * chosen:
            yield (
                "top_k",
                f"top_k={self.top_k} of {self.experts // groups * chosen} experts that "
                f"can be chosen (experts={self.experts}"
                f"{f', {chosen} of {groups} groups' if self.router.groups else ''})",
            )

    def limit(self, length: int) -> int | None:
        """Tokens of a row of `length` that an expert takes; None: all."""
        if self.capacity is None:
            return None
        return math.ceil(round(self.capacity * length * self.top_k / self.experts, 6))


class ParallelMLPConfig(MLPPart):
    """A gated MLP and a mixture of experts side by side, each with its own norms (Gemma 4)."""

    LAYER = "maxstack.layers.moe:ParallelMLP"

    kind: Literal["parallel"]
    """Selects this MLP."""
    dense: GatedMLPConfig
    """Dense MLP, on the block's normalised input; its output is normalised too."""
    moe: MoEConfig
    """Experts, on the residual stream with a norm of its own; their output is normalised too."""
    norm: NormConfig = NormConfig()
    """Norm of the MLP's output, and of the experts' input and output."""

    @property
    def mixture(self) -> MoEConfig:
        return self.moe

    def dropless(self) -> Self:
        return self.model_copy(update={"moe": self.moe.dropless()})

    def parts(self, width: Dim) -> Parts:
        """Both, and the norms around them."""
        return {
            "dense": Inner(self.dense, width, "dense"),
            "moe": Inner(self.moe, width, "moe"),
            "dense_norm": Inner(self.norm, width),
            "moe_in_norm": Inner(self.norm, width),
            "moe_norm": Inner(self.norm, width),
        }


MLPKind = Annotated[GatedMLPConfig | DenseMLPConfig | MoEConfig | ParallelMLPConfig, Open(MLPPart)]
