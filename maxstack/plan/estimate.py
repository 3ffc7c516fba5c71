"""Memory and time of a step by arithmetic on shapes, without a compiler: coarse, but thousands a
second, to choose what is worth compiling."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maxstack.hardware.chips import Chip
from maxstack.models.flops import components
from maxstack.models.model import abstract
from maxstack.objectives.objective import objective_of
from maxstack.plan.topology import Link
from maxstack.schema.decoder import REMAT, BlockConfig, RematConfig
from maxstack.schema.mesh import names
from maxstack.schema.parts import Dim, weights
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
    """What of a run does not depend on the mesh: (logical axes, elements, bytes, whether it is
    trained) of each weight, (logical axes, bytes) of the optimizer's state beside it, and by type
    the FLOPs of a token that a recipe has in low precision."""

    weights: tuple[tuple[tuple[str | None, ...], int, int, bool], ...]
    state: tuple[tuple[tuple[str | None, ...], int], ...]
    low: Mapping[str, float]

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
            (
                i.axes,
                math.prod(i.shape),
                math.prod(i.shape) * jax.numpy.dtype(i.dtype).itemsize,
                updated,
            )
            for i, updated in zip(jax.tree.leaves(info), jax.tree.leaves(trained), strict=True)
        )
        tx = optim.build(cfg.optimizer, cfg.train.steps, info)
        state = jax.eval_shape(tx.init, step.only(trained, params))
        kept = [
            ((i.axes if i else (None,) * leaf.ndim), leaf.size * leaf.dtype.itemsize)
            for i, leaf in zip(weights_behind(state, info), jax.tree.leaves(state), strict=True)
        ]
        return cls(weights, tuple(kept), _low(cfg, rewrite))


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


def _low(cfg: "Config", rewrite: "Rewrite") -> Mapping[str, float]:
    """FLOPs of a token by type, of the products that run in low precision: 2 per weight forward,
    and for each gradient that a rule quantizes, but for those of experts."""
    from flax import nnx

    from maxstack import state
    from maxstack.models import decoder

    found: collections.Counter[str] = collections.Counter()
    plain = nnx.traversals.flatten_mapping(state.of_weights(abstract(cfg.model)[1])[0], sep="/")
    for path, use in rewrite.matches.items():
        if not use.quant.low or use.spec.use not in ("matmul", "experts"):
            continue
        mixture = (
            decoder.mixture(cfg.model, tuple(path.split("/")))
            if use.spec.use == "experts"
            else None
        )
        products = [
            use.quant.weight,
            None if mixture else use.quant.grad,
            None if mixture or cfg.lora else use.quant.weight_grad,
        ]
        for operand in filter(None, products):
            found[operand.qtype] += (
                2 * plain[path].size * (mixture.top_k / mixture.experts if mixture else 1)
            )
    return found


def _parts(axes: tuple[str | None, ...], rules: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for entry in spec(axes, rules) for axis in names(entry))


def _memory(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], here: float, platform: str
) -> float:
    from maxstack.kernels.cross_entropy.by_rows import rows_of

    mesh, model = cfg.mesh, cfg.model
    kept = {
        "params": sum(
            size / _parts(axes, mesh.rules, sizes) for axes, _, size, _ in shapes.weights
        ),
        "optimizer": sum(
            size / _parts(axes, mesh.rules | mesh.optimizer_rules, sizes)
            for axes, size in shapes.state
        ),
    }
    gradients = sum(
        size / _parts(axes, mesh.rules, sizes)
        for axes, _, size, updated in shapes.weights
        if updated
    )
    if "params" not in mesh.offload:
        kept["frozen"] = gradients * len(objective_of(cfg).frozen)
    state = sum(size for part, size in kept.items() if part not in mesh.offload)
    at_once = here * sizes["stage"] / cfg.train.accumulate
    width, tensor = 4 if model.dtype == "float32" else 2, sizes["tensor"]
    blocks = [model.blocks[name] for name in model.order]
    layers = (
        sum(_saved(block, model.embed, model.remat) for block in blocks)
        / tensor
        / sizes["stage"]
        * at_once
        * width
    )
    vocab = model.vocab // tensor
    logits = (
        min(at_once / sizes["stage"], rows_of(vocab, {"cuda": "gpu"}.get(platform, platform)))
        * vocab
        * (width + 8)
    )
    widest = (
        max(_saved(block, model.embed, RematConfig()) for block in blocks)
        / tensor
        * at_once
        / (cfg.mesh.microbatches or sizes["stage"])
        * width
    )
    return state + gradients + layers + max(logits, widest) + _gathered(shapes, cfg, sizes, width)


def _gathered(shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], width: int) -> float:
    """The weights of two layers of the mean size, gathered over everything but tensor and
    expert."""
    stacked = sum(
        number / (sizes["expert"] if "expert" in axes else 1)
        for axes, number, *_ in shapes.weights
        if "layers" in axes
    )
    return 2 * stacked / cfg.model.layers * width / sizes["tensor"]


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
    flops = sum(
        count.causal
        for count in components(cfg.model, cfg.data.seq_len, int(cfg.lora is not None)).values()
    )  # an adapter's own are few
    again = 1 + REMAT[cfg.model.remat.policy].recomputed / 3
    each = (flops - sum(shapes.low.values())) / chip.flops(cfg.model.dtype) + sum(
        low / chip.flops(dtype) for dtype, low in shapes.low.items()
    )
    products = each * again * tokens / math.prod(sizes.values())
    stream = (
        here
        * sizes["stage"]
        * cfg.model.embed
        * 2
        / sizes["tensor"]
        * cfg.model.layers
        / sizes["stage"]
    )
    turns = (cfg.mesh.microbatches or sizes["stage"]) * cfg.mesh.rounds
    return (products + ELEMENTWISE * again * stream / chip.memory_bandwidth_per_device) * (
        1 + (sizes["stage"] - 1) / turns
    )


def _networks(
    shapes: Shapes, cfg: "Config", sizes: Mapping[str, int], links: Mapping[str, Link], here: float
) -> list[float]:
    """Seconds on each kind of link."""
    width, model = 4 if cfg.model.dtype == "float32" else 2, cfg.model
    total: dict[str, float] = {}
    again = 2 + REMAT[model.remat.policy].recomputed
    sent: dict[str, float] = dict.fromkeys(sizes, 0.0)
    for axes, number, _, updated in shapes.weights:
        gradient = 4 * updated
        over = [axis for entry in spec(axes, cfg.mesh.rules) for axis in names(entry)]
        own = number / math.prod(
            sizes[axis]
            for axis in over
            if axis in ("tensor", "expert", "stage") and ("layers" in axes or axis != "stage")
        )
        for axis in ("fsdp", "context"):
            if axis in over:
                times = (
                    (cfg.mesh.microbatches or sizes["stage"])
                    if "layers" in axes and sizes["stage"] > 1
                    else 1
                )
                sent[axis] += (
                    own * (2 * width + gradient) * _ring(sizes[axis]) * cfg.train.accumulate * times
                )
        for axis in ("data", "slices"):
            sent[axis] += (
                2 * gradient * number / _parts(axes, cfg.mesh.rules, sizes) * _ring(sizes[axis])
            )
    layers, stream = model.layers / sizes["stage"], here * sizes["stage"] * model.embed * width
    sent["tensor"] += 4 * (again + 1) * layers * stream * _ring(sizes["tensor"])
    saved = [model.blocks[name].mixer.saved() for name in model.order]
    keys = (
        sum(
            math.prod(dim.size for dim in dims)
            for tensors in saved
            for name, dims in tensors.items()
            if name in ("key", "value")
        )
        / sizes["stage"]
    )
    sent["context"] += (
        (again + 1)
        * keys
        * here
        * sizes["stage"]
        * width
        * (sizes["context"] - 1)
        / sizes["tensor"]
    )
    chosen = sum(moe.top_k for name in model.order if (moe := model.blocks[name].experts))
    sent["expert"] += chosen / sizes["stage"] * stream * 2 * (again + 1) * _ring(sizes["expert"])
    sent["stage"] += 2 * cfg.mesh.rounds * stream
    for axis, size in sent.items():
        if axis in links and (bandwidth := links[axis].bandwidth):
            total[links[axis].kind] = total.get(links[axis].kind, 0.0) + size / bandwidth
    return [*total.values(), 0.0]


def _ring(size: int) -> float:
    return (size - 1) / size
