"""Rules between the mesh, the model and the batch, checked before jax is imported; each
rule yields (key, what is wrong and what to do).

Each tensor of the model is a list of dimensions with logical axes, sizes and the keys that decide
these. The rules map logical axes to mesh axes; a size that the product of their sizes does not
divide is a fault of its key, told once, with the nearest size or rule that divides."""

import math
from collections.abc import Iterator

from maxstack.config import Fault
from maxstack.config.spelling import did_you_mean
from maxstack.errors import quoted
from maxstack.schema import parallel_rules
from maxstack.schema.config import Config
from maxstack.schema.mesh import AXES, RULES, names, parts
from maxstack.schema.parts import Dim, Dims, Weight, layers


def mesh_sizes(cfg: Config, devices: int | None = None) -> dict[str, int]:
    """Mesh axis -> size as far as known: -1 counts as 1 unless the number of devices, or
    run.virtual_devices, is given."""
    sized = math.prod(size for size in _asked(cfg).values() if size > 0)
    # Rounded down here; `axes` and `sizes_on` refuse what does not divide.
    left = (devices or cfg.run.virtual_devices or sized) // sized
    return {axis: left if size == -1 else size for axis, size in _asked(cfg).items()}


def product_of(sizes: dict[str, int]) -> str:
    """'data=2 x tensor=4', of the axes above 1."""
    return (
        " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"
    )


def _asked(cfg: Config) -> dict[str, int]:
    return {axis: getattr(cfg.mesh, axis) for axis in AXES}


def sizes(cfg: Config, devices: int | None = None) -> Iterator[Fault]:
    """Every size that does not divide over the mesh, as far as the mesh is known."""
    sizes = mesh_sizes(cfg, devices)
    # A size that the rules do not divide is told once: the optimizer's rules add axes to the same.
    yield from [*_sharding(cfg, sizes)] or _sharding(cfg, sizes, "optimizer_rules")
    batch = [*_batch(cfg, sizes)]
    yield from batch
    for key, message in parallel_rules.faults(cfg, sizes):
        # One fault of the batch at a time, since a multiple for the pipeline is one for the mesh
        # too.
        if not batch or key != "train.batch_size":
            yield key, message


def axes(cfg: Config) -> Iterator[Fault]:
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
            f"{' and '.join(free)} are both -1, but only one axis can take whatever devices are "
            f"left; give {free[-1]} a size",
        )
    for table in ("rules", "optimizer_rules"):
        for logical, split in getattr(cfg.mesh, table).items():
            for message in _rule_problems(logical, names(split)):
                yield f"mesh.{table}.{logical}", message
    devices, sized = cfg.run.virtual_devices, {axis: n for axis, n in sizes.items() if n > 0}
    needed = math.prod(sized.values())
    if devices and 0 not in sizes.values() and (devices % needed if free else devices != needed):
        wanted = f"a multiple of {needed}" if free else f"{needed}, or -1 as the size of one axis"
        yield (
            "run.virtual_devices",
            f"{devices} devices do not fill the mesh {product_of(sized)} = {needed}; use {wanted}",
        )


def _rule_problems(logical: str, axes: tuple[str, ...]) -> Iterator[str]:
    """Mistakes in a rule: the mesh axes that split a logical axis."""
    if logical not in RULES:
        yield f"unknown logical axis; allowed: {', '.join(RULES)}{did_you_mean(logical, RULES)}"
    for axis in dict.fromkeys(axes):
        if axis not in AXES:
            yield (
                f"got mesh axis {quoted(axis)}; allowed: {', '.join(AXES)}, a list of them, or "
                f"null{did_you_mean(axis, AXES)}"
            )
        elif axes.count(axis) > 1:
            yield f"names mesh axis {axis} twice; a mesh axis splits a tensor once"


def _sharding(cfg: Config, sizes: dict[str, int], table: str = "rules") -> Iterator[Fault]:
    """Sizes that one of the two tables of rules does not divide; the optimizer's is for weights
    only."""
    # A dimension without a key is no key of the file and follows from others.
    seen = {""}
    rules = cfg.mesh.rules | getattr(cfg.mesh, table)
    for tensor in _tensors(cfg):
        if table != "rules" and tensor[0].axis == "batch":
            continue
        spent: set[str] = set()
        for logical, size, key in tensor:
            # A mesh axis splits a tensor once, along the first dimension that names it, as
            # sharding.spec does.
            axes = [axis for axis in names(rules.get(logical)) if axis not in spent]
            spent.update(axes)
            if axes == ["stage"]:
                continue  # parallel_rules has that one
            if key not in seen and size % parts(axes, sizes):
                seen.add(key)
                split = [axis for axis in axes if sizes[axis] > 1]
                fixed = bool(cfg.model.tokens) and key.endswith("seq_len")
                yield key, _indivisible(key, size, logical, f"mesh.{table}", split, sizes, fixed)


def _tensors(cfg: Config) -> Iterator[Dims]:
    """Yield the dimensions of weights and activations, with full keys; of tensors that the mesh
    shards alike, such as norms, one is enough."""
    model = cfg.model
    embed = Dim("embed", model.embed, "model.embed")
    batch = Dim("batch", 0)
    tokens = batch, Dim("seq", cfg.data.seq_len, "data.seq_len")
    periods = model.repetitions
    # Blocks of the pattern are stacked along `layers`, those of prefix and remainder are not.
    stacks = ((Dim("layers", periods, "model.layers"),), ()) if periods > 1 else ((),)
    if vocab := model.vocabulary:
        yield from ((vocab, embed), (embed, vocab), (*tokens, vocab))
    yield (embed._replace(axis="norm"),)
    for key, data in cfg.data_sections.items():
        for axis in ("seq", "residual"):
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
    key: str,
    size: int,
    logical: str,
    table: str,
    axes: list[str],
    sizes: dict[str, int],
    fixed: bool,
) -> str:
    """`fixed`: the size follows from others, so that it cannot be changed."""
    pieces = parts(axes, sizes)
    by = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
    remedy = f"{key}={-(-size // pieces) * pieces}"
    if len(axes) > 1:
        by += f" = {pieces}"
    # Heads and layers are the model's; changing the mesh is the smaller change. Widths and batches
    # can be rounded up.
    if fixed or (len(axes) == 1 and logical in ("heads", "kv_heads", "layers")):
        *others, axis = axes
        remedy = f"mesh.{axis}={math.gcd(size // parts(others, sizes), sizes[axis])}"
    # The first axes of the rule that divide the size together, for a rule that is still of use.
    fitting = [axis for i, axis in enumerate(axes) if size % parts(axes[: i + 1], sizes) == 0]
    fewer = f"[{', '.join(fitting)}]" if fitting else "null"
    return (
        f"{key.rsplit('.', 1)[-1]}={size} is not divisible by {by}; use {remedy} or "
        f"{table}.{logical}: {fewer}"
    )


def _batch(cfg: Config, sizes: dict[str, int]) -> Iterator[Fault]:
    batch, microbatches = cfg.train.batch_size, cfg.train.accumulate
    axes = names(cfg.mesh.rules["batch"])
    pieces = parts(axes, sizes)
    mesh = product_of({axis: sizes[axis] for axis in axes})
    over = f"does not divide over the {pieces} devices that share a batch (mesh {mesh})"
    if batch % microbatches:
        yield (
            "train.accumulate",
            f"batch_size={batch} does not split into accumulate={microbatches} equal "
            f"microbatches; use a divisor of {batch}",
        )
    elif batch // microbatches % pieces:
        rows = f" / accumulate={microbatches} = {batch // microbatches} rows"
        yield (
            "train.batch_size",
            f"batch_size={batch}{rows if microbatches > 1 else ''} {over}; use a batch_size that "
            f"is a multiple of {pieces * microbatches}",
        )
    if cfg.eval.batch_size and cfg.eval.batch_size % pieces:
        yield (
            "eval.batch_size",
            f"batch_size={cfg.eval.batch_size} {over}; use a multiple of {pieces}",
        )
