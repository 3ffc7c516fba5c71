"""Our own gradient transformations, and wrappers that apply Optax's to each layer and each matrix
of stacked weights."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation, GradientTransformationExtraArgs

from maxstack.schema.optimizer import OptimizerConfig
from maxstack.schema.optimizer.paths import ParamInfo


class LookaheadState(NamedTuple):
    """State of Lookahead with its slow weights, so that the train state's parameters stay a plain
    tree."""

    fast_state: Any
    slow: Any
    steps_since_sync: jax.Array


class WeightEmaState(NamedTuple):
    """Steps taken, and the averaged weights."""

    steps: jax.Array
    average: Any


def tree_paths(tree: Any) -> Any:
    """The tree with each leaf replaced by its path, keys joined by a slash."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
    )


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path."""
    return dict(zip(jax.tree.leaves(tree_paths(tree)), jax.tree.leaves(tree), strict=True))


def map_paths(leaf: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A function from a tree to one of its structure with `leaf(path)` for each leaf."""
    return lambda tree: jax.tree.map(leaf, tree_paths(tree))


def partition(
    transforms: dict[str, GradientTransformation], labels: dict[str, str]
) -> GradientTransformationExtraArgs:
    """Apply to each parameter the transform of its path's label."""
    return optax.partition(
        transforms, map_paths(labels.__getitem__), mask_compatible_extra_args=True
    )


def lookahead(
    fast_optimizer: GradientTransformation,
    sync_period: int,
    slow_step_size: float,
    reset_state: bool = False,
) -> GradientTransformationExtraArgs:
    """Lookahead (Zhang et al. 2019, arXiv:1907.08610): every sync_period steps the slow weights
    move by slow_step_size towards the fast ones, which then start again from there. Unlike in
    optax.lookahead, the parameters are the fast weights alone and the slow ones are state. Its
    updates must be applied unchanged."""
    inner = optax.with_extra_args_support(fast_optimizer)

    def init(params: Any) -> LookaheadState:
        return LookaheadState(
            # A copy, since a buffer that the state holds twice cannot be donated.
            inner.init(params),
            jax.tree.map(jnp.copy, params),
            jnp.zeros([], jnp.int32),
        )

    def update(
        updates: Any, state: LookaheadState, params: Any = None, **extra: Any
    ) -> tuple[Any, LookaheadState]:
        updates, fast_state = inner.update(updates, state.fast_state, params, **extra)
        sync = state.steps_since_sync == sync_period - 1
        gap = jax.tree.map(lambda p, u, s: p + u - s, params, updates, state.slow)
        slow = jax.tree.map(
            lambda s, d: jnp.where(sync, s + slow_step_size * d, s).astype(s.dtype), state.slow, gap
        )
        # Undo so much of the step that the fast weights land on the slow ones.
        updates = jax.tree.map(
            lambda u, d: jnp.where(sync, u - (1 - slow_step_size) * d, u), updates, gap
        )
        if reset_state:
            fast_state = jax.tree.map(
                lambda now, new: jnp.where(sync, new, now), fast_state, inner.init(params)
            )
        return updates, LookaheadState(fast_state, slow, (state.steps_since_sync + 1) % sync_period)

    return GradientTransformationExtraArgs(init, update)


def weight_ema(decay: float, start: int) -> GradientTransformation:
    """Keep an exponential moving average of the updated parameters, equal to them until step
    `start`, in float32 at least. It comes last in a chain and changes no update."""

    def init(params: Any) -> WeightEmaState:
        return WeightEmaState(
            jnp.zeros([], jnp.int32),
            # float32, since a bfloat16 average would round away steps of 1 - decay.
            jax.tree.map(lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32)), params),
        )

    def update(
        updates: Any, state: WeightEmaState, params: Any = None
    ) -> tuple[Any, WeightEmaState]:
        # 0 until `start`: the average is the weights themselves, without what training began with.
        keep = jnp.where(state.steps < start, 0.0, decay)
        moved = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda a, p: (keep * a + (1 - keep) * p).astype(a.dtype), state.average, moved
        )
        return updates, WeightEmaState(optax.safe_increment(state.steps), average)

    return GradientTransformation(init, update)


def in_float32(inner: GradientTransformation) -> GradientTransformationExtraArgs:
    """Apply a transform to weights and gradients in float32 at least, so that its state and updates
    are float32 at least."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
        )

    # Its state is made from the wide view too, so moments of bfloat16 weights are float32.
    return _transform_views(inner, wide)


def per_layer(
    inner: GradientTransformation, params: dict[str, ParamInfo], *, sequential: bool = False
) -> GradientTransformationExtraArgs:
    """Apply a transform that treats each tensor by itself to every layer (and expert) of stacked
    parameters separately.

    `sequential` loops over the layers instead of batching them: for a transform whose rare work
    hides in a lax.cond, which batching would always run.
    """

    def transform_of(sizes: tuple[int, ...]) -> GradientTransformation:
        mapped = inner
        # Once for each stacked axis, layers and then experts.
        for _ in sizes:
            mapped = _over_leading_axis(mapped, sequential)
        return mapped

    def label(info: ParamInfo) -> str:
        # One transform for each shape of stack, since vmap maps as many axes as a parameter has.
        return "x".join(["layers", *map(str, info.stacked)]) if info.stacked else "single"

    return partition(
        {label(info): transform_of(info.stacked) for info in params.values()},
        {path: label(info) for path, info in params.items()},
    )


def as_matrices(
    inner: GradientTransformation, params: dict[str, ParamInfo]
) -> GradientTransformationExtraArgs:
    """Apply a transform to each tensor (of one layer) as a matrix or vector: to query weights as
    embed x (heads * head_dim)."""

    def matrix(path: str, leaf: jax.Array) -> jax.Array:
        # A weight's own logical factors, since [embed, heads,
        # head_dim] alone does not tell rows from columns.
        shape, factors = params[path].shape, params[path].factors
        return leaf.reshape([math.prod(map(shape.__getitem__, axes)) for axes in factors])

    def flat(tree: Any) -> Any:
        return jax.tree.map(matrix, tree_paths(tree), tree)

    return _transform_views(inner, flat)


def muon_dimensions(params: dict[str, ParamInfo]) -> Callable[[Any], Any]:
    """The axes of each parameter that Muon reduces and those that come out, None for a parameter
    that is no matrix. Layers and experts are batches of matrices."""

    def dimensions(path: str) -> Any:
        matrix = params[path].matrix
        return None if matrix is None else optax.contrib.MuonDimensionNumbers(*matrix)

    return map_paths(dimensions)


def eval_params(cfg: OptimizerConfig, opt_state: Any, params: Any) -> Any:
    """The weights to evaluate with: their moving average if ema.eval asks for it; else the x of
    Schedule-Free or the slow weights of Lookahead; else the parameters."""
    # An average that the configuration asks for comes before those that optimizers keep.
    average = ema_params(opt_state, params) if cfg.ema and cfg.ema.eval else None
    if average is not None:
        return average
    for state in _states(opt_state, optax.contrib.ScheduleFreeState, LookaheadState):
        if isinstance(state, LookaheadState):
            params = _overlay(params, state.slow)
        else:
            params = _overlay(params, state.z, functools.partial(_schedule_free_mean, state.b1))
    return params


def ema_params(opt_state: Any, params: Any) -> Any | None:
    """The averaged weights in the state, with the present value of those that have no average; None
    when there is no average."""
    states = _states(opt_state, WeightEmaState)
    return _overlay(params, states[0].average) if states else None


def _schedule_free_mean(b1: Any, y: Any, z: Any) -> Any:
    # Schedule-Free trains at y = (1 - b1) z + b1 x, and x is the average to evaluate.
    return (y - (1.0 - b1) * z) / b1


def _states(opt_state: Any, *kinds: type) -> list[Any]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def _overlay(
    params: Any, part: Any, combine: Callable[[Any, Any], Any] = lambda _, new: new
) -> Any:
    """The parameters, combined with those in `part`, a tree with holes."""
    parts = leaves_by_path(part)

    def overlay(path: str, old: Any) -> Any:
        return combine(old, parts[path]).astype(old.dtype) if path in parts else old

    return jax.tree.map(overlay, tree_paths(params), params)


def _transform_views(
    inner: GradientTransformation, view: Callable[[Any], Any]
) -> GradientTransformationExtraArgs:
    """Apply a transform to views of gradients and parameters; its updates get the shapes of the
    gradients."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        moved, state = inner.update(view(updates), state, view(params), **extra)
        return jax.tree.map(lambda new, old: new.reshape(old.shape), moved, updates), state

    return GradientTransformationExtraArgs(lambda params: inner.init(view(params)), update)


def _over_leading_axis(
    inner: GradientTransformation, sequential: bool
) -> GradientTransformationExtraArgs:
    transform = optax.with_extra_args_support(inner)

    def mapped(function: Callable[..., Any], *trees: Any) -> Any:
        # A state without arrays has no axis to map over.
        if not jax.tree.leaves(trees[0]):
            return function(*trees)
        if sequential:
            return jax.lax.map(lambda parts: function(*parts), trees)
        return jax.vmap(function)(*trees)

    def init(params: Any) -> Any:
        return mapped(transform.init, params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return mapped(lambda u, s, p: transform.update(u, s, p, **extra), updates, state, params)

    return GradientTransformationExtraArgs(init, update)
