"""assemble(cfg, mesh) -> Run: shapes, shardings and functions of one run, and no arrays. train.py
runs it, tests lower it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import optim
from maxstack.data.batches import Batches
from maxstack.faults import guard
from maxstack.hardware import compiling
from maxstack.kernels.backends import Choice, recording
from maxstack.models.flops import Count, components, forward_pass
from maxstack.objectives.objective import Batch, Models, Objective, objective_of
from maxstack.schema.objective import NextTokenConfig
from maxstack.state import Moves, State, Tree, count, flat, of_state, of_weights, tree
from maxstack.step import joined, only, skipped, traced_within, training_step
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
    """Booleans in that shape: weights that a step changes, by the optimizer or by a rule of the
    model."""
    objective: Objective
    """Fields of a batch, and the loss."""
    batches: Batches
    """Their shapes and shardings; rows of a process put onto its devices."""
    weights: PlacedWeights
    """By path: where they lie, which are quantized or have adapters, and how they are made."""
    graph: Any
    """The model's structure: nnx.merge(graph, nnx.State(params)) is the model."""
    init: Callable[[], State]
    """Fresh weights and optimizer state, made where they will live."""
    start: Callable[[Tree], State]
    """Given weights, which are donated, with fresh optimizer state."""
    others: Mapping[str, "Run"]
    """Models beside this one that have an architecture of their own: the teacher."""
    step: Any
    """jitted (state, batch[, frozen]) -> (state, scalars); the state is donated. scalars: loss,
    weight, grad_norm, learning_rate, ...; skipped (0: the update was accepted, 1: not finite, 2: a
    spike) and refused (updates in a row)."""
    skip_batch: Callable[[State], State]
    """The state with one more batch passed over: nothing but its step changes."""
    eval_step: Any
    """jitted (params, batch[, frozen]) -> sums, as Objective.evaluate gives them."""
    annotate: Any
    """jitted (params, batch[, frozen]) -> the objective's annotations of a batch."""
    of_models: Callable[[Callable[[Models, Batch], Batch]], Any]
    """A function of models and a batch -> jitted (params, batch[, frozen]) -> its arrays, whole on
    every device."""

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that a step changes."""
        return count(only(self.changed, self.abstract.params))[0]

    @property
    def flops(self) -> dict[str, Count]:
        """Training FLOPs a token by component."""
        return self._flops(self.cfg.data.seq_len)

    @property
    def flops_per_token(self) -> float:
        """Causal training FLOPs a token."""
        return self.flops_of(self.cfg.data.seq_len)

    def flops_of(self, length: int) -> float:
        """The same in rows of another length."""
        return sum(count.causal for count in self._flops(length).values())

    @functools.cached_property
    def _flops(self) -> Callable[[int], dict[str, Count]]:
        @functools.lru_cache
        def flops(length: int) -> dict[str, Count]:
            adapters, passes = self.weights.adapters, self.objective.forward_passes
            return components(self.cfg.model, length, adapters, passes) | {
                name: forward_pass(other.cfg.model, length) for name, other in self.others.items()
            }

        return flops

    def begin_with(self, weights: dict[str, Any]) -> State:
        """The state before the first step: the weights by path, with the adapter that lora.adapter
        names, and fresh optimizer state."""
        folder = self.cfg.lora and self.cfg.lora.adapter
        return self.start(tree(self.weights.with_adapter(weights, folder) if folder else weights))

    @property
    def abstract_arguments(self) -> tuple[Any, ...]:
        """Arguments of `step`: the state, a batch, and where the objective has second sets
        of weights, these by name: of each, the weights that a step changes in the first."""
        second = only(self.changed, self.abstract.params)
        frozen = {
            name: self.others[name].abstract.params if name in self.others else second
            for name in self.objective.frozen
        }
        return self.abstract, self.batches.abstract(), *((frozen,) if frozen else ())

    @property
    def kernels(self) -> list[Choice]:
        """The kernels that serve the step. ConfigError where one is asked for that cannot serve."""
        return self._traced[1]

    def lower(self) -> Any:
        """The step for the compiler: jax's Lowered."""
        return self._traced[0].lower()

    @functools.cached_property
    def _traced(self) -> tuple[Any, list[Choice]]:
        """The step as jax traces it, once, and the choices that are made on the way."""
        with recording() as choices:
            return self.step.trace(*self.abstract_arguments), choices

    def within(self, f: Callable) -> Callable:
        """`f`, traced as the step is: on the run's mesh, with its table of block sizes."""
        return traced_within(self.mesh, self.cfg, f)


def of_teacher(cfg: "Config") -> "Config":
    """The configuration of the teacher of a run, on the run's mesh."""
    return cfg.model_copy(
        update={
            "model": cfg.teacher,
            "teacher": None,
            "lora": None,
            "quantization": type(cfg.quantization)(),
            "objective": NextTokenConfig(kind="next_token"),
        }
    )


def assemble(cfg: "Config", mesh: Mesh, trains: bool = True) -> Run:
    """Resolve everything that a run is made of; raises ConfigError where the parts do not fit. One
    that never trains has no optimizer."""
    rewrite = Rewrite(cfg)
    graph, params, info = rewrite.graph, *of_weights(rewrite.state, rewrite.replaced)
    if trains:
        trained, changed = optim.trained(cfg.optimizer, info), optim.changed(cfg.optimizer, info)
    else:
        trained = jax.tree.map(lambda _: False, info)
        changed = jax.tree.map(lambda i: i.carried and not i.frozen, info)
    tx = optax.with_extra_args_support(
        optim.build(cfg.optimizer, cfg.train.steps, info) if trains else optax.identity()
    )
    abstract = State(
        jax.ShapeDtypeStruct((), jnp.int32),
        params,
        jax.eval_shape(tx.init, only(trained, params)),
        jax.eval_shape(guard.fresh),
        (only(changed, params),) * (cfg.rollout.behind if cfg.rollout and trains else 0),
    )
    shardings = of_state(abstract, info, mesh, cfg.mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    everywhere = NamedSharding(mesh, PartitionSpec())

    def start(params: Tree) -> State:
        behind = (only(changed, params),) * len(abstract.behind)
        opt = tx.init(only(trained, params))
        return State(jnp.zeros((), jnp.int32), params, opt, guard.fresh(), behind)

    objective = objective_of(cfg, trains)
    others = {"teacher": assemble(of_teacher(cfg), mesh, trains=False)} if cfg.teacher else {}
    moves = Moves(shardings, abstract, info, mesh, cfg.mesh)

    def models(params: Tree, frozen: Tree) -> Models:
        second = {}
        for name, given in (frozen or {}).items():
            other = others.get(name)
            own = moves.weights_to_devices(given, other.info if other else info)
            whole = own if other else joined(own, params)
            second[name] = nnx.merge(other.graph if other else graph, nnx.State(whole))
        return Models(nnx.merge(graph, nnx.State(params)), second)

    def of_models(f: Callable[[Models, Batch], Batch]) -> Any:
        def by_weights(params: Tree, batch: Batch, frozen: Tree = None) -> Batch:
            return f(models(moves.weights_to_devices(params), frozen), batch)

        return jax.jit(
            traced_within(mesh, cfg, by_weights),
            out_shardings=everywhere,
            compiler_options=options,
        )

    step = functools.partial(training_step, cfg, tx, trained, changed, objective, models, moves)
    options, ordered = compiling.options_for(cfg, mesh), compiling.in_order(mesh)
    return Run(
        cfg=cfg,
        mesh=mesh,
        abstract=abstract,
        info=info,
        changed=changed,
        objective=objective,
        batches=Batches(cfg, mesh, objective.fields),
        weights=PlacedWeights(cfg, mesh, rewrite, flat(abstract.params)),
        graph=graph,
        others=others,
        start=jax.jit(
            traced_within(mesh, cfg, start),
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=ordered,
        ),
        init=jax.jit(
            traced_within(mesh, cfg, lambda: start(rewrite.initial(cfg.train.seed))),
            out_shardings=shardings,
            compiler_options=compiling.quickly(mesh),
        ),
        step=jax.jit(
            traced_within(mesh, cfg, step),
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
            compiler_options=options,
        ),
        skip_batch=jax.jit(
            functools.partial(skipped, cfg, changed),
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=ordered,
        ),
        eval_step=of_models(objective.evaluate),
        annotate=of_models(objective.annotate),
        of_models=of_models,
    )
