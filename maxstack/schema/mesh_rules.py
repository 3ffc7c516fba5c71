"""Rules between the mesh, the model and the batch, checked before jax is imported; each
rule yields (key, what is wrong and what to do)."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maxstack.config import did_you_mean, quoted
from maxstack.schema import parallel_rules
from maxstack.schema.mesh import AXES, RULES, Axes, names
from maxstack.schema.parts import Dim, Weight, layers

if TYPE_CHECKING:
    from maxstack.schema.config import Config

Fault = tuple[str, str]


def mesh_sizes(cfg: "Config", devices: int | None = None) -> dict[str, int]:
    """Mesh axis -> size as far as it is known: -1 counts as 1 unless the number of devices is
    given, or run.virtual_devices is."""
    known = math.prod(size for size in _asked(cfg).values() if size > 0)
    left = (devices or cfg.run.virtual_devices or known) // known
    return {axis: left if size == -1 else size for axis, size in _asked(cfg).items()}


def product_of(sizes: dict[str, int]) -> str:
    """'data=2 x tensor=4', of the axes above 1."""
    return (
        " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"
    )


def _asked(cfg: "Config") -> dict[str, int]:
    return {axis: getattr(cfg.mesh, axis) for axis in AXES}


def sizes(cfg: "Config", devices: int | None = None) -> Iterator[Fault]:
    """Every size that does not divide over the mesh, as far as the mesh is known."""
    found = mesh_sizes(cfg, devices)
    faults = list(_sharding(cfg, found))
    yield from faults or _sharding(cfg, found, "optimizer_rules")
    broken = list(_batch(cfg, found))
    yield from broken
    yield from (
        fault
        for fault in parallel_rules.check(cfg, found)
        if not broken or fault[0] != "train.batch_size"
    )


def axes(cfg: "Config") -> Iterator[Fault]:
    """The mesh by itself: sizes of axes, names in rules, and the number of virtual devices."""
    sizes = _asked(cfg)
    for axis, size in sizes.items():
        if size == 0:
            yield (
                f"mesh.{axis}",
                "got 0; allowed: -1 for whatever devices are left, or a whole number >= 1",
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        yield (
            f"mesh.{free[-1]}",
            f"{' and '.join(free)} are both -1, but only one axis can take whatever "
            f"devices are left; give {free[-1]} a size",
        )
    for key, logical, given in _rules(cfg):
        if logical not in RULES:
            yield (
                f"mesh.{key}.{logical}",
                f"unknown logical axis; allowed: {', '.join(RULES)}{did_you_mean(logical, RULES)}",
            )
        named = names(given)
        for axis in dict.fromkeys(named):
            if axis not in sizes:
                yield (
                    f"mesh.{key}.{logical}",
                    (
                        f"got mesh axis {quoted(axis)}; allowed: {', '.join(sizes)}, a "
                        "list of them, or null"
                        f"{did_you_mean(axis, sizes)}"
                    ),
                )
            elif named.count(axis) > 1:
                yield (
                    f"mesh.{key}.{logical}",
                    f"names mesh axis {axis} twice; a mesh axis splits a tensor once",
                )
    devices, known = cfg.run.virtual_devices, math.prod(size for size in sizes.values() if size > 0)
    if (
        devices
        and known
        and 0 not in sizes.values()
        and (devices % known if free else devices != known)
    ):
        product = product_of({axis: size for axis, size in sizes.items() if size > 0})
        wanted = f"a multiple of {known}" if free else f"{known}, or -1 as the size of one axis"
        yield (
            "run.virtual_devices",
            f"{devices} devices do not fill the mesh {product} = {known}; use {wanted}",
        )


def _rules(cfg: "Config") -> Iterator[tuple[str, str, Axes]]:
    """(key, logical axis, mesh axes) of both tables."""
    for key in ("rules", "optimizer_rules"):
        yield from ((key, logical, given) for logical, given in getattr(cfg.mesh, key).items())


def _sharding(cfg: "Config", sizes: dict[str, int], table: str = "rules") -> Iterator[Fault]:
    """By one of the two tables; that of the optimizer is for weights alone."""
    seen: set[str] = set()
    rules = cfg.mesh.rules | getattr(cfg.mesh, table)
    for tensor in _tensors(cfg):
        if table != "rules" and tensor[0].axis == "batch":
            continue
        spent: set[str] = set()
        for logical, size, key in tensor:
            axes = [axis for axis in names(rules.get(logical)) if axis not in spent]
            spent.update(axes)
            parts = math.prod(sizes[axis] for axis in axes)
            if (
                key and key not in seen and size % parts and axes != ["stage"]
            ):  # that one is for parallel_rules
                seen.add(key)
                yield (
                    key,
                    _indivisible(
                        key,
                        size,
                        logical,
                        f"mesh.{table}",
                        [axis for axis in axes if sizes[axis] > 1],
                        sizes,
                    ),
                )


def _tensors(cfg: "Config") -> Iterator[tuple[Dim, ...]]:
    """The weights and activations of the model, as far as their axes differ, with whole keys."""
    model = cfg.model
    embed, vocab = (
        Dim("embed", model.embed, "model.embed"),
        Dim("vocab", model.vocab, "model.vocab"),
    )
    batch = Dim("batch", 0)
    tokens = batch, Dim("seq", cfg.data.seq_len, "data.seq_len")
    periods = model.repetitions
    stacks = ((Dim("layers", periods, "model.layers"),), ()) if periods > 1 else ((),)
    yield from ((vocab, embed), (embed, vocab), (*tokens, vocab))
    yield (embed._replace(axis="norm"),)
    for key, data in (("data", cfg.data), ("eval.data", cfg.eval.data)):
        for axis in ("seq", "residual"):
            if data:
                yield batch, Dim(axis, data.seq_len, f"{key}.seq_len"), embed
    for name, block in model.blocks.items():
        for part, key in ((block.mixer, "mixer"), (block.mlp, "mlp")):
            for layer in layers(part, embed, f"model.blocks.{name}.{key}"):
                for weight in layer.section.parts(layer.width).values():
                    if isinstance(weight, Weight):
                        yield from ((*stack, *layer.whole(weight.dims)) for stack in stacks)
                for dims in layer.section.saved().values():
                    yield (*tokens, *layer.whole(dims))


def _indivisible(
    key: str, size: int, logical: str, table: str, axes: list[str], sizes: dict[str, int]
) -> str:
    parts = math.prod(sizes[axis] for axis in axes)
    by = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes) + (
        f" = {parts}" if len(axes) > 1 else ""
    )
    fits = math.gcd(size, parts)
    remedy = (
        f"mesh.{axes[0]}={fits}"
        if len(axes) == 1 and logical in ("heads", "kv_heads", "layers")
        else f"{key}={-(-size // parts) * parts}"
    )
    kept = [
        axis
        for i, axis in enumerate(axes)
        if size % math.prod(sizes[one] for one in axes[: i + 1]) == 0
    ]
    fewer = f"[{', '.join(kept)}]" if kept else "null"
    return (
        f"{key.rsplit('.', 1)[-1]}={size} is not divisible by {by}; use {remedy} or "
        f"{table}.{logical}: {fewer}"
    )


def _batch(cfg: "Config", sizes: dict[str, int]) -> Iterator[Fault]:
    train = cfg.train
    axes = names(cfg.mesh.rules["batch"])
    parts = math.prod(sizes[axis] for axis in axes)
    over = (
        f"the {parts} devices that share a batch (mesh "
        f"{product_of({axis: sizes[axis] for axis in axes})})"
    )
    if train.batch_size % train.accumulate:
        yield (
            "train.accumulate",
            f"batch_size={train.batch_size} does not split into "
            f"accumulate={train.accumulate} equal microbatches; "
            f"use a divisor of {train.batch_size}",
        )
    elif train.batch_size // train.accumulate % parts:
        rows = f"batch_size={train.batch_size}" + (
            f" / accumulate={train.accumulate} = {train.batch_size // train.accumulate} rows"
            if train.accumulate > 1
            else ""
        )
        yield (
            "train.batch_size",
            f"{rows} does not divide over {over}; use a batch_size that is a multiple of "
            f"{parts * train.accumulate}",
        )
    if cfg.eval.batch_size and cfg.eval.batch_size % parts:
        yield (
            "eval.batch_size",
            f"batch_size={cfg.eval.batch_size} does not divide over {over}; use a "
            f"multiple of {parts}",
        )
