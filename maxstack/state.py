"""The state of a run and its shardings.

The state is a plain pytree of arrays in nested dicts; the model object is put together from it
inside the step. A weight is sharded by the rules for its logical axes. A leaf of the optimizer's
state is sharded like the weight whose path it ends in and whose shape it has, or further by
`mesh.optimizer_rules` (ZeRO-1), so no optimizer has to say how its state is laid out. Weights and
optimizer state may lie in host memory between steps; `Moves` takes them to the devices and back.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack import optim, sharding
from maxstack.schema.mesh import Axes, MeshConfig, parts

Tree = Any
HOST = "pinned_host"


class State(NamedTuple):
    """What a step changes, as arrays, shapes or shardings."""

    step: Any
    """Number of the last batch, whether its update was accepted or not."""
    params: Tree
    """Weights by path."""
    opt: Tree
    guard: Tree
    """faults.guard.Guard."""
    behind: tuple[Tree, ...] = ()
    """Weights that a step changes, as they were when earlier rollouts began, newest first, so that
    rollouts under way can be made again after a restart: those of the current rollout where several
    steps learn from one, and of the rollout.ahead rollouts before it."""


def weights_at(state: State, step: int, rollout: int, steps: int) -> Tree:
    """Return the weights that a step changes as they were before the first step of a rollout; None
    where they are those of the state. `steps`: steps of each rollout; `step`: that of the state,
    given since reading it would wait for the devices."""
    # Before a rollout's first step the state itself has its weights; after it, `behind` does,
    # newest first.
    begun, inside = divmod(step, steps)
    if rollout == begun and not inside:
        return None
    ago = begun - rollout if inside else begun - rollout - 1
    return state.behind[ago]


def of_state(abstract: State, info: Tree, mesh: Mesh, cfg: MeshConfig) -> State:
    """The sharding of every leaf of the state between steps. `info` is optim.ParamInfo in the shape
    of the parameters."""
    on_devices = _on_devices(abstract, info, mesh, cfg)
    moved = {
        name: _in_host(getattr(on_devices, name), getattr(abstract, name))
        for name, key in (("params", "params"), ("opt", "optimizer"))
        if key in cfg.offload
    }
    return on_devices._replace(**moved)


@dataclasses.dataclass(frozen=True)
class Moves:
    """Moves of the state between host and devices within a step."""

    between: State
    """Shardings between steps."""
    abstract: State
    info: Tree
    mesh: Mesh
    cfg: MeshConfig

    def to_devices(self, state: State) -> State:
        """The state with its parts in host memory moved to the devices."""
        if not self.cfg.offload:
            return state
        # Called within the step: on the devices these parts exist only while it runs.
        return jax.device_put(state, _on_devices(self.abstract, self.info, self.mesh, self.cfg))

    def weights_to_devices(self, tree: Tree, info: Tree = None) -> Tree:
        """Weights, or a part of their tree with None for the rest, in device memory; `info` is that
        of another model where they are its weights."""
        if "params" not in self.cfg.offload:
            return tree
        shardings = sharding_of_weights(info or self.info, self.mesh, self.cfg.rules)
        return jax.tree.map(
            lambda s, leaf: None if leaf is None else jax.device_put(leaf, s), shardings, tree
        )

    def home(self, state: State) -> State:
        """Move the state back to where it lies between steps."""
        return jax.device_put(state, self.between) if self.cfg.offload else state

    def like_optimizer(self, grads: Tree) -> Tree:
        """Shard gradients like the optimizer state, so that each device updates its share of it."""
        if not self.cfg.optimizer_rules or self.mesh.size == 1:
            return grads
        # Sharded before the optimizer runs: the sum over devices can then be a reduce-scatter, and
        # each device updates its share alone (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054).
        return jax.lax.with_sharding_constraint(
            grads,
            sharding_of_weights(self.info, self.mesh, self.cfg.rules | self.cfg.optimizer_rules),
        )


def sharding_of_weights(info: Tree, mesh: Mesh, rules: dict[str, Axes]) -> Tree:
    """The sharding of each weight, by its logical axes."""
    return jax.tree.map(lambda i: NamedSharding(mesh, _spec(i, mesh, rules)), info)


def _spec(info: Any, mesh: Mesh, rules: dict[str, Axes]) -> PartitionSpec:
    """Partition of a weight. A frozen one is not split where its size does not divide: scales and
    packed values need not divide."""
    found = sharding.spec(info.axes, rules)
    if not info.frozen:
        return found
    return PartitionSpec(
        *(
            part if size % parts(part, mesh.shape) == 0 else None
            for part, size in zip(found, info.shape, strict=True)
        )
    )


def weights_behind(opt: Tree, info: Tree) -> list[Any]:
    """For every leaf of an optimizer's state, the ParamInfo of the weight whose path it ends with
    and whose shape it has; None for the rest."""
    by_path = {
        jax.tree_util.keystr(path): i for path, i in jax.tree_util.tree_leaves_with_path(info)
    }

    def behind(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        # Longest end first: of the weights a/b and b, the leaf mu/a/b belongs to a/b. The shape is
        # compared since factored states keep rows and columns under the same path.
        ends = (by_path.get(jax.tree_util.keystr(path[start:])) for start in range(len(path)))
        return next((i for i in ends if i and i.shape == leaf.shape), None)

    return [behind(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(opt)]


def _on_devices(abstract: State, info: Tree, mesh: Mesh, cfg: MeshConfig) -> State:
    """Weights by their logical axes; optimizer leaves like the weights behind them; the rest
    replicated."""
    everywhere, rules = NamedSharding(mesh, PartitionSpec()), cfg.rules | cfg.optimizer_rules
    opt = [
        NamedSharding(mesh, _spec(i, mesh, rules)) if i else everywhere
        for i in weights_behind(abstract.opt, info)
    ]
    weights = sharding_of_weights(info, mesh, cfg.rules)
    return State(
        everywhere,
        weights,
        jax.tree.unflatten(jax.tree.structure(abstract.opt), opt),
        jax.tree.map(lambda leaf: everywhere, abstract.guard),
        tuple(
            jax.tree.map(
                lambda leaf, s: s if leaf is not None else None,
                older,
                weights,
                # None is an empty subtree for jax, and the trees would not match.
                is_leaf=lambda leaf: leaf is None,
            )
            for older in abstract.behind
        ),
    )


def _in_host(shardings: Tree, abstract: Tree) -> Tree:
    """The shardings in host memory, except those of scalars."""
    return jax.tree.map(
        lambda s, leaf: s.with_memory_kind(HOST) if leaf.ndim else s, shardings, abstract
    )


def of_weights(state: nnx.State, replaced: Collection[str] = ()) -> tuple[Tree, Tree]:
    """A model's weights as nested dicts of shapes, and the same dicts of ParamInfo; `replaced` are
    weights that substitutes below them replace."""
    info = {}
    for path, variable in nnx.to_flat_state(state):
        meta, shape = variable.get_metadata(), variable.get_value().shape
        # A layer declares its own axes; stacking over the pattern's repetitions puts `layers` in
        # front.
        axes = ("layers",) * (len(shape) - len(meta["axes"])) + meta["axes"]
        above = ("/".join(map(str, path[:end])) for end in range(1, len(path)))
        info[path] = optim.ParamInfo(
            shape,
            variable.get_value().dtype,
            axes,
            meta["carried"],
            meta["frozen"],
            next((name for name in above if name in replaced), None),
        )
    return nnx.to_pure_dict(state), nnx.traversals.unflatten_mapping(info)


def count(params: Tree) -> tuple[int, int]:
    """Parameters and bytes of a tree of arrays or shapes."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size for leaf in leaves), sum(
        leaf.size * leaf.dtype.itemsize for leaf in leaves
    )


def flat(params: Tree) -> dict[str, Any]:
    """Nested dicts of weights as weights by path, keys joined by a slash."""
    return nnx.traversals.flatten_mapping(params, sep="/")


def tree(weights: Mapping[str, Any]) -> Tree:
    """Weights by path as nested dicts."""
    return nnx.traversals.unflatten_mapping(dict(weights), sep="/")
