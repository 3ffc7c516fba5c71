"""Policy gradients of the model's own samples: GRPO and its family, PPO.

`l` is the log-probability of a token now, `old` that when its rollout was first trained on,
`sampler` that of the engine that sampled it; r = exp(l - old). Where a rollout is trained on for
several steps, the first of them measures `old` and the other annotations with the weights of that
step (`annotate`); with one step r is 1 but for its gradient, and nothing is measured. Advantages
are computed over the whole batch before it is cut into microbatches (advantages.py). Samples are
sequences of packed rows; their values are at their last position.

Shapes: B batch  T time  D embed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from maxstack.kernels.sequences import natural
from maxstack.objectives.advantages import (
    Samples,
    generalized_advantages,
    sample_advantages,
    suffix_sums,
    whiten,
)
from maxstack.objectives.log_probs import LogProbs, Terms, log_probs_of
from maxstack.objectives.objective import Batch, Field, Metrics, Models, token_fields
from maxstack.objectives.sequences import broadcast_last, is_last, running_sums
from maxstack.objectives.statistics import entropies
from maxstack.schema.policy_gradient import PolicyGradientConfig, SurrogateConfig
from maxstack.schema.rollout import RolloutConfig


class PolicyGradient(LogProbs):
    """Sum over tokens of a surrogate of the expected reward and of the other terms; the denominator
    is that of objective.aggregate."""

    section: PolicyGradientConfig

    @property
    def rollout(self) -> RolloutConfig:
        """rollout: of the configuration."""
        assert self.cfg.rollout
        return self.cfg.rollout

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "tokens" if self.section.aggregate == "token" else "samples"

    @property
    def frozen(self) -> tuple[str, ...]:  # type: ignore[override]
        """The reference, and the teacher."""
        return (*super().frozen, *(("teacher",) if self.section.distil else ()))

    @property
    def needs_reference(self) -> bool:
        return self.section.compares

    @property
    def forward_passes(self) -> int:
        """1 for the reference, 0 where its log-probabilities come with the batch."""
        return int(self.needs_reference and not self.annotations)

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        """True where advantages of the whole batch need measurements of the model."""
        # Advantages by token read log-probabilities or values of the model; annotations bring them
        # with the batch.
        return self.section.by_token and not self.annotations

    @property
    def annotations(self) -> tuple[str, ...]:  # type: ignore[override]
        """Measurements by the weights at the first of several steps of a rollout."""
        # The step's own forward pass has the weights that the rollout is first learned from.
        if self.rollout.steps == 1:
            return ()
        section = self.section
        wanted = {
            "old_logps": True,
            "reference_logps": section.compares,
            "teacher_logps": bool(section.distil),
            "old_values": section.has_values,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def fields(self) -> dict[str, Field]:
        return token_fields(self.cfg) | {
            name: Field("batch seq", "float32") for name in self.annotations
        }

    def annotate(self, models: Models, batch: Batch) -> Batch:
        measured = self.measure(models, batch)
        return {
            name: measured["logps" if name == "old_logps" else name] for name in self.annotations
        }

    def prepare(self, batch: Batch, key: Array) -> Batch:
        """Add `advantages` and `returns`, unless they need the model."""
        return batch if self.coupled else self._with_advantages(batch)

    def complete(self, batch: Batch) -> Batch:
        return super().complete(batch if "advantages" in batch else self._with_advantages(batch))

    def weight(self, batch: Batch) -> Array:
        """Counted tokens, or samples with at least one."""
        if self.section.aggregate == "token":
            return batch["mask"].sum()
        return self._counted(batch).sum().astype(jnp.float32)

    def terms(self, batch: Batch) -> Terms:
        """Metrics: ratio, clip/low, clip/high, sampler/difference, sampler/ratio, sampler/kl, and
        with a reference kl."""
        cfg, mask_BT = self.section, batch["mask"]
        shares_BT = self._shares(batch)
        logps_BT, old_BT = batch["logps"], self._old(batch)
        # Prompts are masked inside, since sums over a sequence would take them in.
        ratio_BT = self._ratio(logps_BT - old_BT, batch)
        advantages_BT = batch["advantages"]
        surrogate = SURROGATES[cfg.loss.form](cfg.loss, ratio_BT, advantages_BT, logps_BT)
        loss_BT = surrogate.loss
        gap_BT = stop_gradient(old_BT - batch["sampler"]) * mask_BT
        if cfg.off_policy is not None:
            # Drop samples with A < 0 whose mean log p has fallen by more than off_policy
            # (DeepSeek-V3.2).
            drift_BT = self._means(stop_gradient(batch["sampler"] - logps_BT), batch)
            loss_BT = jnp.where((advantages_BT >= 0) | (drift_BT <= cfg.off_policy), loss_BT, 0.0)
        if cfg.correction:
            loss_BT = loss_BT * self._correction(gap_BT, batch["segments"])
        figures = {
            "clip/low": surrogate.low,
            "clip/high": surrogate.high,
            "ratio": ratio_BT,
            "sampler/difference": jnp.abs(gap_BT),
            "sampler/ratio": jnp.exp(gap_BT),
            # exp(gap) - 1 would lose the digits of gaps near 1e-7.
            "sampler/kl": jnp.expm1(gap_BT) - gap_BT,
        }
        if cfg.compares:
            distance_BT = batch["reference_logps"] - logps_BT
            # k3 whatever the loss uses, so that runs compare.
            figures["kl"] = estimate_kl("k3", distance_BT)
            if cfg.kl.where == "loss":
                kl_BT = estimate_kl(cfg.kl.estimate, distance_BT)
                kl_BT = kl_BT * jnp.exp(logps_BT - old_BT) if cfg.kl.corrected else kl_BT
                loss_BT = loss_BT + cfg.kl.weight * kl_BT
        metrics = {name: jnp.where(mask_BT > 0, x, 0.0) for name, x in figures.items()}
        # Means over tokens, whatever the loss is divided by.
        metrics |= {f"{name}/weight": mask_BT for name in figures}
        return Terms(jnp.where(mask_BT > 0, loss_BT, 0.0) * shares_BT, metrics)

    def extra_loss(self, models: Models, batch: Batch, normed_BTD: Array) -> tuple[Array, Metrics]:
        """The losses of entropy and value, and the metrics entropy, value_loss, value."""
        cfg, mask_BT = self.section, batch["mask"]
        shares_BT = self._shares(batch)
        total, metrics = jnp.zeros(()), {}
        # A pass of the head of its own, so it is left out where nobody asks.
        if cfg.entropy or cfg.statistics:
            entropy_BT = entropies(models.policy, natural(normed_BTD), self.temperature) * mask_BT
            if cfg.entropy:
                total = total - cfg.entropy * (entropy_BT * shares_BT).sum()
            metrics["entropy"] = stop_gradient(entropy_BT).sum()
            metrics["entropy/weight"] = mask_BT.sum()
        if cfg.has_values:
            values_BT = models.policy.values(normed_BTD)
            # By the same shares as the surrogate, so that one denominator serves both.
            loss_BT = self._value_loss(values_BT, batch) * mask_BT
            total = total + cfg.value.weight * (loss_BT * shares_BT).sum()
            for name, x_BT in (("value_loss", loss_BT), ("value", values_BT * mask_BT)):
                metrics[name] = stop_gradient(x_BT).sum()
                metrics[f"{name}/weight"] = mask_BT.sum()
        return total, metrics

    def _measured(self, models: Models, batch: Batch, normed_BTD: Array) -> Batch:
        measured = {**super()._measured(models, batch, normed_BTD)}
        if self.section.has_values and "old_values" not in batch:
            measured["old_values"] = stop_gradient(models.policy.values(normed_BTD))
        if self.section.distil and "teacher_logps" not in batch:
            teacher = models.frozen["teacher"]
            measured["teacher_logps"] = log_probs_of(teacher, batch, self.temperature)
        return measured

    def _with_advantages(self, batch: Batch) -> Batch:
        """The whole batch with `advantages`, and with `returns`, the targets of the values."""
        cfg, mask_BT = self.section, batch["mask"]
        segments_BT = batch["segments"]
        old_BT = self._old(batch) if cfg.by_token else jnp.zeros_like(mask_BT)
        samples = Samples(
            batch["reward"],
            batch["group"],
            segments_BT,
            mask_BT,
            self.rollout.prompts // self.rollout.minibatches,
        )
        penalty_BT = jnp.zeros_like(mask_BT)
        if cfg.compares and cfg.kl.where != "loss":
            kl_BT = estimate_kl(cfg.kl.estimate, batch["reference_logps"] - old_BT)
            penalty_BT = cfg.kl.weight * kl_BT * mask_BT
        # The whole penalty of a sample counts as part of its reward, and is not charged again by
        # token.
        if cfg.kl.where == "return":
            # At a sample's last position this is the whole of it.
            spent_BT = running_sums(penalty_BT, segments_BT)
            samples = samples._replace(rewards=samples.rewards - spent_BT)
            penalty_BT = jnp.zeros_like(mask_BT)
        made = {}
        if cfg.has_values:
            rewards_BT = self._at_last_token(samples) - penalty_BT
            # Of the weights at the rollout's first step, so that several steps learn towards the
            # same returns.
            values_BT = batch["old_values"] * mask_BT
            advantages_BT = generalized_advantages(cfg.advantage, rewards_BT, values_BT, samples)
            # Before whitening, which is for the policy alone.
            made["returns"] = advantages_BT + values_BT
        else:
            advantages_BT = sample_advantages(cfg.advantage, samples)
            if cfg.compares and cfg.kl.where == "reward":
                advantages_BT = advantages_BT - suffix_sums(penalty_BT, segments_BT)
        if cfg.distil:
            advantages_BT = advantages_BT + cfg.distil * (batch["teacher_logps"] - old_BT)
        if cfg.advantage.whiten:
            advantages_BT = whiten(advantages_BT, mask_BT)
        made["advantages"] = jnp.where(mask_BT > 0, advantages_BT, 0.0)
        return {**batch, **stop_gradient(made)}

    def _at_last_token(self, samples: Samples) -> Array:
        """Rewards of samples, at the last token of each that the model chose."""
        left_BT = suffix_sums(samples.mask, samples.segments)
        # The token after which no chosen one follows; an environment's words may come after it.
        is_last_BT = (left_BT == 1) & (samples.mask > 0)
        rewards_BT = broadcast_last(jnp.where(samples.last, samples.rewards, 0.0), samples.segments)
        return jnp.where(is_last_BT, rewards_BT, 0.0)

    def _old(self, batch: Batch) -> Array:
        if self.section.old == "sampler":
            return batch["sampler"]
        return batch["old_logps"] if "old_logps" in batch else stop_gradient(batch["logps"])

    def _ratio(self, difference_BT: Array, batch: Batch) -> Array:
        kind, difference_BT = self.section.loss.ratio, difference_BT * batch["mask"]
        if kind == "sequence":
            difference_BT = self._means(difference_BT, batch)
        elif kind == "product":
            difference_BT = _sequence_sums(difference_BT, batch["segments"])
        return jnp.exp(difference_BT)

    def _correction(self, gap_BT: Array, segments_BT: Array) -> Array:
        cfg = self.section.correction
        assert cfg
        by_sequence = cfg.level == "sequence"
        weights_BT = jnp.exp(_sequence_sums(gap_BT, segments_BT) if by_sequence else gap_BT)
        # A weight, not a mask: `mask` drops what lies outside.
        if cfg.form == "truncate":
            return jnp.clip(weights_BT, cfg.low, cfg.high)
        inside_BT = (weights_BT >= cfg.low) & (weights_BT <= cfg.high)
        return jnp.where(inside_BT, weights_BT, 0.0)

    def _value_loss(self, values_BT: Array, batch: Batch) -> Array:
        error_BT, clip = jnp.square(values_BT - batch["returns"]), self.section.value.clip
        if clip is not None:
            old_BT = batch["old_values"]
            # The larger error: clipping may not make a value look better than it is.
            near_BT = jnp.clip(values_BT, old_BT - clip, old_BT + clip)
            error_BT = jnp.maximum(error_BT, jnp.square(near_BT - batch["returns"]))
        return error_BT / 2

    def _shares(self, batch: Batch) -> Array:
        """Weights of tokens, by objective.aggregate."""
        kind, mask_BT = self.section.aggregate, batch["mask"]
        if kind == "sequence":
            counts_BT = _sequence_sums(mask_BT, batch["segments"])
            return mask_BT / jnp.maximum(counts_BT, 1.0)
        if kind == "fixed":
            turns = self.rollout.environment.turns if self.rollout.environment else 1
            # A constant, so that long answers are not favoured by a division by their own length
            # (Dr. GRPO).
            return mask_BT / (self.rollout.max_tokens * turns)
        return mask_BT

    def _means(self, x_BT: Array, batch: Batch) -> Array:
        """Mean over the counted tokens of each sample."""
        sums_BT, counts_BT = (
            _sequence_sums(y_BT, batch["segments"])
            for y_BT in (x_BT * batch["mask"], batch["mask"])
        )
        return sums_BT / jnp.maximum(counts_BT, 1.0)

    def _counted(self, batch: Batch) -> Array:
        """True at the last position of each sample of which a token counts."""
        # Samples without a counted token are in no denominator; TRL counts them.
        counts_BT = running_sums(batch["mask"], batch["segments"])
        return is_last(batch["segments"]) & (counts_BT > 0)


class Surrogate(NamedTuple):
    """The loss of each token, and where it was clipped from below and from above. All [B, T]."""

    loss: Array
    low: Array
    high: Array


def _clip(
    cfg: SurrogateConfig, ratio_BT: Array, advantages_BT: Array, logps_BT: Array
) -> Surrogate:
    # With dual >= 1 + high it matters only where A < 0: elsewhere `minimum` takes the clipped term
    # (arXiv:1912.09729).
    free_BT = ratio_BT if cfg.dual is None else jnp.minimum(ratio_BT, cfg.dual)
    clipped_BT = jnp.clip(ratio_BT, 1 - cfg.low, 1 + cfg.high)
    return Surrogate(
        -jnp.minimum(free_BT * advantages_BT, clipped_BT * advantages_BT),
        (ratio_BT < 1 - cfg.low) & (advantages_BT < 0),
        (ratio_BT > 1 + cfg.high) & (advantages_BT > 0),
    )


def _cispo(
    cfg: SurrogateConfig, ratio_BT: Array, advantages_BT: Array, logps_BT: Array
) -> Surrogate:
    # The gradient goes through l alone, so a capped token still learns (arXiv:2506.13585).
    held_BT = stop_gradient(jnp.minimum(ratio_BT, cfg.cap))
    # The cap holds whatever the sign of A.
    return Surrogate(
        -held_BT * advantages_BT * logps_BT, jnp.zeros_like(ratio_BT), ratio_BT > cfg.cap
    )


def _sapo(
    cfg: SurrogateConfig, ratio_BT: Array, advantages_BT: Array, logps_BT: Array
) -> Surrogate:
    tau_BT = jnp.where(advantages_BT > 0, cfg.tau_positive, cfg.tau_negative)
    # 4 / tau makes the slope at r = 1 equal to one.
    soft_BT = jax.nn.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT
    never_BT = jnp.zeros_like(ratio_BT)
    return Surrogate(-soft_BT * advantages_BT, never_BT, never_BT)


SURROGATES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo}
"""Losses of tokens, by objective.loss.form."""


def estimate_kl(kind: str, distance_BT: Array) -> Array:
    """Estimates of KL(p | ref) by d = log ref - log p of samples of p; k1: -d; k2: d^2 / 2; k3:
    e^d - d - 1 (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    if kind == "k1":
        return -distance_BT
    if kind == "k2":
        return jnp.square(distance_BT) / 2
    return jnp.expm1(distance_BT) - distance_BT


def _sequence_sums(x_BT: Array, segments_BT: Array) -> Array:
    """The sum over its sequence, at every position."""
    return broadcast_last(running_sums(x_BT, segments_BT), segments_BT)
