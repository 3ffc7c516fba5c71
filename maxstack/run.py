"""assemble(cfg, mesh) -> Run: shapes, shardings and functions of one run, without any array.

The model is built abstractly and its weights become nested dicts of shapes, which is all that the
optimizer's state, the shardings and the programs are derived from. train.py runs a Run; plan and
the tests lower the same one for devices that need not be here, so that they cannot describe
another program than the one that trains.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import optim, sharding
from maxstack.data.batches import Batches
from maxstack.faults import guard
from maxstack.hardware import compiling
from maxstack.kernels.backends import Choice, record_choices
from maxstack.models.flops import Count, components, forward_pass
from maxstack.objectives.objective import Batch, Models, Objective, objective_of
from maxstack.schema.objective import NextTokenConfig
from maxstack.state import Moves, State, Tree, count, flat, of_state, of_weights, tree
from maxstack.step import TrainingStep, combine, select, skip, traced_within
from maxstack.weights.placement import PlacedWeights
from maxstack.weights.rewrite import Rewrite

if TYPE_CHECKING:
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class Run:
    """A run before any array exists."""

    cfg: "Config"
    mesh: Mesh
    abstract: State
    """Shapes, dtypes and shardings of the state."""
    info: Tree
    """optim.ParamInfo of every weight, in the shape of `abstract.params`."""
    changed: Tree
    """Booleans in the same shape: weights that a step changes, by the optimizer or by a rule of the
    model."""
    objective: Objective
    """Fields of a batch, and the loss."""
    batches: Batches
    """Shapes and shardings of batches, and the way of a process's rows to its devices."""
    weights: PlacedWeights
    """By path: shardings, quantization, adapters, and how the weights are made."""
    graph: Any
    """The model's structure: nnx.merge(graph, nnx.State(params)) is the model."""
    init: Callable[[], State]
    """Draw initial weights and make the optimizer's state, in their shards."""
    start: Callable[[Tree], State]
    """Make the first state from given weights, which are donated."""
    others: Mapping[str, "Run"]
    """Models with an architecture of their own beside this one: the teacher."""
    step: Any
    """jitted (state, batch[, frozen]) -> (state, scalars); the state is donated. scalars: loss,
    weight, grad_norm, learning_rate, ...; skipped (0: the update was accepted, 1: not finite, 2: a
    spike) and refused (updates in a row)."""
    skip_batch: Callable[[State], State]
    """The state after a skipped batch: only its step changes."""
    eval_step: Any
    """jitted (params, batch[, frozen]) -> sums, as from Objective.evaluate."""
    annotate: Any
    """jitted (params, batch[, frozen]) -> the objective's annotations of a batch."""
    of_models: Callable[[Callable[[Models, Batch], Batch]], Any]
    """A function of models and a batch -> jitted (params, batch[, frozen]) -> its arrays, whole on
    every device."""

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that a step changes."""
        return count(select(self.changed, self.abstract.params))[0]

    @property
    def flops(self) -> dict[str, Count]:
        """Training FLOPs a token by component."""
        return self._flops(self.cfg.data.seq_len)

    @property
    def flops_per_token(self) -> float:
        """Causal training FLOPs a token."""
        return self.flops_of(self.cfg.data.seq_len)

    def flops_of(self, length: int) -> float:
        """Causal training FLOPs a token in rows of this length."""
        return sum(count.causal for count in self._flops(length).values())

    @functools.cached_property
    def _flops(self) -> Callable[[int], dict[str, Count]]:
        @functools.cache
        def flops(length: int) -> dict[str, Count]:
            # Cached within the run's own property: functools.cache on a method would hash the run,
            # and its fields hold dicts. Stages ask for a few lengths, at every step.
            adapters, passes = self.weights.adapters, self.objective.forward_passes
            return components(self.cfg.model, length, adapters, passes) | {
                name: forward_pass(other.cfg.model, length) for name, other in self.others.items()
            }

        return flops

    def begin_with(self, weights: dict[str, Any]) -> State:
        """The state before the first step: these weights by path, with the adapter that
        lora.adapter names."""
        folder = self.cfg.lora and self.cfg.lora.adapter
        return self.start(tree(self.weights.with_adapter(weights, folder) if folder else weights))

    @property
    def abstract_arguments(self) -> tuple[Any, ...]:
        """Arguments of `step`: the state, a batch, and the objective's second sets of weights by
        name, where it has some."""
        second = select(self.changed, self.abstract.params)
        frozen = {
            name: self.others[name].abstract.params if name in self.others else second
            for name in self.objective.frozen
        }
        return self.abstract, self.batches.abstract(), *((frozen,) if frozen else ())

    @property
    def kernels(self) -> list[Choice]:
        """The kernels that the step uses. ConfigError where a requested one does not support it."""
        return self._traced[1]

    def lower(self) -> Any:
        """Lower the step: jax's Lowered."""
        return self._traced[0].lower()

    @functools.cached_property
    def _traced(self) -> tuple[Any, list[Choice]]:
        """The traced step, and the kernels chosen while it was traced."""
        # Kernels are chosen while the step is traced, by the shapes that a device really has.
        # Lowering goes on from that trace, so the step is traced once.
        with record_choices() as choices:
            return self.step.trace(*self.abstract_arguments), choices

    def within(self, f: Callable) -> Callable:
        """Wrap `f` so that it is traced as the step is."""
        return traced_within(self.mesh, self.cfg, f)


@dataclasses.dataclass(frozen=True)
class _Models:
    """Makes models from weights: of a run, and of its second sets of weights."""

    graph: Any
    info: Tree
    others: Mapping[str, Run]
    moves: Moves

    def __call__(self, params: Tree, frozen: Tree) -> Models:
        second = {name: self._second(name, given, params) for name, given in (frozen or {}).items()}
        return Models(nnx.merge(self.graph, nnx.State(params)), second)

    def _second(self, name: str, given: Tree, params: Tree) -> Any:
        """The model from a second set of weights; it shares what no step changes with the first."""
        if other := self.others.get(name):
            own = self.moves.weights_to_devices(given, other.info)
            return nnx.merge(other.graph, nnx.State(own))
        own = self.moves.weights_to_devices(given, self.info)
        # The second set holds only what a step changes: a reference beside adapters costs an
        # adapter.
        return nnx.merge(self.graph, nnx.State(combine(own, params)))


def of_teacher(cfg: "Config") -> "Config":
    """The configuration of a run's teacher, on the run's mesh."""
    return cfg.model_copy(
        update={
            "model": cfg.teacher,
            "teacher": None,
            "lora": None,
            "quantization": type(cfg.quantization)(),
            # The simplest objective: the run's own would ask for a teacher again.
            "objective": NextTokenConfig(kind="next_token"),
        }
    )


def assemble(cfg: "Config", mesh: Mesh | None = None, trains: bool = True) -> Run:
    """Resolve everything that a run is made of, on a mesh, by default that of `cfg.mesh` over all
    devices; without `trains` there is no optimizer. ConfigError where the parts do not fit."""
    if mesh is None:
        mesh = sharding.make_mesh(cfg.mesh, jax.devices())
    rewrite = Rewrite(cfg)
    params, info = of_weights(rewrite.state, rewrite.replaced)
    if trains:
        trained, changed = (
            optim.trained_mask(cfg.optimizer, info),
            optim.changed_mask(cfg.optimizer, info),
        )
        optimizer = optim.build(cfg.optimizer, cfg.train.steps, info)
        behind = cfg.rollout.behind if cfg.rollout else 0
    else:
        trained = jax.tree.map(lambda _: False, info)
        changed = jax.tree.map(lambda i: i.carried and not i.frozen, info)
        optimizer, behind = optax.identity(), 0
    # The step gives each optimizer the loss and the gradient; those that need neither would refuse
    # them.
    tx = optax.with_extra_args_support(optimizer)

    def start(params: Tree) -> State:
        return State(
            jnp.zeros((), jnp.int32),
            params,
            # Frozen weights have no moments: their leaves are absent, not zeros.
            tx.init(select(trained, params)),
            guard.initial(),
            # Rollouts before the first have the weights with which the run begins.
            (select(changed, params),) * behind,
        )

    # Nothing is allocated: the shardings of the optimizer's state follow from its shapes, whatever
    # transformations Optax chains.
    abstract = jax.eval_shape(start, params)
    shardings = of_state(abstract, info, mesh, cfg.mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    moves = Moves(shardings, abstract, info, mesh, cfg.mesh)
    objective = objective_of(cfg, trains)
    others = {"teacher": assemble(of_teacher(cfg), mesh, trains=False)} if cfg.teacher else {}
    models = _Models(rewrite.graph, info, others, moves)
    step = TrainingStep(cfg, tx, trained, changed, objective, models, moves)
    # Scalars lie whole on every device, so each process reads them without asking another.
    everywhere = NamedSharding(mesh, PartitionSpec())
    # The user's flags go to the step and its like as compile options: plan compiles with them too,
    # and one that XLA does not know is an error by name. In the environment it would end the
    # process.
    options, ordered = compiling.options_for(cfg, mesh), compiling.in_order(mesh)

    def of_models(f: Callable[[Models, Batch], Batch]) -> Any:
        def by_weights(params: Tree, batch: Batch, frozen: Tree = None) -> Batch:
            return f(models(moves.weights_to_devices(params), frozen), batch)

        return jax.jit(
            traced_within(mesh, cfg, by_weights),
            out_shardings=everywhere,
            compiler_options=options,
        )

    return Run(
        cfg=cfg,
        mesh=mesh,
        abstract=abstract,
        info=info,
        changed=changed,
        objective=objective,
        batches=Batches(cfg, mesh, objective.fields),
        weights=PlacedWeights(cfg, mesh, rewrite, flat(abstract.params)),
        graph=rewrite.graph,
        others=others,
        start=jax.jit(
            traced_within(mesh, cfg, start),
            # The first state takes over the memory of the given weights.
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=ordered,
        ),
        init=jax.jit(
            traced_within(mesh, cfg, lambda: start(rewrite.initial(cfg.train.seed))),
            out_shardings=shardings,
            # It runs once, and compiles in a third of the time (4.3 -> 1.4 s).
            compiler_options=compiling.quickly(mesh),
        ),
        step=jax.jit(
            traced_within(mesh, cfg, step),
            # XLA writes the new state over the old one; memory holds one of them.
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
            compiler_options=options,
        ),
        skip_batch=jax.jit(
            functools.partial(skip, cfg.rollout, changed),
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=ordered,
        ),
        eval_step=of_models(objective.evaluate),
        annotate=of_models(objective.annotate),
        of_models=of_models,
    )
