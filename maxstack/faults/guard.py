"""Inside the step: which updates are refused, so that no bad value reaches weights or optimizer
state."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, Literal

from maxstack.faults.policy import ACCEPTED, NOT_FINITE, SPIKE
from maxstack.schema.faults import FaultsConfig, SpikeConfig

Tree = Any


class Guard(NamedTuple):
    """What the judgement of a step needs of those before it: single numbers, part of the state that
    checkpoints hold."""

    updates: Any
    """int32: accepted updates, which is how far the optimizer's schedules are."""
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
    """Before the first step."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Guard(none, none, zero, zero, zero, zero, none, none)


def judge(
    cfg: FaultsConfig, guard: Guard, loss: jax.Array, norm: jax.Array, weight: jax.Array
) -> tuple[jax.Array, Guard]:
    """ACCEPTED, NOT_FINITE or SPIKE as int32, and the guard after it, from a step's mean loss,
    gradient norm and weight of its targets.

    A step without targets says nothing of the loss: it is neither judged nor measured.
    """
    spike, height = (
        cfg.spike or SpikeConfig(),
        jnp.log(jnp.maximum(norm.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)),
    )
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
        *_taken(guard.loss_mean, guard.loss_variance, loss.astype(jnp.float32), share),
        *_taken(guard.norm_mean, guard.norm_variance, height, share),
        jnp.zeros_like(guard.refused),
        guard.refused_in_all,
    )
    unmeasured = guard._replace(updates=after.updates, refused=after.refused)
    refused = guard._replace(refused=guard.refused + 1, refused_in_all=guard.refused_in_all + 1)
    return skipped, chosen(accepted, chosen(counts, after, unmeasured), refused)


def update(
    accepted: jax.Array,
    f: Callable[..., tuple[Tree, Tree]],
    grads: Tree,
    opt: Tree,
    params: Tree,
    **extra: Any,
) -> tuple[Tree, Tree]:
    """An Optax update f(grads, opt, params, **extra) -> (updates, opt), but with the state as it
    was where it is not accepted.

    Each array of the state is chosen in the very moment that f has made it, and f goes on with what
    was chosen: the same value where the update is accepted, no matter where it is not. Chosen in
    the end, old and new would both be needed at once, and XLA on a CPU copies the whole state.
    """
    inputs = grads, opt, params, extra
    closed, shapes = jax.make_jaxpr(
        lambda grads, opt, params, extra: f(grads, opt, params, **extra), return_shape=True
    )(*inputs)
    program, old = closed.jaxpr, jax.tree.leaves(opt)
    made = program.outvars[len(program.outvars) - len(old) :]
    values = dict(
        zip(
            [*program.constvars, *program.invars],
            [*closed.consts, *jax.tree.leaves(inputs)],
            strict=True,
        )
    )
    times = Counter(v for v in made if not isinstance(v, Literal))
    kept = {
        v: leaf
        for v, leaf in zip(made, old, strict=True)
        if not isinstance(v, Literal) and times[v] == 1 and v not in values
    }
    for eqn in program.eqns:
        needed = list({v: None for v in eqn.invars if not isinstance(v, Literal)})
        given = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        one = program.replace(constvars=[], invars=needed, outvars=given, eqns=[eqn])
        for v, value in zip(
            given, jax.core.eval_jaxpr(one, [], *(values[v] for v in needed)), strict=True
        ):
            values[v] = jax.lax.select(accepted, value, kept[v]) if v in kept else value
    found = [v.val if isinstance(v, Literal) else values[v] for v in program.outvars]
    updates, after = jax.tree.unflatten(jax.tree.structure(shapes), found)
    chosen_late = [
        leaf
        if not isinstance(v, Literal) and v in kept
        else jax.lax.select(accepted, jnp.asarray(leaf, before.dtype), before)
        for v, leaf, before in zip(made, jax.tree.leaves(after), old, strict=True)
    ]
    return updates, jax.tree.unflatten(jax.tree.structure(opt), chosen_late)


def chosen(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """One of two trees by a single truth value, bit for bit."""
    return jax.tree.map(lambda a, b: jax.lax.select(condition, a, b), yes, no)


def _above(cfg: SpikeConfig, mean: jax.Array, variance: jax.Array, value: jax.Array) -> jax.Array:
    return value > mean + cfg.deviations * jnp.sqrt(variance)


def _taken(
    mean: jax.Array, variance: jax.Array, value: jax.Array, share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance with a further value of weight `share` (Finch 2009, Incremental calculation
    of weighted mean and variance, section 9)."""
    distance = value - mean
    return mean + share * distance, (1.0 - share) * (variance + share * distance * distance)
