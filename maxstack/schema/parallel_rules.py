"""Rules between ways of sharding a model over a mesh; each yields (key, what is wrong and what to
do)."""

from collections.abc import Iterator

from maxstack.config import Fault
from maxstack.schema.config import Config
from maxstack.schema.mesh import names, parts


def faults(cfg: Config, sizes: dict[str, int]) -> Iterator[Fault]:
    """Every unsupported combination on a mesh of these sizes."""
    yield from _pipeline(cfg, sizes)
    if sizes["context"] > 1:
        yield from _context(cfg, sizes)
    yield from _experts(cfg, sizes)


def _pipeline(cfg: Config, sizes: dict[str, int]) -> Iterator[Fault]:
    stages, rounds = sizes["stage"], cfg.mesh.rounds
    microbatches = cfg.mesh.microbatches
    if stages == 1:
        for key, value, least in (("rounds", rounds, 2), ("microbatches", microbatches or 0, 1)):
            # stage=-1 may become 1 on few devices; then rounds and microbatches are no mistake.
            if value >= least and cfg.mesh.stage == 1:
                yield (
                    f"mesh.{key}",
                    f"{key}={value} is for a pipeline, but mesh.stage is 1; set mesh.stage, or "
                    f"leave {key} out",
                )
        return
    model, over = cfg.model, stages * rounds
    periods = model.repetitions
    if periods % over or not periods:
        by = f"mesh.stage={stages}" + (f" x mesh.rounds={rounds} = {over}" if rounds > 1 else "")
        fits = [size for size in range(1, periods + 1) if periods % (size * rounds) == 0]
        fewer = max((size for size in fits if size <= stages), default=0)
        remedy = f"mesh.stage={fewer}" if fits else "mesh.rounds=1"
        yield (
            "mesh.stage",
            f"the pattern of blocks repeats {periods} times, which is not divisible by "
            f"{by}; use {remedy}, or another model.prefix",
        )
    if "stage" not in names(cfg.mesh.rules["layers"]):
        yield (
            "mesh.rules.layers",
            f"with mesh.stage={stages} the layers lie on the stages; leave "
            "mesh.rules.layers as it is",
        )
    # Microbatches go round in groups of as many as there are stages.
    if microbatches and microbatches % stages:
        yield (
            "mesh.microbatches",
            f"microbatches={microbatches} is not a multiple of mesh.stage={stages}; use "
            f"{-(-microbatches // stages) * stages}",
        )
        return
    unit = batch_unit(cfg, sizes)
    if cfg.train.batch_size % unit:
        yield (
            "train.batch_size",
            (
                f"batch_size={cfg.train.batch_size} does not split into "
                f"mesh.microbatches={microbatches or stages} over the mesh; "
                f"use a multiple of {unit}"
            ),
        )


def batch_unit(cfg: Config, sizes: dict[str, int]) -> int:
    """The smallest batch that divides over the mesh, accumulation and a pipeline's microbatches."""
    stages = sizes["stage"]
    # Rows are split over the stages too, outside of the pipeline, so a group of microbatches takes
    # one share from each stage.
    groups = max((cfg.mesh.microbatches or 0) // stages, 1) if stages > 1 else 1
    return parts(cfg.mesh.rules["batch"], sizes) * groups * cfg.train.accumulate


def _experts(cfg: Config, sizes: dict[str, int]) -> Iterator[Fault]:
    blocks = [*cfg.model.blocks.values(), *(cfg.teacher.blocks.values() if cfg.teacher else ())]
    if sizes["expert"] > 1 and not any(block.experts for block in blocks):
        yield (
            "mesh.expert",
            f"expert={sizes['expert']}, but no block of the model has a mixture of "
            f"experts; use mesh.fsdp={sizes['expert']} instead",
        )
    rules = cfg.mesh.rules
    for axis in (axis for axis in names(rules["expert"]) if sizes[axis] > 1):
        # An all-to-all over an axis needs tokens that lie split over it.
        if axis not in (*names(rules["batch"]), *names(rules["seq"])):
            yield (
                "mesh.rules.expert",
                f"{axis} splits experts but not tokens, so that none can travel over it; "
                "add it to mesh.rules.batch",
            )
        if axis in names(rules["mlp"]):
            yield (
                "mesh.rules.expert",
                f"{axis} splits experts and, in mesh.rules.mlp, their hidden units; "
                "leave it out of one of them",
            )


def _context(cfg: Config, sizes: dict[str, int]) -> Iterator[Fault]:
    # In a ring a device holds one piece from the front and one from the back, so that under a
    # causal mask all work alike.
    pieces, ring = sizes["context"], cfg.mesh.context_kind == "ring"
    if ring and cfg.data.seq_len % (2 * pieces):
        fits = -(-cfg.data.seq_len // (2 * pieces)) * 2 * pieces
        remedy = "mesh.context=1" if cfg.model.tokens else f"{fits} or mesh.context_kind=ulysses"
        yield (
            "data.seq_len",
            (
                f"seq_len={cfg.data.seq_len} is not divisible by 2 x "
                f"mesh.context={pieces}: in a ring each device holds two pieces; use {remedy}"
            ),
        )
    for name, block in cfg.model.blocks.items():
        where, mixer = f"model.blocks.{name}.mixer", block.mixer
        if cfg.mesh.context_kind not in mixer.OVER_CONTEXT:
            ways = [*mixer.OVER_CONTEXT, "mesh.context=1"]
            yield (
                "mesh.context_kind",
                f"{where} (kind {mixer.kind}) cannot be split by {cfg.mesh.context_kind}; use "
                f"{' or '.join(ways)}",
            )
        elif not ring:
            over = pieces * parts(cfg.mesh.rules["heads"], sizes)
            if mixer.split_heads % over:
                yield (
                    "mesh.context_kind",
                    (
                        f"ulysses splits {where}'s {mixer.split_heads} heads over "
                        f"mesh.context={pieces} and the axes of heads, {over} in "
                        "all; use mesh.context_kind=ring or a smaller mesh.context"
                    ),
                )
        moe = block.experts
        if moe and moe.capacity:
            yield (
                "mesh.context",
                f"capacity={moe.capacity} of model.blocks.{name}.mlp counts whole rows; "
                "set it to null, or mesh.context=1",
            )
