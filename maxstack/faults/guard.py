"""The guard inside the compiled step, which refuses bad updates.

An update is refused where the loss or the gradient norm is not finite, or, with `faults.spike`,
where the loss or the logarithm of the norm lies some standard deviations above its running mean.
Means and variances are of accepted updates alone, so a row of spikes does not become the norm; for
the first `warm_up` of them nothing is a spike. Weights, optimizer and these statistics then stay
bit for bit as they were, but the step still counts its batch: a batch number means the same in
metrics, checkpoints and rewinds, and schedules follow accepted updates. What a row of refusals
leads to is decided on the host (policy.py)."""

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
    """Statistics by which the next step is judged: scalars, part of the checkpointed state."""

    updates: Any
    """int32: accepted updates, the count of the optimizer's schedules."""
    measured: Any
    """int32: accepted updates in the statistics."""
    loss_mean: Any
    loss_variance: Any
    norm_mean: Any
    """float32: of the logarithm of the gradient norm."""
    norm_variance: Any
    refused: Any
    """int32: refused updates in a row, up to this step."""
    refused_in_all: Any


def initial() -> Guard:
    """Return the guard before the first step."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Guard(none, none, zero, zero, zero, zero, none, none)


def judge(
    cfg: FaultsConfig, guard: Guard, loss: jax.Array, norm: jax.Array, weight: jax.Array
) -> tuple[jax.Array, Guard]:
    """Judge a step by its mean loss, gradient norm and weight of targets. Return ACCEPTED,
    NOT_FINITE or SPIKE as int32, and the guard after the step.

    A step without targets has no loss, so it is accepted and left out of the statistics.
    """
    # Statistics are kept without faults.spike too: it may be set at a resume.
    spike = cfg.spike or SpikeConfig()
    # Norms differ by factors, so their logarithms are compared; the bound keeps a norm of 0, whose
    # logarithm would make the mean infinite for good.
    height = jnp.log(jnp.maximum(norm.astype(jnp.float32), jnp.finfo(jnp.float32).tiny))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    counts = weight > 0
    high = jnp.zeros((), bool)
    if cfg.spike:
        high = _is_above(spike, guard.loss_mean, guard.loss_variance, loss)
        high |= _is_above(spike, guard.norm_mean, guard.norm_variance, height)
        # A variance of few values says nothing.
        high &= counts & (guard.measured >= spike.warm_up)
    # Finite first: a comparison with NaN is false, so a NaN is never a spike.
    skipped = jnp.where(finite, jnp.where(high, SPIKE, ACCEPTED), NOT_FINITE).astype(jnp.int32)
    accepted = skipped == ACCEPTED
    # The mean of all values so far, then an exponential one of about `window` values: an
    # exponential mean from the start would lean on its first values.
    share = 1.0 / jnp.minimum(guard.measured + 1, spike.window).astype(jnp.float32)
    unmeasured = guard._replace(updates=guard.updates + 1, refused=jnp.zeros_like(guard.refused))
    loss_mean, loss_variance = _moments(
        guard.loss_mean, guard.loss_variance, loss.astype(jnp.float32), share
    )
    norm_mean, norm_variance = _moments(guard.norm_mean, guard.norm_variance, height, share)
    after = unmeasured._replace(
        measured=guard.measured + 1,
        loss_mean=loss_mean,
        loss_variance=loss_variance,
        norm_mean=norm_mean,
        norm_variance=norm_variance,
    )
    # The statistics stay: a row of spikes must not become the norm.
    refused = guard._replace(refused=guard.refused + 1, refused_in_all=guard.refused_in_all + 1)
    return skipped, where(accepted, where(counts, after, unmeasured), refused)


def where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Select tree `yes` where the scalar `condition` holds, else tree `no`, bit for bit, in the
    types of `no`."""
    # Types of the old state: the compiled step takes no others, and `where` would promote.
    return jax.tree.map(functools.partial(jnp.where, condition), _cast_like(no, yes), no)


def update_if(condition: jax.Array, yes: Callable[[], Tree], no: Tree) -> Tree:
    """Return `yes()` where the scalar `condition` holds, else tree `no`, bit for bit, in the types
    of `no`: by a branch on CPUs, where XLA copies every array of a donated `no` before a selection;
    by a selection elsewhere, since on GPUs it copies them before a branch."""
    # As a selection on a CPU, AdamW of 8.4 M weights took 64 ms instead of 39: the fusions of
    # update and selection both read the old state. As a branch on four H100, temporaries grew from
    # 143 to 537 MB (EXPERIMENTS.md).
    if Device.here().platform != "cpu":
        return where(condition, yes(), no)
    return jax.lax.cond(condition, lambda: _cast_like(no, yes()), lambda: no)


def _cast_like(other: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), tree, other)


def _is_above(
    cfg: SpikeConfig, mean: jax.Array, variance: jax.Array, value: jax.Array
) -> jax.Array:
    return value > mean + cfg.deviations * jnp.sqrt(variance)


def _moments(
    mean: jax.Array, variance: jax.Array, value: jax.Array, share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add a value of weight `share` to a mean and a variance (Finch 2009, Incremental calculation
    of weighted mean and variance, section 9)."""
    distance = value - mean
    return mean + share * distance, (1.0 - share) * (variance + share * distance * distance)
