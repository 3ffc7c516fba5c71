"""Preference optimization: DPO and its family, against TRL's numbers. Shapes: B batch  T time.

Answers of a pair are two sequences of a packed row, the chosen one first. Their log-probabilities
are summed within the row (sequences.py), so values of a pair are at its last position [B, T], and a
loss is a function of two Pairs: the answers under the model and under the reference.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid, sigmoid

from maxstack.objectives.log_probs import LogProbs, Terms
from maxstack.objectives.objective import Batch, Models, divisor
from maxstack.objectives.sequences import (
    Pair,
    broadcast_last,
    count_pairs,
    is_last,
    is_rejected,
    pair_sums,
    pairs_of,
    running_sums,
)
from maxstack.schema.objective import PreferenceConfig

FAR = 1e9
"""Sorts behind every pair."""


class Preference(LogProbs):
    """Sum over pairs of the configured losses, each with its weight."""

    section: PreferenceConfig

    unit = "pairs"

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        return self.section.over_whole_batch

    @property
    def needs_reference(self) -> bool:
        return self.section.compares and self.section.reference != "stored"

    @property
    def needs_sharpness(self) -> bool:
        return self.section.weigh

    def prepare(self, batch: Batch, key: Array) -> Batch:
        """Add `pairs` and `chosen_tokens`, their numbers in the whole batch."""
        return {
            **batch,
            "pairs": count_pairs(batch["segments"]),
            "chosen_tokens": self._sft_targets(batch).sum(),
        }

    def weight(self, batch: Batch) -> Array:
        return count_pairs(batch["segments"])

    def terms(self, batch: Batch) -> Terms:
        """Metrics: rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies,
        logps/chosen, logps/rejected (sums over answers)."""
        cfg, segments_BT = self.section, batch["segments"]
        mask_BT = batch["mask"]
        last_BT = is_last(pairs_of(segments_BT))
        weights_BT = self._desensitize(mask_BT, segments_BT)
        # A stored number is of the whole answer, so it is taken once, at the first position.
        if "reference" in batch:
            reference_BT = jnp.where(batch["positions"] == 0, batch["reference"], 0.0)
        else:
            reference_BT = batch.get("reference_logps", jnp.zeros_like(mask_BT)) * weights_BT
        policy = pair_sums(batch["logps"] * weights_BT, segments_BT)
        reference = pair_sums(reference_BT, segments_BT)
        tokens = pair_sums(mask_BT, segments_BT)
        # Positions without a pair get values whose loss and derivative are finite, since a NaN
        # reaches the gradient through the mask.
        comparison = Comparison(
            cfg,
            last_BT,
            policy.where(last_BT, -1.0),
            reference.where(last_BT, -1.0),
            tokens.where(last_BT, 1.0),
        )
        likely_BT = self._likelihood_weights(batch, tokens, last_BT) if cfg.weigh else 1.0
        total_BT = jnp.zeros_like(mask_BT)
        for name, weight in cfg.losses.items():
            if name == "sft":
                # The step divides by pairs; times pairs / chosen tokens, this is a mean over
                # tokens.
                learnt_BT = self._sft_targets(batch)
                share = batch["pairs"] / divisor(batch["chosen_tokens"])
                loss_BT = -batch["logps"] * learnt_BT * share
            else:
                loss_BT = jnp.where(last_BT, LOSSES[name](comparison), 0.0) * likely_BT
            total_BT = total_BT + weight * loss_BT
        chosen_BT, rejected_BT = (cfg.beta * ratio for ratio in comparison.log_ratios)
        metrics = {
            "rewards/chosen": chosen_BT,
            "rewards/rejected": rejected_BT,
            "rewards/margins": chosen_BT - rejected_BT,
            "rewards/accuracies": (chosen_BT > rejected_BT).astype(jnp.float32),
            "logps/chosen": comparison.policy.chosen,
            "logps/rejected": comparison.policy.rejected,
        }
        return Terms(total_BT, {name: jnp.where(last_BT, x, 0.0) for name, x in metrics.items()})

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Array]:
        """The loss, and rewards/accuracies and rewards/margins."""
        return self.evaluate_loss(
            models,
            batch,
            rewards_accuracies="rewards/accuracies",
            rewards_margins="rewards/margins",
        )

    def _sft_targets(self, batch: Batch) -> Array:
        """1 at targets of the loss sft, 0 elsewhere."""
        chosen_BT = (batch["segments"] > 0) & ~is_rejected(batch["segments"])
        if self.section.sft_on == "sequence":
            return chosen_BT.astype(jnp.float32)
        return chosen_BT * batch["mask"]

    def _desensitize(self, mask_BT: Array, segments_BT: Array) -> Array:
        """The mask, reduced by LD-DPO's weight beyond the length of the shorter answer."""
        if self.section.desensitize is None:
            return mask_BT
        # Known at the pair's end, needed at each of its positions.
        shorter_BT = broadcast_last(
            jnp.minimum(*pair_sums(mask_BT, segments_BT)), pairs_of(segments_BT)
        )
        beyond_BT = running_sums(mask_BT, segments_BT) > shorter_BT
        return mask_BT * jnp.where(beyond_BT, self.section.desensitize, 1.0)

    @staticmethod
    def _likelihood_weights(batch: Batch, tokens: Pair, last_BT: Array) -> Array:
        """Weights of WPO: exp of the mean over tokens of log p - log sum p^2, of both answers
        (Zhou et al. 2024, arXiv:2406.11827)."""
        # A weight, not a term: WPO does not learn to change it.
        aligned_BT = jax.lax.stop_gradient(batch["logps"] - batch["sharpness"])
        both = pair_sums(aligned_BT * batch["mask"], batch["segments"])
        means = (x / divisor(n) for x, n in zip(both, tokens, strict=True))
        # The product of both answers' weights.
        return jnp.where(last_BT, jnp.exp(sum(means)), 0.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both answers of pairs under the model and the reference."""

    cfg: PreferenceConfig
    last: Array
    """True at the one position that stands for each pair; values elsewhere are masked."""
    policy: Pair
    """Log-probabilities of the answers."""
    reference: Pair
    """Log-probabilities of the answers under the reference."""
    tokens: Pair
    """Tokens of the answers."""

    @property
    def log_ratios(self) -> Pair:
        """Log-ratios of the model to the reference; without one, the log-probabilities, as
        AlphaPO transforms them if reward_alpha is set."""
        chosen, rejected = map(self._alphapo, self.policy)
        return Pair(chosen - self.reference.chosen, rejected - self.reference.rejected)

    @property
    def scores(self) -> Pair:
        """f(u) and f(v) of docs/POSTTRAINING.md: the derivative of the divergence at both
        ratios, without its constants (f-DPO)."""
        return Pair(*map(self._score, self.log_ratios))

    @property
    def z(self) -> Array:
        """beta times the difference of the scores."""
        chosen, rejected = self.scores
        return self.cfg.beta * (chosen - rejected)

    @property
    def mean_scores(self) -> Pair:
        """Scores divided by tokens; with reward_alpha, the transformed mean log-probabilities."""
        # The exponential of a sum, divided by tokens, is not that of a mean.
        return self.mean_rewards if self.cfg.reward_alpha else self._mean(self.scores)

    @property
    def mean_logps(self) -> Pair:
        """Mean log-probability of a token."""
        return self._mean(self.policy)

    @property
    def mean_rewards(self) -> Pair:
        """Mean log-probabilities of a token, as AlphaPO transforms them if reward_alpha is set."""
        return Pair(*map(self._alphapo, self.mean_logps))

    def smooth(self, z: Array) -> Array:
        """-log sigmoid(z), with labels flipped with probability `smoothing`."""
        s = self.cfg.smoothing
        return -(1 - s) * log_sigmoid(z) - s * log_sigmoid(-z)

    def sorted(self, x: Array) -> Array:
        """The pairs' values in ascending order, before those of other positions."""
        return jnp.sort(jnp.where(self.last, x, FAR).reshape(-1))

    def by_rank(self, differences: Array) -> Array:
        """The smoothed loss of differences of sorted values, one at each pair."""
        # Once sorted, a difference belongs to no pair: the n-th pair holds the n-th.
        ranks = jnp.cumsum(self.last.reshape(-1)) - 1
        own = differences[jnp.maximum(ranks, 0)].reshape(self.last.shape)
        return self.smooth(self.cfg.beta * own)

    def _mean(self, sums: Pair) -> Pair:
        return Pair(sums.chosen / self.tokens.chosen, sums.rejected / self.tokens.rejected)

    def _alphapo(self, logp: Array) -> Array:
        alpha = self.cfg.reward_alpha
        return (1 - jnp.exp(-alpha * logp)) / alpha if alpha else logp

    def _score(self, ratio: Array) -> Array:
        alpha = self.cfg.divergence_alpha
        match self.cfg.divergence:
            case "forward_kl":
                return -jnp.exp(-ratio)
            case "js_divergence":
                return log_sigmoid(ratio)
            case "alpha_divergence":
                return jnp.exp((alpha - 1) * ratio) / (alpha - 1)
        return ratio


def _sigmoid(comparison: Comparison) -> Array:
    return comparison.smooth(comparison.z)


def _hinge(comparison: Comparison) -> Array:
    return jnp.maximum(0.0, 1 - comparison.z)


def _ipo(comparison: Comparison) -> Array:
    # Means over tokens, as in TRL.
    chosen, rejected = comparison.mean_scores
    return jnp.square(chosen - rejected - 1 / (2 * comparison.cfg.beta))


def _sigmoid_norm(comparison: Comparison) -> Array:
    chosen, rejected = comparison.mean_scores
    return -log_sigmoid(comparison.cfg.beta * (chosen - rejected))


def _robust(comparison: Comparison) -> Array:
    # Divided by 1 - 2s, the loss under flipped labels has the mean of the loss without flips.
    s, z = comparison.cfg.smoothing, comparison.z
    return (-(1 - s) * log_sigmoid(z) + s * log_sigmoid(-z)) / (1 - 2 * s)


def _exo_pair(comparison: Comparison) -> Array:
    # KL from (S(z), S(-z)) to the smoothed labels (1 - s, s).
    s, z = comparison.cfg.smoothing, comparison.z
    right = sigmoid(z) * (log_sigmoid(z) - jnp.log1p(-s))
    return right + sigmoid(-z) * (log_sigmoid(-z) - jnp.log(s))


def _nca_pair(comparison: Comparison) -> Array:
    a, b = (comparison.cfg.beta * score for score in comparison.scores)
    return -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b)


def _bco_pair(comparison: Comparison) -> Array:
    a, b = (comparison.cfg.beta * score for score in comparison.scores)
    return -log_sigmoid(a) - log_sigmoid(-b)


def _sppo_hard(comparison: Comparison) -> Array:
    a, b = comparison.scores
    half = 0.5 / comparison.cfg.beta
    return jnp.square(a - half) + jnp.square(b + half)


def _aot(comparison: Comparison) -> Array:
    own = comparison.sorted(comparison.policy.chosen - comparison.policy.rejected)
    return comparison.by_rank(
        own - comparison.sorted(comparison.reference.chosen - comparison.reference.rejected)
    )


def _aot_unpaired(comparison: Comparison) -> Array:
    chosen, rejected = comparison.log_ratios
    return comparison.by_rank(comparison.sorted(chosen) - comparison.sorted(rejected))


def _apo_zero(comparison: Comparison) -> Array:
    chosen, rejected = comparison.log_ratios
    return 1 - sigmoid(comparison.cfg.beta * chosen) + sigmoid(comparison.cfg.beta * rejected)


def _apo_down(comparison: Comparison) -> Array:
    return sigmoid(comparison.cfg.beta * comparison.log_ratios.chosen) + 1 - sigmoid(comparison.z)


def _discopop(comparison: Comparison) -> Array:
    share = sigmoid(comparison.z / comparison.cfg.tau)
    return -log_sigmoid(comparison.z) * (1 - share) + jnp.exp(-comparison.z) * share


def _simpo(comparison: Comparison) -> Array:
    chosen, rejected = comparison.mean_rewards
    return comparison.smooth(comparison.cfg.beta * (chosen - rejected) - comparison.cfg.gamma)


def _orpo(comparison: Comparison) -> Array:
    # log(1 - p) is infinite at p = 1, and expm1 keeps its digits near there.
    chosen, rejected = (
        mean - jnp.log(-jnp.expm1(jnp.minimum(mean, -1e-6))) for mean in comparison.mean_logps
    )
    return -comparison.cfg.beta * log_sigmoid(chosen - rejected)


LOSSES: Mapping[str, Callable[[Comparison], Array]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""Losses [B, T] of pairs, by name: all of PREFERENCES but sft, which `terms` adds up from tokens.
Where no pair is, log-probabilities are -1 and tokens 1; losses and derivatives must be finite."""
