"""The section of policy gradients."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from maxstack.config import Fault, NonNegativeFloat, PositiveFloat, Section
from maxstack.schema.objective import ReferenceConfig, RowField, unread_keys

FORMS = {"clip": "low high dual", "cispo": "cap", "sapo": "tau_positive tau_negative"}
"""Forms of the loss of a token, with the keys that each reads; their functions are in
objectives/policy_gradient.py."""


class SurrogateConfig(Section):
    """Loss of a token with advantage A and probability ratio r to the old policy. sg is the
    stop-gradient, S the sigmoid."""

    form: Literal["clip", "cispo", "sapo"] = "clip"
    """clip: -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman et al. 2017, arXiv:1707.06347);
    cispo: -sg(min(r, cap)) A log p (MiniMax-M1 2025, arXiv:2506.13585); sapo: -4/t A S(t (r - 1))
    (Gao et al. 2025, arXiv:2511.20347)."""
    ratio: Literal["token", "sequence", "product"] = "token"
    """Ratio r. token: of each token; sequence: the geometric mean over its sequence (GSPO, Zheng et
    al. 2025, arXiv:2507.18071); product: the product over its sequence's tokens (RLOO)."""
    low: NonNegativeFloat = 0.2
    """Lower clipping range of r."""
    high: NonNegativeFloat = 0.2
    """Upper clipping range of r; more than low is DAPO's clip-higher (Yu et al. 2025,
    arXiv:2503.14476)."""
    dual: float | None = Field(None, gt=1)
    """Maximum of the r outside clip; from 1 + high on it matters only where A < 0 (dual clip, Ye et
    al. 2020, arXiv:1912.09729); null: none."""
    cap: PositiveFloat = 5.0
    """Maximum of r in cispo."""
    tau_positive: PositiveFloat = 1.0
    """Temperature t of sapo for A > 0, which multiplies r - 1."""
    tau_negative: PositiveFloat = 1.05
    """Temperature t of sapo for A <= 0."""

    def own_faults(self) -> Iterator[Fault]:
        yield from unread_keys(self, [self.form], FORMS)


class AdvantageConfig(Section):
    """Advantages of samples over a baseline."""

    baseline: Literal["mean", "others", "none", "value"] = "mean"
    """What is subtracted from a reward. mean: the mean of the group (GRPO, Shao et al. 2024,
    arXiv:2402.03300); others: the mean of the group without the sample (RLOO, Ahmadian et al. 2024,
    arXiv:2402.14740); none: nothing; value: the estimate of the value head, model.head.value (PPO
    with GAE)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor: the standard deviation of rewards in the group or in the batch of a step, plus
    epsilon; none: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    epsilon: PositiveFloat = 1e-4
    """Small number added to standard deviations."""
    whiten: bool = False
    """Then normalize to mean 0 and deviation 1 over all tokens of the batch (REINFORCE++, Hu 2025,
    arXiv:2501.03262)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token, with baseline: value."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda (Schulman et al. 2016, arXiv:1506.02438), with baseline: value."""

    def own_faults(self) -> Iterator[Fault]:
        estimated: dict[str, str] = {self.baseline: "", "value": "gamma lam"}
        yield from unread_keys(self, [self.baseline], estimated)


class KLConfig(Section):
    """KL penalty for moving away from the reference, estimated from d = log p_ref - log p."""

    weight: NonNegativeFloat = 0.0
    """Weight of the penalty; 0: no reference."""
    estimate: Literal["k1", "k2", "k3"] = "k3"
    """k1: -d; k2: d^2 / 2; k3: e^d - d - 1 (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    where: Literal["loss", "reward", "return"] = "loss"
    """Where the penalty applies. loss: added to the loss of each token; reward: subtracted, without
    gradient, from the reward of each token; return: its sum is subtracted from the sample's reward
    before the baseline (RLOO)."""
    corrected: bool = False
    """Multiply the estimate by r, which makes the gradient of a loss unbiased (DeepSeek-V3.2,
    arXiv:2512.02556)."""


class CorrectionConfig(Section):
    """Importance weights of tokens for the difference between trainer and sampler: w = p_old /
    p_sampled, without gradient."""

    level: Literal["token", "sequence"] = "token"
    """token: w of each token; sequence: the product over its sequence."""
    form: Literal["truncate", "mask"] = "truncate"
    """truncate: clip w to [low, high] (Yao et al. 2025, fengyao.notion.site/off-policy-rl); mask: w
    becomes 0 outside that range."""
    low: NonNegativeFloat = 0.0
    """Minimum of w."""
    high: PositiveFloat = 2.0
    """Maximum of w."""


class ValueConfig(Section):
    """Training of the value estimate."""

    weight: PositiveFloat = 0.1
    """Weight of its loss, half the squared error."""
    clip: PositiveFloat | None = 0.2
    """Value clipping: the loss takes the larger of two errors, that of the estimate and that of the
    estimate clipped to this distance from the old one; null: no clipping."""


class PolicyGradientConfig(ReferenceConfig):
    """Reinforcement learning from rewards of the model's own samples (docs/RL.md has the
    formulas)."""

    OBJECTIVE = "maxstack.objectives.policy_gradient:PolicyGradient"
    RECORDS = ("prompts",)
    TEACHER = True
    ROLLOUTS = "always"

    kind: Literal["policy_gradient"]
    """Selects this objective."""
    loss: SurrogateConfig = SurrogateConfig()
    """Loss of a token."""
    aggregate: Literal["sequence", "token", "fixed", "sum"] = "sequence"
    """How token losses are aggregated. sequence: mean over samples of the mean over their tokens
    (GRPO); token: mean over all tokens (DAPO); fixed: mean over samples of the sum divided by
    rollout.max_tokens and an environment's turns (Dr. GRPO); sum: mean over samples of the sum."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    old: Literal["trainer", "sampler"] = "trainer"
    """Old policy in the ratio r. trainer: probabilities under the weights at the first step of a
    rollout, from training's own forward pass; sampler: the probabilities that the engine sampled
    with."""
    kl: KLConfig = KLConfig()
    """KL penalty for moving away from the reference."""
    correction: CorrectionConfig | None = None
    """Correction for differences in the sampler's numerics or for its older weights; null: none."""
    off_policy: NonNegativeFloat | None = None
    """Leave out samples with A < 0 whose mean log-probability has fallen by more than this many
    nats since sampling (DeepSeek-V3.2, arXiv:2512.02556); null: none."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    value: ValueConfig = ValueConfig()
    """Loss of the value estimate, with advantage.baseline=value."""
    distil: NonNegativeFloat = 0.0
    """Weight of log p_teacher - log p, added to each token's advantage: on-policy distillation from
    `teacher:`; rewards are optional then."""
    statistics: bool = True
    """Log the entropy of the distributions, at the cost of one more forward pass of the head."""

    @property
    def compares(self) -> bool:
        """Whether a reference is used."""
        return self.kl.weight > 0

    @property
    def has_values(self) -> bool:
        """Whether the model estimates rewards."""
        return self.advantage.baseline == "value"

    @property
    def by_token(self) -> bool:
        """Whether advantages depend on log-probabilities or estimates."""
        return bool(self.has_values or self.distil or (self.compares and self.kl.where != "loss"))

    @property
    def row_fields(self) -> dict[str, RowField]:
        kinds = {"reward": "float32", "group": "int32", "sampler": "float32"}
        return {name: RowField("batch seq", kind) for name, kind in kinds.items()}

    def own_faults(self) -> Iterator[Fault]:
        if self.reference == "stored":
            yield "reference", "samples are new, so nothing is stored of them; use start"
        if self.reference == "none" and self.compares:
            yield (
                "reference",
                "kl.weight penalizes moving away from a reference; use start or adapter_off, or "
                "kl.weight=0",
            )
        if not self.has_values and self.value != ValueConfig():
            yield "value", "is for advantage.baseline=value; leave it out"
        if self.kl.corrected and self.kl.where != "loss":
            yield "kl.corrected", "is for a loss; set kl.where=loss, or leave it out"
