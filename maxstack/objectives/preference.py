"""Preference optimization: DPO and its family, against TRL's numbers. Shapes: B batch  T time.

Answers of a pair are two sequences of a packed row, the chosen one first. Their log-probabilities
are summed within the row (sequences.py), so values of a pair are at its last position [B, T], and a
loss is a function of two Pairs: the answers under the model and under the reference.
"""

import dataclasses
import functools
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
    is_second,
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

    counted = "pairs"

    @property
    def coupled(self) -> bool:  # type: ignore[override]
        """True for aot and aot_unpaired, which sort the whole batch."""
        return any(name.startswith("aot") for name in self.section.losses)

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
        if "reference" in batch:  # of whole answers
            reference_BT = jnp.where(batch["positions"] == 0, batch["reference"], 0.0)
        else:
            reference_BT = batch.get("reference_logps", jnp.zeros_like(mask_BT)) * weights_BT
        policy = pair_sums(batch["logps"] * weights_BT, segments_BT)
        reference = pair_sums(reference_BT, segments_BT)
        tokens = pair_sums(mask_BT, segments_BT)
        # Positions without a pair get values whose loss and derivative are finite, since a NaN
        # reaches the gradient through the mask.
        compared = Comparison(
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
                # A mean over chosen tokens beside sums over pairs: `share` makes the division by
                # pairs one by tokens.
                learnt_BT = self._sft_targets(batch)
                share = batch["pairs"] / divisor(batch["chosen_tokens"])
                loss_BT = -batch["logps"] * learnt_BT * share
            else:
                loss_BT = jnp.where(last_BT, LOSSES[name](compared), 0.0) * likely_BT
            total_BT = total_BT + weight * loss_BT
        ratios = compared.ratios
        chosen_BT, rejected_BT = cfg.beta * ratios.first, cfg.beta * ratios.second
        named = {
            "rewards/chosen": chosen_BT,
            "rewards/rejected": rejected_BT,
            "rewards/margins": chosen_BT - rejected_BT,
            "rewards/accuracies": (chosen_BT > rejected_BT).astype(jnp.float32),
            "logps/chosen": compared.policy.first,
            "logps/rejected": compared.policy.second,
        }
        return Terms(total_BT, {name: jnp.where(last_BT, x, 0.0) for name, x in named.items()})

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
        chosen_BT = (batch["segments"] > 0) & ~is_second(batch["segments"])
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
    """Both answers of pairs under the model and the reference, the chosen one first."""

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
    def ratios(self) -> Pair:
        """Log-ratios of the model to the reference; without one, the log-probabilities, as
        AlphaPO transforms them if reward_alpha is set."""
        chosen, rejected = self.policy
        return Pair(
            self.transform_reward(chosen) - self.reference.first,
            self.transform_reward(rejected) - self.reference.second,
        )

    @functools.cached_property
    def scores(self) -> Pair:
        """f(u) and f(v) of docs/POSTTRAINING.md: the derivative of the divergence at both
        ratios, without its constants (f-DPO)."""
        chosen, rejected = self.ratios
        return Pair(self._score(chosen), self._score(rejected))

    @property
    def z(self) -> Array:
        """beta times the difference of the scores."""
        first, second = self.scores
        return self.cfg.beta * (first - second)

    @property
    def mean_scores(self) -> Pair:
        """Scores divided by tokens."""
        first, second = self.scores
        return Pair(first / self.tokens.first, second / self.tokens.second)

    @property
    def mean_logps(self) -> Pair:
        """Mean log-probability of a token."""
        first, second = self.policy
        return Pair(first / self.tokens.first, second / self.tokens.second)

    def smooth(self, z: Array) -> Array:
        """-log sigmoid(z), with labels flipped with probability `smoothing`."""
        s = self.cfg.smoothing
        return -(1 - s) * log_sigmoid(z) - s * log_sigmoid(-z)

    def transform_reward(self, logp: Array) -> Array:
        """AlphaPO's transformation of log-probabilities."""
        alpha = self.cfg.reward_alpha
        return (1 - jnp.exp(-alpha * logp)) / alpha if alpha else logp

    def sorted(self, x: Array) -> Array:
        """The pairs' values in ascending order, before those of other positions."""
        return jnp.sort(jnp.where(self.last, x, FAR).reshape(-1))

    def by_rank(self, differences: Array) -> Array:
        """The smoothed loss of differences of sorted values, one at each pair."""
        # Once sorted, a difference belongs to no pair: the n-th pair holds the n-th.
        ranks = jnp.cumsum(self.last.reshape(-1)) - 1
        own = differences[jnp.maximum(ranks, 0)].reshape(self.last.shape)
        return self.smooth(self.cfg.beta * own)

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


def _sigmoid(pair: Comparison) -> Array:
    return pair.smooth(pair.z)


def _hinge(pair: Comparison) -> Array:
    return jnp.maximum(0.0, 1 - pair.z)


def _ipo(pair: Comparison) -> Array:
    # Means over tokens, as in TRL.
    first, second = pair.mean_scores
    if pair.cfg.reward_alpha:
        first, second = (pair.transform_reward(mean) for mean in pair.mean_logps)
    return jnp.square(first - second - 1 / (2 * pair.cfg.beta))


def _sigmoid_norm(pair: Comparison) -> Array:
    first, second = pair.mean_scores
    return -log_sigmoid(pair.cfg.beta * (first - second))


def _robust(pair: Comparison) -> Array:
    # Divided by 1 - 2s, the loss under flipped labels has the mean of the loss without flips.
    s, z = pair.cfg.smoothing, pair.z
    return (-(1 - s) * log_sigmoid(z) + s * log_sigmoid(-z)) / (1 - 2 * s)


def _exo_pair(pair: Comparison) -> Array:
    # KL from (S(z), S(-z)) to the smoothed labels (1 - s, s).
    s, z = pair.cfg.smoothing, pair.z
    right = sigmoid(z) * (log_sigmoid(z) - jnp.log1p(-s))
    return right + sigmoid(-z) * (log_sigmoid(-z) - jnp.log(s))


def _nca_pair(pair: Comparison) -> Array:
    a, b = (pair.cfg.beta * score for score in pair.scores)
    return -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b)


def _bco_pair(pair: Comparison) -> Array:
    a, b = (pair.cfg.beta * score for score in pair.scores)
    return -log_sigmoid(a) - log_sigmoid(-b)


def _sppo_hard(pair: Comparison) -> Array:
    a, b = pair.scores
    half = 0.5 / pair.cfg.beta
    return jnp.square(a - half) + jnp.square(b + half)


def _aot(pair: Comparison) -> Array:
    own = pair.sorted(pair.policy.first - pair.policy.second)
    return pair.by_rank(own - pair.sorted(pair.reference.first - pair.reference.second))


def _aot_unpaired(pair: Comparison) -> Array:
    chosen, rejected = pair.ratios
    return pair.by_rank(pair.sorted(chosen) - pair.sorted(rejected))


def _apo_zero(pair: Comparison) -> Array:
    chosen, rejected = pair.ratios
    return 1 - sigmoid(pair.cfg.beta * chosen) + sigmoid(pair.cfg.beta * rejected)


def _apo_down(pair: Comparison) -> Array:
    return sigmoid(pair.cfg.beta * pair.ratios.first) + 1 - sigmoid(pair.z)


def _discopop(pair: Comparison) -> Array:
    share = sigmoid(pair.z / pair.cfg.tau)
    return -log_sigmoid(pair.z) * (1 - share) + jnp.exp(-pair.z) * share


def _simpo(pair: Comparison) -> Array:
    first, second = (pair.transform_reward(mean) for mean in pair.mean_logps)
    return pair.smooth(pair.cfg.beta * (first - second) - pair.cfg.gamma)


def _orpo(pair: Comparison) -> Array:
    # log(1 - p) is infinite at p = 1, and expm1 keeps its digits near there.
    odds = (mean - jnp.log(-jnp.expm1(jnp.minimum(mean, -1e-6))) for mean in pair.mean_logps)
    first, second = odds
    return -pair.cfg.beta * log_sigmoid(first - second)


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
"""Losses [B, T] of pairs, by name; sft is a sum over tokens."""
