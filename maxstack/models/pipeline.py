"""A pipeline over the repetitions of the pattern ("periods"): a scan by hand.

Each stage of the mesh holds a share of the periods. In each tick every stage runs one chunk of its
periods on one microbatch and sends the result to the next stage; with `rounds` > 1 shares are
interleaved (Narayanan 2021, arXiv:2104.04473), so a microbatch goes around several times and the
bubble shrinks. Interleaving needs chunk c on stage c % stages, while weights are stored in natural
order: they change places once a step (`moves`). Embedding, prefix, remainder and head run outside
of the pipeline with the batch split over the stages, so no stage idles there. A stage that has
nothing to do computes on rows that it has had or will have and drops the result: skipping would not
be faster, and collectives that only some stages enter stall some backends.

Shapes: B batch  T time  D embed  P periods  A batch over the axes of the mesh  G groups of
microbatches  N rows of a microbatch  R rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from maxstack import sharding
from maxstack.layers.context import Context
from maxstack.schema.mesh import MeshConfig, names

Tree = Any
Read = Callable[[int], tuple[Any, Context, Array | None]]
Period = Callable[[Array, Read], tuple[Array, Tree]]
STAGE = "stage"
MOVING = frozenset(
    {
        "dynamic_slice",
        "squeeze",
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "convert_element_type",
        "sharding_constraint",
    }
)


def ticks(stages: int, rounds: int, microbatches: int) -> int:
    """Number of ticks of a forward pass."""
    return microbatches * rounds + stages - 1


def bubble(stages: int, rounds: int, microbatches: int) -> float:
    """The share of its time that a stage idles: (S - 1) / (microbatches * rounds + S - 1)
    (Narayanan 2021, arXiv:2104.04473, section 2.2)."""
    return (stages - 1) / ticks(stages, rounds, microbatches)


def work_at(tick: Any, stages: int, rounds: int) -> tuple[Any, Any, Any]:
    """The work of a stage, `tick` ticks after its first -> (group, round, member): microbatch
    `member` of `group`, on chunk round * stages + stage.

    A group is as many microbatches as stages; it goes around `rounds` times before the next one
    enters. Numbers or arrays of them.
    """
    return tick // (stages * rounds), tick // stages % rounds, tick % stages


@functools.cache
def moves(stages: int, rounds: int) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, np.ndarray]:
    """Moves of chunks of weights, of which each stage stores `rounds` in order, to the stages that
    use them: chunk c to stage c % stages.

    -> (permutations, sent, kept): move i takes chunk sent[s, i] of those on stage s to stage
    permutations[i][s]; what stage s uses in round v came with move kept[s, v]. A bipartite graph
    with `rounds` edges at every node is a union of so many perfect matchings (Koenig 1916).
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    chunks = np.arange(stages * rounds).reshape(stages, rounds)  # of each stage
    left = np.ones((stages, rounds), bool)
    permutations = []
    sent, kept = np.zeros((2, stages, rounds), np.int32)
    for move in range(rounds):
        edges = np.zeros((stages, stages), bool)
        sources, places = np.nonzero(left)
        # An edge from the stage that stores a chunk to the one that uses it.
        edges[sources, chunks[sources, places] % stages] = True
        targets = maximum_bipartite_matching(csr_array(edges), perm_type="column").tolist()
        permutations.append(tuple(targets))
        for source, target in enumerate(targets):
            # Any chunk for that target does; the first one left.
            place = int(np.argmax(left[source] & (chunks[source] % stages == target)))
            sent[source, move] = place
            kept[target, chunks[source, place] // stages] = move
            left[source, place] = False
    return tuple(permutations), sent, kept


@dataclasses.dataclass(frozen=True)
class Rows:
    """Layout of the rows of a batch on the mesh. A microbatch is the rows of one stage and group,
    so no row moves on the way in and out."""

    sizes: dict[str, int]
    """The mesh axes that split the batch, in order, the stages among them."""
    by_hand: frozenset[str]
    """The stages, and axes that split the batch alone: gradients of weights are summed over those
    once a step, not once a tick."""
    groups: int

    @classmethod
    def on(cls, mesh: Any, cfg: MeshConfig) -> "Rows":
        """Sharding by the rules of `cfg`."""
        axes = dict.fromkeys((*names(cfg.rules["batch"]), STAGE))
        # Axes that split weights too stay with XLA; by
        # hand, their shards would have to be gathered here.
        others = {
            axis
            for logical, rule in cfg.rules.items()
            if logical != "batch"
            for axis in names(rule)
        }
        sizes = {axis: mesh.shape[axis] for axis in axes if mesh.shape[axis] > 1}
        return cls(
            sizes,
            frozenset({STAGE} | (sizes.keys() - others)),
            (cfg.microbatches or sizes[STAGE]) // sizes[STAGE],
        )

    @property
    def stage(self) -> int:
        """The place of the stages among the axes."""
        return list(self.sizes).index(STAGE)

    def spec(self, dim: int = 0) -> PartitionSpec:
        """Partition by hand of rows from `split`."""
        return PartitionSpec(
            *(None,) * dim, *(axis if axis in self.by_hand else None for axis in self.sizes)
        )

    def split(self, x: Array, dim: int = 0) -> Array:
        """[B, ...] -> [A..., G, n, ...] with one dimension A for each axis."""
        return x.reshape(*x.shape[:dim], *self.sizes.values(), self.groups, -1, *x.shape[dim + 1 :])

    def by_microbatch(self, x: Array, dim: int = 0) -> Array:
        """[A..., G, n, ...] as one device has it -> [G, 1 or stages, N, ...]."""
        end = dim + len(self.sizes)
        # Rows of the stages first and by group, as the schedule takes them.
        x = jnp.moveaxis(x, (end, dim + self.stage), (dim, dim + 1))
        return x.reshape(
            *x.shape[: dim + 2], math.prod(x.shape[dim + 2 : end + 2]), *x.shape[end + 2 :]
        )

    def to_device_layout(self, x_GN: Array, like: Array) -> Array:
        """The inverse of `by_microbatch`: a stage's own rows [G, N, ...] in the shape of `like`,
        their input."""
        rest = [*like.shape]
        groups, one = rest.pop(len(self.sizes)), rest.pop(self.stage)
        return jnp.moveaxis(x_GN.reshape(groups, one, *rest), (0, 1), (len(self.sizes), self.stage))


def save_computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """The checkpoint policy that keeps all results of arithmetic, but no copies of weights, of
    which there would be one a tick."""
    return primitive.name not in MOVING


def run_pipeline(
    period: Period,
    x_BTD: Array,
    stacked: Tree,
    context: Context,
    extra_PKBTE: Array | None,
    unroll: int,
) -> tuple[Array, Tree]:
    """Run `period` for each entry along the first axis of `stacked`, on a mesh with stages -> (x,
    the reports of the periods, summed over the batch).

    `period(x, read)` calls `read(place)` for the weights of a block by its place in the period, its
    context, and its part of `extra_PKBTE`; where it does so inside a checkpoint, nothing of that is
    kept for the backward pass, which needs x alone of each period. Every stage has the context of
    all rows, and the rows of `extra_PKBTE` for its own periods.
    """
    current = sharding.current()
    assert current
    mesh, cfg = current
    rows = Rows.on(mesh, cfg)
    stages = mesh.shape[STAGE]
    replicas = tuple(axis for axis in rows.sizes if axis in rows.by_hand and axis != STAGE)
    per_row = jax.tree.map(lambda leaf: leaf.ndim > 1 and leaf.shape[0] == x_BTD.shape[0], context)

    def inside(
        x: Array, stacked: Tree, context: Context, extra: Array | None
    ) -> tuple[Array, Tree]:
        # Once a step and before the loop, so that no tick waits for weights.
        stacked = _move_chunks(jax.tree.map(lambda w: w[0], stacked), stages, cfg.rounds)
        context = jax.tree.map(
            lambda leaf, own: rows.by_microbatch(_of_all_stages(leaf, rows.stage)) if own else leaf,
            context,
            per_row,
        )
        if extra is not None:
            # A stage needs its own periods' rows of every
            # microbatch, not all periods of its own rows.
            extra = rows.by_microbatch(
                jax.lax.all_to_all(extra, STAGE, 1, 4 + rows.stage, tiled=True), 4
            )
        length = jax.tree.leaves(stacked)[0].shape[0] // cfg.rounds

        def work(
            x_NTD: Array, group: Array, turn: Array, member: Array, i: Array
        ) -> tuple[Array, Tree]:
            # Unsigned, so that jax adds no test for negative
            # indices; weights lie in the order of arrival.
            mine = (
                jnp.asarray(moves(stages, cfg.rounds)[2])[jax.lax.axis_index(STAGE), turn] * length
                + i
            ).astype(jnp.uint32)

            # The number in natural order, by which dropout
            # draws, so that stages and rounds change nothing.
            period_of_all = (turn * stages + jax.lax.axis_index(STAGE)) * length + i

            def read(place: int) -> tuple[Any, Context, Array | None]:
                # Sliced in here, inside the period's checkpoint, so that no copy is kept for the
                # backward pass.
                here: Context = jax.tree.map(
                    lambda leaf, own: leaf[group, member] if own else leaf, context, per_row
                )
                return (
                    jax.tree.map(
                        lambda w: jax.lax.dynamic_index_in_dim(w, mine, keepdims=False),
                        stacked[place],
                    ),
                    here.in_repetition(period_of_all),
                    None if extra is None else extra[turn, 0, i, place, group, member],
                )

            return period(sharding.constrain(x_NTD, "batch residual embed"), read)

        out_GNTD, reports = _run_schedule(
            work, rows.by_microbatch(x)[:, 0], stages, cfg.rounds, length, unroll
        )
        # Reports get two axes of 1, which lie along stages and replicas outside.
        return rows.to_device_layout(out_GNTD, x), jax.tree.map(
            lambda report: report[:, None, None], reports
        )

    # A copy of the weights for each replica and of the reports from each, so that XLA sums them: by
    # hand it fails on CPUs (0.12) at bfloat16.
    copies = math.prod(mesh.shape[axis] for axis in replicas)
    stacked = jax.tree.map(lambda w: jnp.broadcast_to(w, (copies, *w.shape)), stacked)
    context = jax.tree.map(lambda leaf, own: rows.split(leaf) if own else leaf, context, per_row)
    if extra_PKBTE is not None:
        extra_PKBTE = rows.split(
            extra_PKBTE.reshape(cfg.rounds, stages, -1, *extra_PKBTE.shape[1:]), 4
        )
    specs = (
        rows.spec(),
        PartitionSpec(replicas, STAGE),
        jax.tree.map(lambda own: rows.spec() if own else PartitionSpec(), per_row),
        rows.spec(4),
    )
    run = sharding.per_device(
        inside, specs, (rows.spec(), PartitionSpec(None, STAGE, replicas)), rows.by_hand
    )
    out, reports = run(rows.split(x_BTD), stacked, context, extra_PKBTE)
    reports = jax.tree.map(
        lambda report: report.sum(axis=2).reshape(-1, *report.shape[4:]), reports
    )
    return sharding.constrain(out.reshape(x_BTD.shape), "batch residual embed"), reports


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_all_stages(x: Array, dim: int) -> Array:
    """Gather along a dimension over the stages; the gradient is summed over them in float32."""
    return jax.lax.all_gather(x, STAGE, axis=dim, tiled=True)


def _gather_forward(x, dim):
    return _of_all_stages(x, dim), jnp.zeros((), x.dtype)


def _gather_backward(dim, like, dy):
    # Integers of the context, as positions, have no gradient.
    if dy.dtype == jax.dtypes.float0:
        return (None,)
    return (
        jax.lax.psum_scatter(
            dy.astype(jnp.float32), STAGE, scatter_dimension=dim, tiled=True
        ).astype(like.dtype),
    )


_of_all_stages.defvjp(_gather_forward, _gather_backward)


def _move_chunks(stacked: Tree, stages: int, rounds: int) -> Tree:
    """Move the chunks that this stage works on here, in the order of arrival: [periods on a stage,
    ...]."""
    # The order of storage is the order of use.
    if rounds == 1:
        return stacked
    permutations, sent, _ = moves(stages, rounds)
    # Which chunk to send depends on the stage, but every stage runs one program.
    own_R = jnp.asarray(sent, jnp.uint32)[jax.lax.axis_index(STAGE)]
    sends = [(own_R[i], list(enumerate(targets))) for i, targets in enumerate(permutations)]

    def moved(w: Array) -> Array:
        chunks = w.reshape(rounds, -1, *w.shape[1:])
        return jnp.concatenate(
            [
                jax.lax.ppermute(
                    jax.lax.dynamic_index_in_dim(chunks, own, keepdims=False), STAGE, pairs
                )
                for own, pairs in sends
            ]
        )

    return jax.tree.map(moved, stacked)


def _run_schedule(
    work: Callable[..., tuple[Array, Tree]],
    x_GNTD: Array,
    stages: int,
    rounds: int,
    length: int,
    unroll: int,
) -> tuple[Array, Tree]:
    """Run all microbatches through all stages, in ticks of `length` periods -> (x, each row where
    it was before; reports [rounds, length, ...]).

    A group's microbatches wait one on each stage and move down one stage a tick, so that each
    reaches the first stage in its turn; a microbatch that has been through all stages takes the
    place of the one that enters, and moves down to where it came from. There is one loop over
    periods and not a nested one: with a loop inside each tick, gradients as large as all weights of
    a stage would be made and added every tick.
    """
    stage, busy = jax.lax.axis_index(STAGE), x_GNTD.shape[0] * stages * rounds
    up = [(s, (s + 1) % stages) for s in range(stages)]
    down = [(s, (s - 1) % stages) for s in range(stages)]

    def enter(x_NTD: Array, waiting_GNTD: Array, now: Any, i: Any) -> tuple[Array, Array]:
        group, turn, _ = work_at(now, stages, rounds)

        def exchanged(x_NTD: Array, own_NTD: Array) -> tuple[Array, Array]:
            # Results move up a stage while those that wait move down.
            x_NTD = jax.lax.ppermute(x_NTD, STAGE, up)
            here = (stage == 0) & (turn == 0)
            return jnp.where(here, own_NTD, x_NTD), jax.lax.ppermute(
                jnp.where(here, x_NTD, own_NTD), STAGE, down
            )

        own_NTD = waiting_GNTD[group]
        x_NTD, own_NTD = (
            # Every stage takes the same branch, so their collectives meet.
            jax.lax.cond(i == 0, exchanged, lambda *same: same, x_NTD, own_NTD)
            if length > 1
            else exchanged(x_NTD, own_NTD)
        )
        return x_NTD, waiting_GNTD.at[group].set(own_NTD)

    def step(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], Tree]:
        now, i = n // length, n % length
        x_NTD, waiting_GNTD = enter(*carry, now, i)
        x_NTD, reports = work(
            x_NTD, *work_at(jnp.clip(now - stage, 0, busy - 1), stages, rounds), i
        )
        return (x_NTD, waiting_GNTD), reports

    # What is done comes back when the next group enters and takes its places: one group more, and
    # results are shifted by one.
    start = x_GNTD[0], jnp.concatenate([x_GNTD, x_GNTD[:1]])
    total = busy + stages - 1
    # An unrolled step must not reach into the next tick, so it divides the periods of a tick.
    together = max(n for n in range(1, min(unroll, length) + 1) if length % n == 0)
    done, reports = jax.lax.scan(step, start, jnp.arange(total * length), unroll=together)

    def summed(report: Array) -> Array:
        # A stage's first `stage` ticks and its last ones had nothing to do, and do not count.
        mine = jax.lax.dynamic_slice_in_dim(report, stage * length, busy * length)
        return mine.reshape(-1, rounds, stages, length, *report.shape[1:]).sum(axis=(0, 2))

    # A last exchange brings what left the last stage back to its place.
    return enter(*done, total, 0)[1][1:], jax.tree.map(summed, reports)
