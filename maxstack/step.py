"""The training step, as a function of the state and a batch.

The weights are split into two trees with holes: those that the optimizer trains and the rest. The
loss is differentiated by the first and closes over the second, so what is frozen has no gradient.
Microbatches add sums of the loss and its gradient, which are divided once, by the weight of the
whole batch. The guard judges the loss and the norm of the gradient on the device, and a refused
update leaves weights and optimizer state as they were; the host reads its verdict a step later
(faults/policy.py), so that no device waits for it.
"""

import dataclasses
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
from maxstack.objectives.objective import Batch, Loss, Metrics, Models, Objective, divisor, row_keys
from maxstack.optim import rounding
from maxstack.schema.rollout import RolloutConfig
from maxstack.state import Moves, State, Tree

if TYPE_CHECKING:
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """One update from a batch: (state, batch[, frozen]) -> the next state and its scalars."""

    cfg: "Config"
    tx: optax.GradientTransformationExtraArgs
    trained: Tree
    """Booleans: weights that `tx` updates."""
    changed: Tree
    """Booleans: those, and weights that a rule of the model updates."""
    objective: Objective
    make_models: Callable[[Tree, Tree], Models]
    """Models from weights and from second sets of weights."""
    moves: Moves

    def __call__(
        self, state: State, batch: Batch, frozen: Tree = None
    ) -> tuple[State, dict[str, jax.Array]]:
        cfg, objective = self.cfg, self.objective
        state = self.moves.to_devices(state)
        # Frozen weights are closed over, so there is no gradient to make and throw away, and the
        # optimizer keeps no moments of them.
        params = select(self.trained, state.params)
        rest = select(jax.tree.map(operator.not_, self.trained), state.params)

        def models(params: Tree) -> Models:
            return self.make_models(combine(params, rest), frozen)

        # The implementation is named, so that jax_default_prng_impl changes no draw. Keys belong to
        # the step, so a run that resumes draws as one that was not interrupted.
        key = jax.random.key(cfg.train.seed, impl="threefry2x32")
        key = jax.random.fold_in(key, state.step)
        batch = self._prepare(batch, key, lambda batch: objective.measure(models(params), batch))
        summed, grads = _gradient(
            lambda params, batch: objective.loss(models(params), batch),
            params,
            batch,
            cfg.train.accumulate,
        )
        assert "loss" in summed.metrics, f"objective.kind={cfg.objective.kind}: no metrics['loss']"
        # One division, by the weight of the whole batch: a mean of microbatches' means would give
        # tokens of short microbatches more weight.
        with jax.named_scope("optimizer"):
            weight = divisor(summed.weight)
            grads = self.moves.like_optimizer(jax.tree.map(lambda g: g / weight, grads))
            loss = summed.total / weight
            # Of the gradient before any clipping in `tx`: what is judged and reported is the step's
            # own.
            norm = optax.tree.norm(grads)
            skipped, guarded = guard.judge(cfg.faults, state.guard, loss, norm, summed.weight)
            # The model's rules move weights that the optimizer does not see, by counts of the whole
            # batch: the selection bias of experts by the tokens that each got.
            after_step = functools.partial(
                model_of(cfg.model).after_step, cfg.model, reports=summed.reports
            )

            # A function, since on a CPU the guard makes it a branch.
            def update() -> tuple[Tree, Tree]:
                updates, opt = self.tx.update(grads, state.opt, params, value=loss, grad=grads)
                moved = rounding.apply_updates(params, updates, cfg.optimizer.rounding, key)
                moved = combine(moved, rest)
                # Beside adapters the base stays as it is, selection biases of experts among it.
                return moved if cfg.lora else self._by_rules(moved, after_step(moved)[0]), opt

            accepted = skipped == guard.ACCEPTED
            new_params, opt = guard.update_if(accepted, update, (state.params, state.opt))
            # Outside of the branch: a refused step reports its figures too.
            reported = after_step(state.params)[1]
            reported |= rounding.unchanged_share(params, select(self.trained, new_params))
        scalars = _means(summed.metrics, weight) | reported
        scalars |= {
            "weight": summed.weight,
            "grad_norm": norm,
            "skipped": skipped,
            "refused": guarded.refused,
        }
        if rate := optim.learning_rate_at(cfg.optimizer, cfg.train.steps):
            # By accepted updates, which is what the optimizer's schedules count.
            scalars["learning_rate"] = jnp.asarray(rate(state.guard.updates))
        # Of a refused update too: rollouts are counted by batches.
        behind = shift_behind(cfg.rollout, self.changed, state)
        return self.moves.home(State(state.step + 1, new_params, opt, guarded, behind)), scalars

    def _prepare(self, batch: Batch, key: jax.Array, measure: Callable[[Batch], Batch]) -> Batch:
        """The global batch with everything that is drawn or counted over all of it, before it is
        cut into microbatches."""
        cfg = self.cfg
        batch = self.objective.prepare(batch, key)
        if cfg.lora and cfg.lora.dropout:
            # A key for each row of the global batch, made before it is cut: dropout then does not
            # depend on microbatches, stages or the mesh.
            keys = row_keys(key, cfg.train.batch_size)
            batch = {**batch, "keys": sharding.constrain(keys, "batch")}
        # A loss whose rows need figures of the whole batch (KTO, BCO, AOT) cannot be summed over
        # microbatches as it stands, so a forward pass over all of them measures first.
        if self.objective.coupled and cfg.train.accumulate > 1:
            batch = self.objective.complete(_by_microbatches(measure, batch, cfg.train.accumulate))
        return {**batch, **self.objective.factors(batch)}

    def _by_rules(self, moved: Tree, after: Tree) -> Tree:
        """`moved` with the weights that the model's rules update, from `after`."""
        return jax.tree.map(
            lambda changes, new, old: new if changes else old, self.changed, after, moved
        )


def skip(rollout: RolloutConfig | None, changed: Tree, state: State) -> State:
    """The state after a batch that is skipped."""
    return state._replace(step=state.step + 1, behind=shift_behind(rollout, changed, state))


def shift_behind(rollout: RolloutConfig | None, changed: Tree, state: State) -> tuple[Tree, ...]:
    """`State.behind` after one more step: where that is the first of a rollout, the weights before
    it come first and the oldest go."""
    if not state.behind:
        return ()
    assert rollout
    shifted = select(changed, state.params), *state.behind[:-1]
    # Every step begins a rollout: no selection, which would copy the weights.
    if rollout.steps == 1:
        return shifted
    begins = state.step % rollout.steps == 0
    return guard.where(begins, shifted, state.behind)


def _gradient(
    loss: Callable[..., Loss], params: Tree, batch: Batch, pieces: int
) -> tuple[Loss, Tree]:
    """Sums of the loss and of its gradient over a batch, in `pieces` microbatches."""

    def total(params: Tree, batch: Batch) -> tuple[jax.Array, Loss]:
        result = loss(params, batch)
        return result.total, result

    def one(batch: Batch) -> tuple[Loss, Tree]:
        (_, result), grads = jax.value_and_grad(total, has_aux=True)(params, batch)
        return result, grads

    # No scan, and no second copy of the gradient in float32.
    if pieces == 1:
        return one(batch)
    cut, whole = _cut(batch, pieces)
    # Sums are float32 whatever the weights are: bfloat16 loses small summands after a few
    # additions.
    zero = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.float32),
        jax.eval_shape(one, jax.tree.map(lambda x: x[0], cut) | whole),
    )

    def add(sums: Tree, cut: Batch) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, one({**cut, **whole})), None

    # A scan, not a loop that is traced out: the program's size, and the activations of only one
    # microbatch, do not depend on how many there are.
    return jax.lax.scan(add, zero, cut)[0]


def _by_microbatches(f: Callable[[Batch], Batch], batch: Batch, pieces: int) -> Batch:
    """Apply `f`, which returns arrays of rows, to each microbatch -> its arrays for the whole
    batch."""
    cut, whole = _cut(batch, pieces)

    def one(_: None, cut: Batch) -> tuple[None, Batch]:
        return None, {name: x for name, x in f({**cut, **whole}).items() if x.ndim}

    # The inverse of `_cut`: row r of the batch is row r // pieces of microbatch r % pieces.
    _, made = jax.lax.scan(one, None, cut)
    rows = {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in made.items()}
    return {**whole, **rows}


def _cut(batch: Batch, pieces: int) -> tuple[Batch, Batch]:
    """Arrays of rows with a leading axis of microbatches, and scalars that every microbatch gets.
    Row r goes to microbatch r % pieces: each device cuts its own rows, and none moves to another
    device, as contiguous blocks of the sharded batch would."""
    cut = {
        name: x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1)
        for name, x in batch.items()
        if x.ndim
    }
    return cut, {name: x for name, x in batch.items() if not x.ndim}


def _means(metrics: Metrics, weight: jax.Array) -> dict[str, jax.Array]:
    """Each sum divided by its own weight where it has one, which stays in the result, else by
    `weight`."""
    # Weights stay in the result since only the host can leave out a mean over nothing (meter.py);
    # it was logged as 0 before.
    own = {name: total for name, total in metrics.items() if name.endswith("/weight")}
    means = {
        name: total / divisor(own.get(f"{name}/weight", weight))
        for name, total in metrics.items()
        if name not in own
    }
    return means | own


def traced_within(mesh: Mesh, cfg: "Config", f: Callable) -> Callable:
    """Wrap `f` so that it is traced on the mesh and with the run's table of block sizes."""

    @functools.wraps(f)
    def traced(*args: Any) -> Any:
        with sharding.use(mesh, cfg.mesh), tuning.use(cfg.run.tuned):
            return f(*args)

    return traced


def select(chosen: Tree, tree: Tree) -> Tree:
    """The leaves of `tree` where the booleans of `chosen` are true, None elsewhere."""
    return jax.tree.map(lambda wanted, leaf: leaf if wanted else None, chosen, tree)


def combine(first: Tree, second: Tree) -> Tree:
    """Merge two trees, each of which has None where the other has a leaf."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None
    )
