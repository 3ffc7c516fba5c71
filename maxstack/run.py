"""assemble(cfg, mesh) -> Run: shapes, shardings and functions of one run, and no arrays. train.py
runs it, tests lower it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import optim, sharding
from maxstack.faults import guard
from maxstack.hardware import compiling
from maxstack.kernels.backends import Choice, recording
from maxstack.objectives.objective import Batch, Loss, Models, Objective, objective_of
from maxstack.state import Moves, State, Tree, count, flat, of_state, of_weights, tree
from maxstack.step import _step, _within, only
from maxstack.weights.placed import PlacedWeights
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
    objective: Objective
    """Fields of a batch, and the loss."""
    weights: PlacedWeights
    """By path: where they lie, which are quantized or have adapters, and how they are made."""
    graph: Any
    """The model's structure: nnx.merge(graph, nnx.State(params)) is the model."""
    init: Callable[[], State]
    """Fresh weights and optimizer state, made where they will live."""
    start: Callable[[Tree], State]
    """Given weights, which are donated, with fresh optimizer state."""
    step: Any
    """jitted (state, batch[, frozen]) -> (state, scalars); the state is donated. scalars: loss,
    weight, grad_norm, learning_rate, ...; skipped (0: the update was accepted, 1: not finite, 2: a
    spike) and refused (updates in a row)."""
    passed: Callable[[State], State]
    """The state with one more batch passed over: nothing but its step changes."""
    eval_step: Any
    """jitted (params, batch[, frozen]) -> sums, as Objective.evaluate gives them."""

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that a step changes: by the optimizer, or by a rule of the model."""
        changed = jax.tree.map(
            lambda moved, i: moved or i.carried and not i.frozen,
            optim.trained(self.cfg.optimizer, self.info),
            self.info,
        )
        return count(only(changed, self.abstract.params))[0]

    def begun(self, weights: dict[str, Any]) -> State:
        """The state before the first step: the weights by path, with the adapter that lora.adapter
        names, and fresh optimizer state."""
        folder = self.cfg.lora and self.cfg.lora.adapter
        return self.start(tree(self.weights.with_adapter(weights, folder) if folder else weights))

    def rows(self, batch_size: int) -> list[int]:
        """The rows of a global batch (its lanes) that this process's devices hold, in order."""
        spans = self.lane_sharding.addressable_devices_indices_map((batch_size, 1)).values()
        return sorted(
            {row for span in spans if span for row in range(*span[0].indices(batch_size))}
        )

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a training batch."""
        sizes = {"batch": self.cfg.train.batch_size, "seq": self.cfg.data.seq_len}
        return {
            name: jax.ShapeDtypeStruct(
                [sizes[axis] for axis in field.axes.split()],
                jnp.dtype(field.dtype),
                sharding=self.sharding_of_field(name),
            )
            for name, field in self.objective.fields.items()
        }

    @property
    def abstract_arguments(self) -> tuple[Any, ...]:
        """Arguments of `step`: the state, a batch, and where the objective has second sets
        of weights, these by name."""
        frozen = {name: self.abstract.params for name in self.objective.frozen}
        return self.abstract, self.abstract_batch(), *((frozen,) if frozen else ())

    def sharding_of_field(self, name: str) -> NamedSharding:
        """Where an array of a batch lies; one that is no field of the objective as tokens do."""
        field = self.objective.fields.get(name)
        axes = (field.axes if field else "batch seq").split()
        return NamedSharding(self.mesh, sharding.spec(axes, self.cfg.mesh.rules))

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

    def compile(self, lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
        """The lowered step compiled with `options` beside the configuration's. ConfigError for a
        flag that the compiler does not know."""
        return compiling.compiled(lowered, options, self.mesh)

    def check_flags(self) -> None:
        """ConfigError for a flag that the compiler does not know, told by a program that compiles
        in no time."""
        if flags := compiling.flags_for(self.cfg, self.mesh.devices.flat[0].platform):
            number = jax.ShapeDtypeStruct(
                (), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec())
            )
            self.compile(jax.jit(lambda x: x + 1, compiler_options=flags).lower(number))

    def within(self, f: Callable) -> Callable:
        """`f`, traced as the step is: on the run's mesh, with its table of block sizes."""
        return _within(self.mesh, self.cfg, f)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Rows over the mesh axes of `batch`, positions over those of `seq`."""
        return NamedSharding(self.mesh, sharding.spec(["batch", "seq"], self.cfg.mesh.rules))

    @property
    def lane_sharding(self) -> NamedSharding:
        """Rows over the mesh axes of `batch`; what belongs to a row as a whole."""
        return NamedSharding(self.mesh, sharding.spec(["batch"], self.cfg.mesh.rules))

    def place(
        self, local: Mapping[str, np.ndarray], batch_size: int, whole_rows: bool = False
    ) -> dict[str, jax.Array]:
        """This process's rows, [len(rows(batch_size)), ...] each -> global arrays [batch_size,
        ...], of whatever the step has use for.

        `whole_rows`: their second dimension is not time, and no axis of the mesh splits it.
        """
        where = {row: i for i, row in enumerate(self.rows(batch_size))}

        def put(name: str) -> jax.Array:
            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index
                span = range(*index[0].indices(batch_size))
                return local[name][where[span[0]] : where[span[-1]] + 1][:, *index[1:]]

            placement = self.lane_sharding if whole_rows else self.sharding_of_field(name)
            return jax.make_array_from_callback(
                (batch_size, *local[name].shape[1:]), placement, piece
            )

        fields = self.objective.fields
        local = (
            {"real": local["segments"] > 0, **local}
            if "real" in fields and "segments" in local
            else local
        )
        unused = {"positions", "segments"} - {*fields}
        return {name: put(name) for name in local if name not in unused}


def assemble(cfg: "Config", mesh: Mesh, trains: bool = True) -> Run:
    """Resolve everything that a run is made of; raises ConfigError where the parts do not fit. One
    that never trains has no optimizer."""
    rewrite = Rewrite(cfg)
    graph, params, info = rewrite.graph, *of_weights(rewrite.state, rewrite.replaced)
    trained = optim.trained(cfg.optimizer, info) if trains else jax.tree.map(lambda _: False, info)
    tx = optax.with_extra_args_support(
        optim.build(cfg.optimizer, cfg.train.steps, info) if trains else optax.identity()
    )
    abstract = State(
        jax.ShapeDtypeStruct((), jnp.int32),
        params,
        jax.eval_shape(tx.init, only(trained, params)),
        jax.eval_shape(guard.fresh),
    )
    shardings = of_state(abstract, info, mesh, cfg.mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    everywhere = NamedSharding(mesh, PartitionSpec())

    def start(params: Tree) -> State:
        return State(
            jnp.zeros((), jnp.int32), params, tx.init(only(trained, params)), guard.fresh()
        )

    def init() -> State:
        return start(rewrite.initial(cfg.train.seed))

    objective = objective_of(cfg)

    def models(params: Tree, frozen: Tree) -> Models:
        trees = {} if frozen is None else frozen
        others = {name: nnx.merge(graph, nnx.State(tree)) for name, tree in trees.items()}
        return Models(nnx.merge(graph, nnx.State(params)), others)

    def loss(params: Tree, frozen: Tree, batch: Batch) -> Loss:
        return objective.loss(models(params, frozen), batch)

    def evaluate(params: Tree, batch: Batch, frozen: Tree = None) -> dict[str, jax.Array]:
        return objective.evaluate(models(params, frozen), batch)

    moves = Moves(shardings, abstract, info, mesh, cfg.mesh)
    step = functools.partial(_step, cfg, tx, trained, loss, objective.prepare, moves)
    options, ordered = compiling.options_for(cfg, mesh), compiling.in_order(mesh)
    quick = compiling.QUICK if mesh.devices.flat[0].platform == "cpu" else {}
    following = jax.jit(lambda step: step + 1, out_shardings=everywhere)
    return Run(
        cfg=cfg,
        mesh=mesh,
        abstract=abstract,
        info=info,
        objective=objective,
        weights=PlacedWeights(cfg, mesh, rewrite, flat(abstract.params)),
        graph=graph,
        start=jax.jit(
            _within(mesh, cfg, start),
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=ordered,
        ),
        init=jax.jit(
            _within(mesh, cfg, init), out_shardings=shardings, compiler_options=ordered | quick
        ),
        step=jax.jit(
            _within(mesh, cfg, step),
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
            compiler_options=options,
        ),
        passed=lambda state: state._replace(step=following(state.step)),
        eval_step=jax.jit(
            _within(mesh, cfg, evaluate), out_shardings=everywhere, compiler_options=options
        ),
    )
