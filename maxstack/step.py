"""The training step and the evaluation step, as functions of the state and a batch."""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxstack import optim, sharding
from maxstack.faults import guard
from maxstack.kernels import tuning
from maxstack.models.model import model_of
from maxstack.objectives.objective import Batch, Loss, Models, Objective, divisor, row_keys
from maxstack.optim import rounding
from maxstack.state import Moves, State, Tree

if TYPE_CHECKING:
    from maxstack.schema.config import Config


def training_step(
    cfg: "Config",
    tx: optax.GradientTransformationExtraArgs,
    trained: Tree,
    changed: Tree,
    objective: Objective,
    models: Callable[[Tree, Tree], Models],
    moves: Moves,
    state: State,
    batch: Batch,
    frozen: Tree = None,
) -> tuple[State, dict[str, jax.Array]]:
    """One update from a batch -> the next state and its scalars. `tx` updates the weights that are
    `trained`, of those that are `changed`; the loss of `models(params, frozen)` is summed over
    microbatches, and a refused update changes neither weights nor optimizer state."""
    state = moves.to_devices(state)
    params, rest = (
        only(trained, state.params),
        only(jax.tree.map(operator.not_, trained), state.params),
    )
    key = jax.random.key(cfg.train.seed, impl="threefry2x32")
    key = jax.random.fold_in(key, state.step)
    batch = objective.prepare(batch, key)
    if cfg.lora and cfg.lora.dropout:
        keys = row_keys(key, cfg.train.batch_size)
        batch = {**batch, "keys": sharding.constrain(keys, "batch")}
    if objective.coupled and cfg.train.accumulate > 1:
        measured = _by_microbatches(
            lambda batch: objective.measure(models(joined(params, rest), frozen), batch),
            batch,
            cfg.train.accumulate,
        )
        batch = objective.weigh(measured)
    batch = {**batch, **objective.factors(batch)}
    summed, grads = _gradient(
        lambda params, batch: objective.loss(models(joined(params, rest), frozen), batch),
        params,
        batch,
        cfg.train.accumulate,
    )
    assert "loss" in summed.metrics, f"objective.kind={cfg.objective.kind}: no metrics['loss']"
    with jax.named_scope("optimizer"):
        weight = divisor(summed.weight)
        grads = moves.like_optimizer(jax.tree.map(lambda g: g / weight, grads))
        value = summed.total / weight
        norm = optax.tree.norm(grads)
        skipped, guarded = guard.judge(cfg.faults, state.guard, value, norm, summed.weight)
        accepted = skipped == guard.ACCEPTED
        after_step = functools.partial(
            model_of(cfg.model).after_step, cfg.model, reports=summed.reports
        )

        def updated() -> tuple[Tree, Tree]:
            updates, opt = tx.update(grads, state.opt, params, value=value, grad=grads)
            moved = rounding.moved(params, updates, cfg.optimizer.rounding, key)
            moved = joined(moved, rest)
            if cfg.lora:
                return moved, opt
            after = after_step(moved)[0]
            kept = jax.tree.map(
                lambda moves, new, old: new if moves else old, changed, after, moved
            )
            return kept, opt

        new_params, opt = guard.either(accepted, updated, (state.params, state.opt))
        reported = after_step(state.params)[1]
        reported |= rounding.still(params, only(trained, new_params))
    scalars = _means(summed.metrics, weight) | reported
    scalars |= {
        "weight": summed.weight,
        "grad_norm": norm,
        "skipped": skipped,
        "refused": guarded.refused,
    }
    if rate := optim.learning_rate_at(cfg.optimizer, cfg.train.steps):
        scalars["learning_rate"] = jnp.asarray(rate(state.guard.updates))
    behind = older(cfg, changed, state)
    return moves.home(State(state.step + 1, new_params, opt, guarded, behind)), scalars


def skipped(cfg: "Config", changed: Tree, state: State) -> State:
    """The state with one more batch passed over."""
    return state._replace(step=state.step + 1, behind=older(cfg, changed, state))


def older(cfg: "Config", changed: Tree, state: State) -> tuple[Tree, ...]:
    """`State.behind` after one more step: where that is the first of a rollout, with the weights
    before it."""
    if not state.behind:
        return ()
    assert cfg.rollout
    moved = only(changed, state.params), *state.behind[:-1]
    if cfg.rollout.steps == 1:
        return moved
    begins = state.step % cfg.rollout.steps == 0
    return guard.where(begins, moved, state.behind)


def _gradient(
    loss: Callable[..., Loss], params: Tree, batch: Batch, pieces: int
) -> tuple[Loss, Tree]:
    """Sums of the loss and of its gradient over the batch, `pieces` microbatches one after the
    other."""

    def total(params: Tree, batch: Batch) -> tuple[jax.Array, Loss]:
        result = loss(params, batch)
        return result.total, result

    def one(batch: Batch) -> tuple[Loss, Tree]:
        (_, result), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
        return result, grads

    if pieces == 1:
        return one(batch)
    cut, whole = _cut(batch, pieces)
    zero = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.float32),
        jax.eval_shape(one, jax.tree.map(lambda x: x[0], cut) | whole),
    )

    def add(sums: Tree, cut: Batch) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, one({**cut, **whole})), None

    return jax.lax.scan(add, zero, cut)[0]


def _by_microbatches(f: Callable[[Batch], Batch], batch: Batch, pieces: int) -> Batch:
    """`f`, which gives arrays of rows, of each microbatch -> its arrays of the whole batch."""
    cut, whole = _cut(batch, pieces)

    def one(_: None, cut: Batch) -> tuple[None, Batch]:
        return None, {name: x for name, x in f({**cut, **whole}).items() if x.ndim}

    _, made = jax.lax.scan(one, None, cut)
    rows = {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in made.items()}
    return {**whole, **rows}


def _cut(batch: Batch, pieces: int) -> tuple[Batch, Batch]:
    """Arrays of rows with a leading axis of microbatches, and those that all get. Row r goes to
    microbatch r % pieces, so that each device cuts its own rows and none moves."""
    cut = {
        name: x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1)
        for name, x in batch.items()
        if x.ndim
    }
    return cut, {name: x for name, x in batch.items() if not x.ndim}


def _means(metrics: Batch, weight: jax.Array) -> dict[str, jax.Array]:
    """Sums divided by the weight, or by their own, which stays beside them, by name."""
    own = {name: total for name, total in metrics.items() if name.endswith("/weight")}
    means = {
        name: total / divisor(own.get(f"{name}/weight", weight))
        for name, total in metrics.items()
        if name not in own
    }
    return means | own


def traced_within(mesh: Mesh, cfg: "Config", f: Callable) -> Callable:
    """`f`, traced on the mesh and with the run's table of block sizes."""

    @functools.wraps(f)
    def traced(*args: Any) -> Any:
        with sharding.use(mesh, cfg.mesh), tuning.use(cfg.run.tuned):
            return f(*args)

    return traced


def only(chosen: Tree, tree: Tree) -> Tree:
    """The leaves of `tree` that are chosen, None in place of the others; `chosen` is as `tree`, of
    booleans."""
    return jax.tree.map(lambda wanted, leaf: leaf if wanted else None, chosen, tree)


def joined(first: Tree, second: Tree) -> Tree:
    """The tree of which each has the leaves that are None in the other."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None
    )
