"""Advantages of samples, over the whole batch of a step: a sample's reward less a baseline (the
mean of its group, or of the others in it), divided by a deviation; or, with a value head,
generalized advantage estimates by token. Microbatches are cut afterwards, so neither they nor the
mesh change anything. Shapes: B batch  T time.

Values of a sample are at its last position [B, T]; `mask` is 1 on the tokens that the model chose.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxstack.objectives.sequences import broadcast_last, is_last, running_sums
from maxstack.schema.policy_gradient import AdvantageConfig

TINY = 1e-8


class Samples(NamedTuple):
    """The samples of a batch."""

    rewards: Array
    """[B, T]."""
    groups: Array
    """int32 [B, T]: the number of the group, from 1; 0 in padding and where a sample was left
    out."""
    segments: Array
    mask: Array
    max_groups: int
    """Upper bound of group numbers."""

    @property
    def last(self) -> Array:
        """True at the last position of each sample that counts."""
        return is_last(self.segments) & (self.groups > 0)

    def by_group(self, x_BT: Array) -> Array:
        """At every position, the sum of x over the last positions of its group."""
        # Group 0 takes everything that is no last position of a sample.
        groups_N = jnp.where(self.last, self.groups, 0).ravel()
        sums_G = jax.ops.segment_sum(x_BT.ravel(), groups_N, self.max_groups + 1)
        return sums_G[self.groups]

    @property
    def rewards_above_lowest(self) -> Array:
        """At the last position of each sample its reward less the lowest of its group, 0 elsewhere.

        A baseline and a deviation of the group are the same by these, but exactly 0 where all
        rewards are equal: the float32 mean of 16 rewards of 10000.3 is not 10000.3, and what is
        left, divided by epsilon, would be an advantage of 0.88."""
        groups_N = jnp.where(self.last, self.groups, 0).ravel()
        lowest_G = jax.ops.segment_min(self.rewards.ravel(), groups_N, self.max_groups + 1)
        return jnp.where(self.last, self.rewards - lowest_G[self.groups], 0.0)


def sample_advantages(cfg: AdvantageConfig, samples: Samples) -> Array:
    """Advantage of each sample, at all of its positions [B, T]: rewards less a baseline, over their
    standard deviation (ddof 1) plus epsilon."""
    last_BT = samples.last
    rewards_BT = samples.rewards_above_lowest
    sizes_BT = jnp.maximum(samples.by_group(last_BT.astype(jnp.float32)), 1.0)
    means_BT = samples.by_group(rewards_BT) / sizes_BT
    # Without a baseline the rewards themselves, not their distance from the lowest.
    advantages_BT = samples.rewards
    if cfg.baseline == "mean":
        advantages_BT = rewards_BT - means_BT
    elif cfg.baseline == "others":
        alone_BT = sizes_BT < 2  # nothing to compare with
        # Leave-one-out: a sample's own reward would bias its baseline.
        others_BT = (means_BT * sizes_BT - rewards_BT) / jnp.maximum(sizes_BT - 1, 1.0)
        advantages_BT = jnp.where(alone_BT, 0.0, rewards_BT - others_BT)
    if cfg.scale == "group":
        squares_BT = samples.by_group(jnp.where(last_BT, jnp.square(rewards_BT - means_BT), 0.0))
        # ddof 1, as torch's std has it.
        deviations_BT = jnp.sqrt(squares_BT / jnp.maximum(sizes_BT - 1, 1.0))
        advantages_BT = advantages_BT / (deviations_BT + cfg.epsilon)
    elif cfg.scale == "batch":
        count = jnp.maximum(last_BT.sum(), 1)
        all_BT = jnp.where(last_BT, samples.rewards, 0.0)
        squares = jnp.where(last_BT, jnp.square(all_BT - all_BT.sum() / count), 0.0).sum()
        advantages_BT = advantages_BT / (
            jnp.sqrt(squares / jnp.maximum(count - 1, 1)) + cfg.epsilon
        )
    return broadcast_last(jnp.where(last_BT, advantages_BT, 0.0), samples.segments)


def suffix_sums(x_BT: Array, segments_BT: Array) -> Array:
    """Sum of x over a sample from each position on."""
    return jnp.flip(running_sums(jnp.flip(x_BT, 1), jnp.flip(segments_BT, 1)), 1)


def generalized_advantages(
    cfg: AdvantageConfig, rewards_BT: Array, values_BT: Array, samples: Samples
) -> Array:
    """Generalized advantage estimates over the tokens that the model chose, 0 elsewhere (Schulman
    et al. 2016, arXiv:1506.02438, eq. 16); tokens of an environment between them take no time."""
    # From the end of the row backwards; each sample begins anew at its last position.
    ends_BT = is_last(samples.segments)

    def back(
        carry: tuple[Array, Array], at: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        after_B, value_B = carry
        reward_B, now_B, chosen_B, end_B = at
        # After a sample's last position there is no value and no advantage.
        after_B, value_B = (jnp.where(end_B, 0.0, x) for x in (after_B, value_B))
        error_B = reward_B + cfg.gamma * value_B - now_B
        advantage_B = error_B + cfg.gamma * cfg.lam * after_B
        # Tokens that the model did not choose pass both on.
        carry = jnp.where(chosen_B, advantage_B, after_B), jnp.where(chosen_B, now_B, value_B)
        return carry, jnp.where(chosen_B, advantage_B, 0.0)

    zeros_B = jnp.zeros(rewards_BT.shape[0])
    columns = rewards_BT.T, values_BT.T, samples.mask.T > 0, ends_BT.T
    _, made_TB = jax.lax.scan(back, (zeros_B, zeros_B), columns, reverse=True)
    return made_TB.T


def whiten(x_BT: Array, mask_BT: Array) -> Array:
    """0 in mean and 1 in deviation (ddof 1) over the tokens of the mask."""
    count = mask_BT.sum()
    mean = (x_BT * mask_BT).sum() / jnp.maximum(count, 1)
    squares = (jnp.square(x_BT - mean) * mask_BT).sum() / jnp.maximum(count - 1, 1)
    return (x_BT - mean) * jax.lax.rsqrt(squares + TINY)
