"""Memory and time of a step by arithmetic on shapes, without a compiler: coarse, but thousands a
second, to choose what is worth compiling."""

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
"""Times that the residual stream is read or written in a layer, forward and backward: norms,
residual sums, rotations, activations."""
SLACK = 1.5
"""Estimates of memory up to this many times what a device has go to the compiler, which knows
better."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes that do not depend on the mesh: (logical axes, elements, bytes, True if it is trained)
    of each weight, (logical axes, bytes) of the optimizer's state beside it, and by type
    the FLOPs of a token that a recipe has in low precision."""

    weights: tuple[tuple[tuple[str | None, ...], int, int, bool], ...]
    state: tuple[tuple[tuple[str | None, ...], int], ...]
    low: Mapping[str, float]
    teacher: tuple[tuple[tuple[str | None, ...], int], ...] = ()
    """(logical axes, bytes) of each weight of the teacher."""

    @classmethod
    def of(cls, cfg: "Config") -> "Shapes":
        """From the model and optimizer, as shapes alone."""
        import jax

        from maxstack import optim, state, step
        from maxstack.state import weights_behind
        from maxstack.weights.rewrite import Rewrite

        rewrite = Rewrite(cfg)
        params, info = state.of_weights(rewrite.state, rewrite.replaced)
        trained = optim.trained(cfg.optimizer, info)
        weights = tuple(
            (i.axes, leaf.size, leaf.size * leaf.dtype.itemsize, updated)
            for i, leaf, updated in zip(*map(jax.tree.leaves, (info, params, trained)), strict=True)
        )
        tx = optim.build(cfg.optimizer, cfg.train.steps, info)
        state = jax.eval_shape(tx.init, step.select(trained, params))
        kept = [
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
    """Both figures of `cfg` on a mesh of `sizes`. The time is the longer of the devices' work and
    the networks', which are taken to overlap."""
    tokens = cfg.train.batch_size * cfg.data.seq_len
    here = tokens / math.prod(
        sizes[axis] for axis in ("slices", "stage", "data", "fsdp", "expert", "context")
    )
    seconds = (
        _work(shapes, cfg, sizes, chip, tokens, here),
        *_networks(shapes, cfg, sizes, links, here),
    )
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
    """FLOPs of a token by type, of the products that run in low precision: 2 per weight forward,
    and in training for each gradient that a rule quantizes, but for those of experts."""
    from flax import nnx

    from maxstack import state
    from maxstack.models.stack import mixture as mixture_at

    flops: collections.Counter[str] = collections.Counter()
    plain = nnx.traversals.flatten_mapping(state.of_weights(abstract(cfg.model)[1])[0], sep="/")
    for path, use in rewrite.matches.items():
        if not use.quant.low or use.spec.use not in ("matmul", "experts"):
            continue
        quant, share = use.quant, 1.0
        operands = [quant.weight, quant.grad, None if cfg.lora else quant.weight_grad]
        if use.spec.use == "experts":
            mixture = mixture_at(cfg.model, tuple(path.split("/")))
            operands, share = operands[:1], mixture.top_k / mixture.experts
        for operand in filter(None, operands if trains else operands[:1]):
            flops[operand.qtype] += 2 * plain[path].size * share
    return flops


def mesh_axes(axes: Sequence[str | None], rules: Mapping[str, Any]) -> list[str]:
    """Mesh axes over which the rules split an array of these logical axes."""
    return [axis for entry in spec(axes, rules) for axis in names(entry)]


def _parts(axes: tuple[str | None, ...], rules: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in mesh_axes(axes, rules))


def _memory(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], here: float, platform: str
) -> float:
    from maxstack.kernels.cross_entropy.by_rows import rows_of

    mesh, model, tensor, stages = cfg.mesh, cfg.model, sizes["tensor"], sizes["stage"]
    weights = [
        (size / _parts(axes, mesh.rules, sizes), updated)
        for axes, _, size, updated in shapes.weights
    ]
    optimizer_rules = mesh.rules | mesh.optimizer_rules
    state = {
        "params": sum(size for size, _ in weights),
        "optimizer": sum(
            size / _parts(axes, optimizer_rules, sizes) for axes, size in shapes.state
        ),
    }
    gradients = sum(size for size, updated in weights if updated)
    if "params" not in mesh.offload:
        state["frozen"] = gradients * len({*objective_of(cfg).frozen} - {"teacher"})
    state["teacher"] = sum(size / _parts(axes, mesh.rules, sizes) for axes, size in shapes.teacher)
    on_device = sum(size for part, size in state.items() if part not in mesh.offload)
    at_once = here * stages / cfg.train.accumulate
    width = _width(cfg)
    blocks = [model.blocks[name] for name in model.order]
    saved = sum(_saved(block, model.embed, model.remat) for block in blocks)
    layers = saved / tensor / stages * at_once * width
    vocab = -(-model.ids // tensor)
    rows = min(at_once / stages, rows_of(vocab, {"cuda": "gpu"}.get(platform, platform)))
    widest = max(_saved(block, model.embed, RematConfig()) for block in blocks)
    recomputed = widest / tensor * at_once / (mesh.microbatches or stages) * width
    gathered = _gathered(shapes, cfg, sizes)
    return on_device + gradients + layers + max(rows * vocab * (width + 8), recomputed) + gathered


def _width(cfg: "Config") -> int:
    """Bytes of a number in the forward pass."""
    return 4 if cfg.model.dtype == "float32" else 2


def _gathered(shapes: Shapes, cfg: "Config", sizes: Mapping[str, int]) -> float:
    """The weights of two layers of the mean size, gathered over everything but tensor and
    expert."""
    stacked = sum(
        number / (sizes["expert"] if "expert" in axes else 1)
        for axes, number, *_ in shapes.weights
        if "layers" in axes
    )
    return 2 * stacked / cfg.model.layers * _width(cfg) / sizes["tensor"]


def _saved(block: BlockConfig, embed: int, remat: RematConfig) -> float:
    """Numbers a token that one layer keeps on the devices for the backward pass."""
    policy, saved = REMAT[remat.policy], block.saved(embed)
    sizes = {name: math.prod(dim.size for dim in dims) for name, dims in saved.items()}
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
    """Matrix products and elementwise traffic of one device, stretched by the pipeline's idle
    turns."""
    passes, length = objective_of(cfg).forward_passes, cfg.data.seq_len
    counts = components(cfg.model, length, int(cfg.lora is not None), passes)
    flops = sum(count.causal for count in counts.values())  # an adapter's own are few
    if cfg.teacher:
        flops += forward_pass(cfg.teacher, length).causal
    again = 1 + REMAT[cfg.model.remat.policy].recomputed / 3
    each = (flops - sum(shapes.low.values())) / chip.flops(cfg.model.dtype) + sum(
        low / chip.flops(dtype) for dtype, low in shapes.low.items()
    )
    products = each * again * tokens / math.prod(sizes.values())
    stages, stream = sizes["stage"], here * cfg.model.embed * 2 / sizes["tensor"] * cfg.model.layers
    turns = (cfg.mesh.microbatches or stages) * cfg.mesh.rounds
    elementwise = ELEMENTWISE * again * stream / chip.memory_bandwidth_per_device
    return (products + elementwise) * (1 + (stages - 1) / turns)


def _networks(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], links: Mapping[str, Link], here: float
) -> list[float]:
    """Seconds on each kind of link."""
    width, model, mesh, stages = _width(cfg), cfg.model, cfg.mesh, sizes["stage"]
    again = 2 + REMAT[model.remat.policy].recomputed
    sent: dict[str, float] = dict.fromkeys(sizes, 0.0)
    for axes, number, _, updated in shapes.weights:
        gradient, stacked = 4 * updated, "layers" in axes
        over = mesh_axes(axes, mesh.rules)
        within = ("tensor", "expert", "stage") if stacked else ("tensor", "expert")
        own = number / math.prod(sizes[axis] for axis in over if axis in within)
        times = mesh.microbatches or stages if stacked and stages > 1 else 1
        gathered = own * (2 * width + gradient) * cfg.train.accumulate * times
        for axis in {"fsdp", "context"}.intersection(over):
            sent[axis] += gathered * _ring(sizes[axis])
        for axis in ("data", "slices"):
            parts = _parts(axes, mesh.rules, sizes)
            sent[axis] += 2 * gradient * number / parts * _ring(sizes[axis])
    stream = here * model.embed * width
    sent["tensor"] += 4 * (again + 1) * model.layers * stream * _ring(sizes["tensor"])
    keys = sum(
        math.prod(dim.size for dim in dims)
        for name in model.order
        for tensor, dims in model.blocks[name].mixer.saved().items()
        if tensor in ("key", "value")
    )
    context = sizes["context"] - 1
    sent["context"] += (again + 1) * keys * here * width * context / sizes["tensor"]
    chosen = sum(moe.top_k for name in model.order if (moe := model.blocks[name].experts))
    sent["expert"] += chosen * stream * 2 * (again + 1) * _ring(sizes["expert"])
    sent["stage"] += 2 * mesh.rounds * stages * stream
    seconds: dict[str, float] = collections.defaultdict(float)
    for axis, size in sent.items():
        if axis in links and (bandwidth := links[axis].bandwidth):
            seconds[links[axis].kind] += size / bandwidth
    return [*seconds.values(), 0.0]


def _ring(size: int) -> float:
    """Share of the bytes that each of `size` devices sends around a ring."""
    return (size - 1) / size
