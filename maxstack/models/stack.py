"""Blocks in a repeated pattern, the body of every kind of model.

The blocks of the pattern are stacked over its repetitions along a leading axis `layers` and
scanned, so that compile time does not grow with depth; the prefix, and the remainder of the pattern
after its last whole repetition, are unrolled. Shapes: B batch  T time  D
embed  P per-layer embedding  L layers."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxstack.layers.context import Context
from maxstack.layers.norm import Norm
from maxstack.models import pipeline
from maxstack.models.block import Aux, Block
from maxstack.models.model import Model, Reports
from maxstack.schema.mlps import MoEConfig
from maxstack.schema.stack import RematConfig, StackConfig
from maxstack.sharding import size_of


class Stack(Model):
    """Prefix, pattern and remainder of blocks, and the last norm. Blocks of the pattern are stacked
    over its repetitions, along a leading axis named `layers`.

    A built stack holds placeholders; `initial` draws the weights."""

    def __init__(self, cfg: StackConfig):
        self.cfg = cfg
        first, period = len(cfg.prefix), cfg.stacks
        repeats = cfg.repetitions
        rest = cfg.order[first + repeats * len(period) :]
        self.prefix = nnx.Dict({f"{i}": self.block(name) for i, name in enumerate(cfg.prefix)})
        stacks = {key: _stack(self.block(name), repeats) for key, name in period.items() if repeats}
        self.blocks = nnx.Dict(stacks)
        self.rest = nnx.Dict({f"{i}": self.block(name) for i, name in enumerate(rest)})
        self.norm = Norm(cfg.norm, cfg.embed, dtype=cfg.param_dtype)

    def block(self, name: str) -> Block:
        """A block of that name."""
        return Block(name, self.cfg)

    @staticmethod
    def after_step(
        cfg: StackConfig, params: dict[str, Any], reports: Reports
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Move each selection bias one step towards balance: up where fewer tokens than the mean
        chose the expert, down where more (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
        Scalars: expert_load, the fullest expert's tokens over the mean; dropped, the share of
        choices beyond a capacity."""
        flat = nnx.traversals.flatten_mapping(params)
        scalars: dict[str, Any] = {}
        loads = {path[:-1]: load for path, load in reports.items() if path[-1] == "load"}
        for path, load in loads.items():
            router = mixture(cfg, path).router
            if router.selection_bias and router.bias_update:
                # A step of fixed size: only the sign of the imbalance matters.
                bias = flat[*path, "selection_bias"]
                step = jnp.sign(load.mean(-1, keepdims=True) - load).astype(bias.dtype)
                flat[*path, "selection_bias"] = bias + router.bias_update * step
        if loads:
            # Over the mean, so that layers of different numbers of experts compare.
            fullest = [(load.max(-1) / load.mean(-1)).max() for load in loads.values()]
            scalars["expert_load"] = jnp.stack(fullest).max()
        if dropped := [value.sum() for path, value in reports.items() if path[-1] == "dropped"]:
            # Choices are counted before the capacity, so this is a share of all of them.
            scalars["dropped"] = sum(dropped) / sum(load.sum() for load in loads.values())
        return nnx.traversals.unflatten_mapping(flat), scalars

    @jax.named_scope("model.blocks")
    def run_blocks(
        self, x_BTD: Array, context: Context, extra_LBTP: Array | None = None
    ) -> tuple[Array, Aux, Context]:
        """-> (the residual stream after the last block, reports of the blocks by path, the context
        with keys and values that later layers share). `extra_LBTP`: the layers' own embeddings of
        the tokens."""
        cfg = self.cfg
        aux: Aux = {"prefix": {}, "blocks": {}, "rest": {}}
        # Blocks whose keys and values later ones read instead of their own.
        kept_names = {block.mixer.keys_of for block in cfg.blocks.values()}

        def run(block: Block, x_BTD: Array, extra_BTP: Array | None) -> tuple[Array, Aux]:
            graph, state = nnx.split(block)
            return remat(
                cfg.remat, lambda state, x, extra: nnx.merge(graph, state)(x, context, extra)
            )(state, x_BTD, extra_BTP)

        for i, (key, block) in enumerate(in_order(self.prefix)):
            if cfg.prefix[i] in kept_names:
                context = dataclasses.replace(
                    context, kept={**context.kept, cfg.prefix[i]: block.keys_values(x_BTD, context)}
                )
            x_BTD, aux["prefix"][key] = run(block, x_BTD, layer_slice(extra_LBTP, i))
        if cfg.repetitions:
            x_BTD, aux["blocks"] = self._repeated(x_BTD, context, extra_LBTP)
        done = cfg.layers - len(self.rest)
        for i, (key, block) in enumerate(in_order(self.rest)):
            x_BTD, aux["rest"][key] = run(block, x_BTD, layer_slice(extra_LBTP, done + i))
        return x_BTD, aux, context

    def _repeated(
        self, x_BTD: Array, context: Context, extra_LBTP: Array | None
    ) -> tuple[Array, Aux]:
        """Run the repetitions of the pattern -> (x, reports, each with a leading axis of
        repetitions)."""
        cfg, keys = self.cfg, [*self.cfg.stacks]
        repeats = cfg.repetitions
        graphs, stacked = zip(*(nnx.split(self.blocks[key]) for key in keys), strict=True)
        # A period's weights are sliced out of the stack inside its checkpoint in a pipeline, so
        # that no tick keeps copies of them.
        staged = size_of(pipeline.STAGE) > 1

        def period(x_BTD: Array, read: pipeline.Read) -> tuple[Array, Aux]:
            reports = {}
            for place, key in enumerate(keys):

                def block(x_BTD: Array, place: int = place) -> tuple[Array, Aux]:
                    state, context, extra_BTP = read(place)
                    return nnx.merge(graphs[place], state)(x_BTD, context, extra_BTP)

                # By block and not by period, so that the backward
                # pass holds one block's values at a time.
                x_BTD, reports[key] = remat(cfg.remat, block, staged)(x_BTD)
            return x_BTD, reports

        extra = extra_LBTP
        if extra is not None:
            # The scan's part of the layers' embeddings, by repetition and place in the pattern.
            extra = extra[len(self.prefix) :][: repeats * len(keys)]
            extra = extra.reshape(repeats, len(keys), *extra.shape[1:])
        if staged:
            return pipeline.run_pipeline(period, x_BTD, stacked, context, extra, cfg.unroll)

        def repetition(
            x_BTD: Array, xs: tuple[Any, Array | None, Array | None]
        ) -> tuple[Array, Aux]:
            states, extra, number = xs
            here = context if number is None else context.in_repetition(number)
            return period(x_BTD, lambda place: (states[place], here, layer_slice(extra, place)))

        # Without dropout nothing depends on the number of the repetition.
        numbers = None if context.keys_BT2 is None else jnp.arange(repeats)
        return jax.lax.scan(
            repetition, x_BTD, (stacked, extra, numbers), unroll=min(cfg.unroll, repeats)
        )

    def unrolled(self) -> Iterator[Block]:
        """All blocks in their order."""
        yield from (block for _, block in in_order(self.prefix))
        keys = self.cfg.stacks if self.cfg.repetitions else ()
        parts = [nnx.split(self.blocks[key]) for key in keys]
        for repetition in range(self.cfg.repetitions):
            for graph, state in parts:
                own = jax.tree.map(
                    lambda leaf, i=repetition: leaf[i],
                    nnx.to_pure_dict(state),
                    # For inference a stack is a tuple by
                    # repetition, which is indexed like an array.
                    is_leaf=lambda leaf: isinstance(leaf, tuple),
                )
                yield nnx.merge(graph, nnx.State(own))
        yield from (block for _, block in in_order(self.rest))


def losses_and_reports(aux: Aux) -> tuple[dict[str, Array], dict[tuple[str, ...], Array]]:
    """Split the reports of the blocks: terms of the loss by name, and those that `after_step`
    reads."""
    flat = nnx.traversals.flatten_mapping(aux)
    router = [value.sum() for path, value in flat.items() if path[-1] == "router_loss"]
    reports = {path: value for path, value in flat.items() if path[-1] in ("load", "dropped")}
    return {"router_loss": sum(router[1:], router[0])} if router else {}, reports


def mixture(cfg: StackConfig, path: tuple[str, ...]) -> MoEConfig:
    """The configuration of the mixture of experts at a path, or that holds the weight there."""
    part, key = path[:2]
    if f"{part}.block" in cfg.extra_blocks:
        (name,) = cfg.extra_blocks[f"{part}.block"]
    elif part == "blocks":
        name = cfg.stacks[key]
    else:
        # The remainder's blocks are numbered from 0 again.
        first = len(cfg.prefix) + cfg.repetitions * len(cfg.period) if part == "rest" else 0
        name = cfg.order[first + int(key)]
    moe = cfg.blocks[name].experts
    assert moe
    return moe


def in_order(blocks: nnx.Dict) -> list[tuple[str, Any]]:
    """Blocks by number; a merged graph need not keep that order."""
    return sorted(blocks.items(), key=lambda item: int(item[0]))


def layer_slice(extra: Array | None, index: int) -> Array | None:
    """The embedding of one layer."""
    return None if extra is None else extra[index]


def _stack(block: Block, repeats: int) -> Block:
    graph, state = nnx.split(block)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.broadcast_to(x, (repeats, *x.shape)), state))


def remat(cfg: RematConfig, f: Callable[..., Any], staged: bool = False) -> Callable[..., Any]:
    """Wrap `f` so that its backward pass keeps the values that the policy names and recomputes the
    rest. `staged`: inside a pipeline, where `f` slices its weights out of a stack."""
    # In a pipeline even `none` needs a checkpoint, which keeps results but no slices of weights.
    if cfg.policy == "none" and not staged:
        return f
    of_jax = jax.checkpoint_policies
    policies = {
        "none": pipeline.save_computed,
        "full": of_jax.nothing_saveable,
        "dots": of_jax.dots_saveable,
        "dots_no_batch": of_jax.dots_with_no_batch_dims_saveable,
        "save": of_jax.save_only_these_names(*cfg.names),
        "offload": of_jax.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(cfg.names),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(f, policy=policies[cfg.policy], prevent_cse=False)
