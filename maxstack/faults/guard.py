"""The judgement inside the step that refuses an update, so that no bad value reaches weights or
optimizer state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.faults.policy import ACCEPTED, NOT_FINITE, SPIKE
from maxstack.kernels.backends import Device
from maxstack.schema.faults import FaultsConfig, SpikeConfig

Tree = Any


class Guard(NamedTuple):
    """Statistics of the steps so far, by which the next is judged: single numbers, part of the
    state that checkpoints hold."""

    updates: Any
    """int32: accepted updates, which the optimizer's schedules count."""
    measured: Any
    """int32: values in the statistics, all of accepted updates."""
    loss_mean: Any
    loss_variance: Any
    norm_mean: Any
    """float32: of the logarithm of the gradient norm."""
    norm_variance: Any
    refused: Any
    """int32: refused updates in a row, up to this step."""
    refused_in_all: Any


def fresh() -> Guard:
    """The guard before the first step."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Guard(none, none, zero, zero, zero, zero, none, none)


def judge(
    cfg: FaultsConfig, guard: Guard, loss: jax.Array, norm: jax.Array, weight: jax.Array
) -> tuple[jax.Array, Guard]:
    """ACCEPTED, NOT_FINITE or SPIKE as int32, and the guard after it, from a step's mean loss,
    gradient norm and weight of its targets.

    A step without targets has no loss: it is neither judged nor measured.
    """
    spike = cfg.spike or SpikeConfig()
    height = jnp.log(jnp.maximum(norm.astype(jnp.float32), jnp.finfo(jnp.float32).tiny))
    finite, counts = jnp.isfinite(loss) & jnp.isfinite(norm), weight > 0
    high = jnp.zeros((), bool)
    if cfg.spike:
        high = _above(spike, guard.loss_mean, guard.loss_variance, loss) | _above(
            spike, guard.norm_mean, guard.norm_variance, height
        )
        high &= counts & (guard.measured >= spike.warm_up)
    skipped = jnp.where(finite, jnp.where(high, SPIKE, ACCEPTED), NOT_FINITE).astype(jnp.int32)
    accepted = skipped == ACCEPTED
    share = 1.0 / jnp.minimum(guard.measured + 1, spike.window).astype(jnp.float32)
    after = Guard(
        guard.updates + 1,
        guard.measured + 1,
        *_moments(guard.loss_mean, guard.loss_variance, loss.astype(jnp.float32), share),
        *_moments(guard.norm_mean, guard.norm_variance, height, share),
        jnp.zeros_like(guard.refused),
        guard.refused_in_all,
    )
    unmeasured = guard._replace(updates=after.updates, refused=after.refused)
    refused = guard._replace(refused=guard.refused + 1, refused_in_all=guard.refused_in_all + 1)
    return skipped, where(accepted, where(counts, after, unmeasured), refused)


def where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Tree `yes` where the single truth value `condition` holds, else tree `no`, bit for bit, in
    the types of `no`."""
    return jax.tree.map(functools.partial(jnp.where, condition), _in_types_of(no, yes), no)


def either(condition: jax.Array, yes: Callable[[], Tree], no: Tree) -> Tree:
    """What `yes` gives where the single truth value `condition` holds, else tree `no`, bit for bit,
    in the types of `no`: as a branch on CPUs, where XLA copies every array of a donated `no` before
    a selection; as a selection elsewhere, for on GPUs it copies them before a branch."""
    if Device.here().platform != "cpu":
        return where(condition, yes(), no)
    return jax.lax.cond(condition, lambda: _in_types_of(no, yes()), lambda: no)


def _in_types_of(other: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), tree, other)


def _above(cfg: SpikeConfig, mean: jax.Array, variance: jax.Array, value: jax.Array) -> jax.Array:
    return value > mean + cfg.deviations * jnp.sqrt(variance)


def _moments(
    mean: jax.Array, variance: jax.Array, value: jax.Array, share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance with a further value of weight `share` (Finch 2009, Incremental calculation
    of weighted mean and variance, section 9)."""
    distance = value - mean
    return mean + share * distance, (1.0 - share) * (variance + share * distance * distance)
