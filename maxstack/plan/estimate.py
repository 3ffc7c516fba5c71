"""Estimates a step's memory and time from shapes alone, without a compiler: coarse, but thousands a
second, to choose which configurations are worth compiling.

Memory: the state's shards, gradients, what remat keeps of each layer, two gathered layers, and the
larger of the head's logits and one recomputed layer. Time: the longer of a device's work (matrix
products at their peaks, and a fixed number of passes over the residual stream, both stretched by
the pipeline's bubble) and the traffic on each kind of link, which are taken to overlap."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.hardware.chips import Chip
from maxstack.models.flops import components, forward_pass
from maxstack.models.model import abstract
from maxstack.objectives.objective import objective_of
from maxstack.plan.topology import Link
from maxstack.schema.mesh import names
from maxstack.schema.parts import Dim, weights
from maxstack.schema.stack import REMAT, BlockConfig, RematConfig
from maxstack.sharding import spec

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.weights.rewrite import Rewrite

ELEMENTWISE = 30
"""Reads and writes of the residual stream in a layer, forward and backward: norms, residual sums,
rotations, activations."""
SLACK = 1.5
"""Estimates of memory up to this many times what a device has go to the compiler, which knows
better."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that do not depend on the mesh."""

    weights: tuple[tuple[tuple[str | None, ...], int, int, bool], ...]
    """(logical axes, elements, bytes, True if trained) of each weight."""
    state: tuple[tuple[tuple[str | None, ...], int], ...]
    """(logical axes, bytes) of each array of the optimizer's state."""
    low: Mapping[str, float]
    """Type -> FLOPs of a token that a recipe computes in low precision."""
    teacher: tuple[tuple[tuple[str | None, ...], int], ...] = ()
    """(logical axes, bytes) of each weight of the teacher."""

    @classmethod
    def of(cls, cfg: "Config") -> "Shapes":
        """Trace the shapes of a configuration's weights and optimizer state."""
        import jax

        from maxstack import optim, state, step
        from maxstack.state import weights_behind
        from maxstack.weights.rewrite import Rewrite

        # Shapes as the state holds them, quantized or with adapters, not as the model alone
        # declares them.
        rewrite = Rewrite(cfg)
        params, info = state.of_weights(rewrite.state, rewrite.replaced)
        trained = optim.trained_mask(cfg.optimizer, info)
        weights = tuple(
            (i.axes, leaf.size, leaf.size * leaf.dtype.itemsize, updated)
            for i, leaf, updated in zip(*map(jax.tree.leaves, (info, params, trained)), strict=True)
        )
        tx = optim.build(cfg.optimizer, cfg.train.steps, info)
        state = jax.eval_shape(tx.init, step.select(trained, params))
        kept = [
            # Arrays that belong to no weight, such as counters, are replicated.
            ((i.axes if i else (None,) * leaf.ndim), leaf.size * leaf.dtype.itemsize)
            for i, leaf in zip(weights_behind(state, info), jax.tree.leaves(state), strict=True)
        ]
        return cls(weights, tuple(kept), low_flops(cfg, rewrite), _of_teacher(cfg))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes that one device needs, and seconds of a step."""

    memory: float
    seconds: float


def estimate(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], chip: Chip, links: Mapping[str, Link]
) -> Estimate:
    """Estimate memory and time of `cfg` on a mesh of `sizes`."""
    tokens = cfg.train.batch_size * cfg.data.seq_len
    here = tokens / math.prod(
        sizes[axis] for axis in ("slices", "stage", "data", "fsdp", "expert", "context")
    )
    seconds = (
        _work(shapes, cfg, sizes, chip, tokens, here),
        *_networks(shapes, cfg, sizes, links, here),
    )
    # All links and the device are taken to work at the same time, so the slowest decides.
    return Estimate(_memory(shapes, cfg, sizes, here, chip.platform), max(seconds))


def _of_teacher(cfg: "Config") -> tuple[tuple[tuple[str | None, ...], int], ...]:
    import jax

    from maxstack.state import of_weights

    if not cfg.teacher:
        return ()
    params, info = of_weights(abstract(cfg.teacher)[1])
    return tuple(
        (i.axes, leaf.size * leaf.dtype.itemsize)
        for i, leaf in zip(*map(jax.tree.leaves, (info, params)), strict=True)
    )


def low_flops(cfg: "Config", rewrite: "Rewrite", trains: bool = True) -> Mapping[str, float]:
    """Count the FLOPs of a token in low precision, by type: 2 per weight forward and, in training,
    for each gradient that a rule quantizes. Gradients of experts are computed unquantized."""
    from flax import nnx

    from maxstack import state
    from maxstack.models.stack import mixture as mixture_at

    flops: collections.Counter[str] = collections.Counter()
    plain = nnx.traversals.flatten_mapping(state.of_weights(abstract(cfg.model)[1])[0], sep="/")
    for path, use in rewrite.matches.items():
        if not use.quant.low or use.spec.use not in ("matmul", "experts"):
            continue
        quant = use.quant
        share = 1.0
        # With adapters the base weights have no gradient, so there is no product for it.
        operands = [quant.weight, quant.grad, None if cfg.lora else quant.weight_grad]
        if use.spec.use == "experts":
            mixture = mixture_at(cfg.model, tuple(path.split("/")))
            # A token meets top_k of the experts, and only the forward product is quantized for
            # them.
            operands, share = operands[:1], mixture.top_k / mixture.experts
        for operand in filter(None, operands if trains else operands[:1]):
            flops[operand.qtype] += 2 * plain[path].size * share
    return flops


def mesh_axes(axes: Sequence[str | None], rules: Mapping[str, Any]) -> list[str]:
    """Return the mesh axes over which the rules shard an array of these logical axes."""
    return [axis for entry in spec(axes, rules) for axis in names(entry)]


def _parts(axes: tuple[str | None, ...], rules: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in mesh_axes(axes, rules))


def _memory(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], here: float, platform: str
) -> float:
    from maxstack.kernels.cross_entropy.row_blocks import rows_of

    mesh = cfg.mesh
    model = cfg.model
    # The optimizer's state may be sharded further than the weights (ZeRO-1).
    optimizer_rules = mesh.rules | mesh.optimizer_rules
    state = {
        "params": sum(
            size / _parts(axes, mesh.rules, sizes) for axes, _, size, _ in shapes.weights
        ),
        "optimizer": sum(
            size / _parts(axes, optimizer_rules, sizes) for axes, size in shapes.state
        ),
        "teacher": sum(size / _parts(axes, mesh.rules, sizes) for axes, size in shapes.teacher),
    }
    gradients = sum(
        size / _parts(axes, mesh.rules, sizes)
        for axes, _, size, updated in shapes.weights
        if updated
    )
    # Frozen sets hold only what a step changes and share the rest with the state, so each costs as
    # much as the trained weights. The teacher is another model and is counted above.
    if "params" not in mesh.offload:
        state["frozen"] = gradients * len({*objective_of(cfg).frozen} - {"teacher"})
    on_device = sum(size for part, size in state.items() if part not in mesh.offload)

    width = _width(cfg)
    stages = sizes["stage"]
    # Outside of the pipeline the batch is split over the stages too; inside, each stage sees the
    # tokens of all of them, but holds a share of the layers.
    tokens = here * stages / cfg.train.accumulate
    """Tokens of a microbatch in all stages."""
    blocks = [model.blocks[name] for name in model.order]
    kept = sum(_saved(block, model.embed, model.remat) for block in blocks)
    layers = kept / sizes["tensor"] / stages * tokens * width
    # One layer at a time is recomputed in the backward pass, and nothing of it is dropped
    # meanwhile.
    widest = max(_saved(block, model.embed, RematConfig()) for block in blocks)
    # Of a pipeline only one microbatch is recomputed at a time.
    recomputed = widest / sizes["tensor"] * tokens / (mesh.microbatches or stages) * width
    # Logits of one block of rows, as the kernels hold them, not of all: with all of them the
    # estimate of 1B on v5e:8x8 was 41.7 GiB, with a block 6.3, and the compiler needs 6.03.
    vocab = -(-model.ids // sizes["tensor"])
    rows = min(tokens / stages, rows_of(vocab, "gpu" if platform == "cuda" else platform))
    logits = rows * vocab * (width + 8)
    # The head's logits and a recomputed layer are never there at the same time.
    return on_device + gradients + layers + max(logits, recomputed) + _gathered(shapes, cfg, sizes)


def _width(cfg: "Config") -> int:
    """Bytes of a number in the forward pass."""
    return 4 if cfg.model.dtype == "float32" else 2


def _gathered(shapes: Shapes, cfg: "Config", sizes: Mapping[str, int]) -> float:
    """Bytes of two layers of the mean size, gathered over all axes but tensor and expert."""
    stacked = sum(
        # Experts stay on their devices; tokens travel to them instead.
        number / (sizes["expert"] if "expert" in axes else 1)
        for axes, number, *_ in shapes.weights
        if "layers" in axes
    )
    return 2 * stacked / cfg.model.layers * _width(cfg) / sizes["tensor"]


def _saved(block: BlockConfig, embed: int, remat: RematConfig) -> float:
    """Numbers per token that one layer keeps on the devices for the backward pass."""
    policy = REMAT[remat.policy]
    saved = block.saved(embed)
    sizes = {name: _elements(dims) for name, dims in saved.items()}
    # The context is what attention returns before its output projection; no weight declares it as
    # its output.
    outputs = sizes.get("context", 0) + sum(
        weight.outputs
        for part in (block.mixer, block.mlp)
        for _, weight, _ in weights(part, Dim("embed", embed))
    )
    named = sum(sizes.get(name, 0) for name in remat.names if not remat.offloads(name))
    return policy.outputs * outputs + policy.stream * embed + named


def _work(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], chip: Chip, tokens: int, here: float
) -> float:
    """Seconds of one device's matrix products and elementwise traffic, with the pipeline's
    bubble."""
    passes = objective_of(cfg).forward_passes
    length = cfg.data.seq_len
    counts = components(cfg.model, length, int(cfg.lora is not None), passes)
    flops = sum(count.causal for count in counts.values())  # an adapter's own FLOPs are negligible
    if cfg.teacher:
        flops += forward_pass(cfg.teacher, length).causal
    # The forward pass is a third of the FLOPs of a step, which is what a recomputation adds.
    again = 1 + REMAT[cfg.model.remat.policy].recomputed / 3
    each = (flops - sum(shapes.low.values())) / chip.flops(cfg.model.dtype) + sum(
        low / chip.flops(dtype) for dtype, low in shapes.low.items()
    )
    products = each * again * tokens / math.prod(sizes.values())
    stages = sizes["stage"]
    stream = here * cfg.model.embed * 2 / sizes["tensor"] * cfg.model.layers
    turns = (cfg.mesh.microbatches or stages) * cfg.mesh.rounds
    elementwise = ELEMENTWISE * again * stream / chip.memory_bandwidth_per_device
    # Filling and draining the pipeline idles each stage for stages - 1 of the turns.
    return (products + elementwise) * (1 + (stages - 1) / turns)


def _networks(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], links: Mapping[str, Link], here: float
) -> list[float]:
    """Seconds on each kind of link."""
    sent = dict.fromkeys(sizes, 0.0)
    for traffic in (_sent_for_weights(shapes, cfg, sizes), _sent_for_activations(cfg, sizes, here)):
        for axis, size in traffic.items():
            sent[axis] += size
    seconds: dict[str, float] = collections.defaultdict(float)
    # Axes on one kind of link share its ports, so their times add up.
    for axis, size in sent.items():
        if axis in links and (bandwidth := links[axis].bandwidth):
            seconds[links[axis].kind] += size / bandwidth
    # 0.0 for a mesh without links, so that max() over the list is defined.
    return [*seconds.values(), 0.0]


def _sent_for_weights(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int]
) -> Mapping[str, float]:
    """Bytes that a device sends over each axis to gather sharded weights, forward and backward, to
    scatter their gradients, and to sum those of replicas."""
    mesh = cfg.mesh
    stages = sizes["stage"]
    sent: dict[str, float] = collections.defaultdict(float)
    for axes, number, _, updated in shapes.weights:
        stacked = "layers" in axes
        # Gradients travel in float32. A frozen weight is gathered but has none.
        gradient = 4 if updated else 0
        over = mesh_axes(axes, mesh.rules)
        # Axes over which a weight stays split where it is used; it is gathered over the others.
        within = ("tensor", "expert", "stage") if stacked else ("tensor", "expert")
        own = number / math.prod(sizes[axis] for axis in over if axis in within)
        # A stage gathers its layers anew for every microbatch that passes.
        times = mesh.microbatches or stages if stacked and stages > 1 else 1
        # Twice: the backward pass gathers again instead of keeping it. Kept, a scan stacks the
        # gathered weights of all layers: 14.0 in place of 12.3 GB of temporaries for 1B on 8 H100.
        gathered = own * (2 * _width(cfg) + gradient) * cfg.train.accumulate * times
        for axis in {"fsdp", "context"}.intersection(over):
            sent[axis] += gathered * _ring(sizes[axis])
        # An all-reduce sends twice what a reduce-scatter does.
        summed = 2 * gradient * number / _parts(axes, mesh.rules, sizes)
        for axis in ("data", "slices"):
            sent[axis] += summed * _ring(sizes[axis])
    return sent


def _sent_for_activations(
    cfg: "Config", sizes: Mapping[str, int], here: float
) -> Mapping[str, float]:
    """Bytes that a device sends over each axis for its tokens: tensor gathers and scatters the
    stream twice a layer, context passes keys and values round the ring, expert sends tokens to
    their experts and back, stage hands the stream on."""
    model = cfg.model
    blocks = [model.blocks[name] for name in model.order]
    width = _width(cfg)
    stream = here * model.embed * width
    passes = 3 + REMAT[model.remat.policy].recomputed
    """Forward, again under remat, and twice as much backward."""
    keys = sum(
        _elements(dims)
        for block in blocks
        for tensor, dims in block.mixer.saved().items()
        if tensor in ("key", "value")
    )
    chosen = sum(block.experts.top_k for block in blocks if block.experts)
    return {
        "tensor": 4 * passes * model.layers * stream * _ring(sizes["tensor"]),
        "context": passes * keys * here * width * (sizes["context"] - 1) / sizes["tensor"],
        "expert": chosen * stream * 2 * passes * _ring(sizes["expert"]),
        "stage": 2 * cfg.mesh.rounds * sizes["stage"] * stream,
    }


def _elements(dims: Sequence[Dim]) -> int:
    return math.prod(dim.size for dim in dims)


def _ring(size: int) -> float:
    """Share of the bytes that each of `size` devices sends around a ring."""
    return (size - 1) / size
