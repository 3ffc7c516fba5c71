"""What must hold between the mesh, the model and the batch, checked before jax is imported; each
rule yields (key, what is wrong and what to do)."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maxstack.config import did_you_mean, quoted
from maxstack.schema import parallel_rules
from maxstack.schema.mesh import AXES, RULES, Axes, names
from maxstack.schema.mixers import GatedDeltaConfig, Mixer, MLAConfig
from maxstack.schema.mlps import (
    DenseMLPConfig,
    GatedMLPConfig,
    MLPKind,
    MoEConfig,
    ParallelMLPConfig,
    SharedExpertConfig,
)

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
        if table != "rules" and tensor[0][0] == "batch":
            continue
        spent: set[str] = set()
        for logical, key, size in tensor:
            axes = [axis for axis in names(rules[logical]) if axis not in spent]
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


Dim = tuple[str, str, int]
"""Logical axis, the key that sets its size ("" if checked elsewhere), size."""


def _tensors(cfg: "Config") -> Iterator[tuple[Dim, ...]]:
    """The weights and activations of the model, as far as their axes differ."""
    model = cfg.model
    embed, vocab = ("embed", "model.embed", model.embed), ("vocab", "model.vocab", model.vocab)
    tokens = (("batch", "", 0), ("seq", "data.seq_len", cfg.data.seq_len))
    periods = (model.layers - len(model.prefix)) // len(model.period)
    stacks: tuple[tuple[Dim, ...], ...] = (
        ((("layers", "model.layers", periods),), ()) if periods > 1 else ((),)
    )
    yield from (
        (vocab, embed),
        (embed, vocab),
        (*tokens, vocab),
        (("norm", "model.embed", model.embed),),
    )
    for key, data in (("data", cfg.data), ("eval.data", cfg.eval.data)):
        yield from (
            (("batch", "", 0), (axis, f"{key}.seq_len", data.seq_len), embed)
            for axis in ("seq", "residual")
            if data
        )
    for name, block in model.blocks.items():
        where = f"model.blocks.{name}"
        weights, inside = _mixer(block.mixer, f"{where}.mixer", embed)
        for kind, at in _mlps(block.mlp, f"{where}.mlp"):
            hidden = ("mlp", f"{at}.hidden", kind.hidden)
            experts = (
                (("expert", f"{at}.experts", kind.experts),) if isinstance(kind, MoEConfig) else ()
            )
            weights += [(*experts, embed, hidden), (*experts, hidden, embed)]
            inside.append((hidden,))
        yield from ((*stack, *weight) for stack in stacks for weight in weights)
        yield from ((*tokens, *activation) for activation in inside)


def _mixer(
    mixer: Mixer, where: str, embed: Dim
) -> tuple[list[tuple[Dim, ...]], list[tuple[Dim, ...]]]:
    """A mixer's weights, and its activations without batch and sequence."""
    if isinstance(mixer, MLAConfig):
        heads, values = (
            ("heads", f"{where}.heads", mixer.heads),
            ("head_dim", f"{where}.value_dim", mixer.value_dim),
        )
        keys = ("head_dim", f"{where}.nope_dim", mixer.nope_dim + mixer.rope_dim)
        latents = [
            ("latent", f"{where}.kv_lora", mixer.kv_lora),
            ("latent", f"{where}.q_lora", mixer.q_lora or mixer.kv_lora),
        ]
        return [
            (heads, values, embed),
            *((embed, latent) for latent in latents),
            *((latent, heads, keys) for latent in latents),
        ], [(heads, keys), (heads, values)]
    if isinstance(mixer, GatedDeltaConfig):
        pairs = (
            ("kv_heads", "key_heads", mixer.key_heads, "key_dim", mixer.key_dim),
            ("heads", "value_heads", mixer.value_heads, "value_dim", mixer.value_dim),
        )
    else:
        pairs = (
            ("heads", "heads", mixer.heads, "head_dim", mixer.head_dim),
            (
                "kv_heads",
                "kv_heads" if mixer.kv_heads else "heads",
                mixer.kv,
                "head_dim",
                mixer.head_dim,
            ),
        )
    parts = [
        ((axis, f"{where}.{key}", size), ("head_dim", f"{where}.{dim}", length))
        for axis, key, size, dim, length in pairs
    ]
    return [
        *((embed, *part) for part in parts),
        *((*part, embed) for part in parts if part[0][0] == "heads"),
    ], list(parts)


def _mlps(
    mlp: MLPKind, where: str
) -> Iterator[tuple[GatedMLPConfig | DenseMLPConfig | MoEConfig | SharedExpertConfig, str]]:
    """The parts of an MLP that have a hidden layer of their own, with their keys."""
    if isinstance(mlp, ParallelMLPConfig):
        yield mlp.dense, f"{where}.dense"
        mlp, where = mlp.moe, f"{where}.moe"
    yield mlp, where
    if isinstance(mlp, MoEConfig) and mlp.shared:
        yield mlp.shared, f"{where}.shared"


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
