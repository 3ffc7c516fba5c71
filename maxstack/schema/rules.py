"""Rules between sections of a configuration, checked before jax is imported; each yields (key, what
is wrong and what to do)."""

import math
import os
import re
from collections.abc import Callable, Iterator

from maxstack.config import Fault, storage
from maxstack.errors import ConfigError
from maxstack.schema import mesh_rules, model_rules, objective_rules
from maxstack.schema.config import Config
from maxstack.schema.objective import TEXTS
from maxstack.schema.optimizer import schedule_faults
from maxstack.schema.stages import stage_faults


def faults(cfg: Config) -> list[Fault]:
    """All faults that can be found before the number of devices is known."""
    rules = (
        *map(_with_teacher, (mesh_rules.sizes, model_rules.faults)),
        _schedules,
        _rounding,
        _evaluation,
        _samples,
        _steps,
        _stages,
        _feeding,
        _folder,
        _tiers,
        _tiles,
        _elastic,
        _processes,
    )
    return (
        # In order: later rules compute with the sizes of the mesh, so a fault in these is told
        # alone.
        list(_runtime(cfg))
        or list(mesh_rules.axes(cfg))
        or [
            *(fault for rule in rules for fault in rule(cfg)),
            *objective_rules.faults(cfg),
        ]
    )


def device_faults(cfg: Config, devices: int) -> list[Fault]:
    """Faults of sizes on this many devices, which determine every axis of the mesh."""
    return [*_with_teacher(mesh_rules.sizes)(cfg, devices), *_shapes(cfg, devices)]


def _rounding(cfg: Config) -> Iterator[Fault]:
    if cfg.optimizer.rounding == "stochastic" and cfg.model.param_dtype != "bfloat16":
        yield (
            "optimizer.rounding",
            f"stochastic is for weights in bfloat16, and model.param_dtype={cfg.model.param_dtype};"
            " leave it out",
        )


def _with_teacher(rule: Callable[..., Iterator[Fault]]) -> Callable[..., Iterator[Fault]]:
    """Apply a rule to the model, and to the teacher in its place."""

    def both(cfg: Config, *devices: int) -> Iterator[Fault]:
        found = [*rule(cfg, *devices)]
        yield from found
        if cfg.teacher:
            # Each in the other's place: rules that look at both models then see both, and what is
            # told already is left out.
            other = cfg.model_copy(update={"model": cfg.teacher, "teacher": cfg.model})
            for key, message in rule(other, *devices):
                if (key, message) not in found:
                    yield (
                        re.sub("^model[.]", "teacher.", key),
                        message.replace("model.", "teacher."),
                    )

    return both


def sizes_on(cfg: Config, devices: int, where: str, trains: bool = True) -> dict[str, int]:
    """Mesh axis -> size on this many devices. ConfigError where the mesh does not fill them, or
    where the model, or in training the batch, does not divide."""
    sizes = mesh_rules.mesh_sizes(cfg, devices)
    if (wanted := math.prod(sizes.values())) != devices:
        raise ConfigError(
            f"mesh: {mesh_rules.product_of(sizes)} is {wanted} devices, but {where} has "
            f"{devices}; set one axis to -1"
        )
    faults = [
        (key, message)
        for key, message in device_faults(cfg, devices)
        # Without training the batch is not that of the file.
        if trains or key.startswith(("mesh.", "model."))
    ]
    if faults:
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in faults))
    return sizes


def _stages(cfg: Config) -> Iterator[Fault]:
    train, data = cfg.train, cfg.data
    if not train.stages:
        return
    broken = [*stage_faults(train.stages, train.batch_size, data.seq_len)]
    yield from ((f"train.{key}", message) for key, message in broken)
    if not broken:
        yield from _shapes(cfg)
    if cfg.run.executable:
        yield "run.executable", "holds one shape, and train.stages has several; leave it out"
    if cfg.rollout:
        yield (
            "train.stages",
            "are for documents, and a rollout's rows are its samples; leave it out",
        )
    lengths = [stage.length for stage in cfg.stages.all]
    if min(lengths) == data.seq_len:
        return
    if data.has_records or cfg.model.tokens is not None:
        yield "train.stages", "shorter rows are for texts, which may be split; set batch_size alone"
    # Best-fit packs a window of rows ahead at their length then; a shorter row could not hold them.
    if data.packing == "best" and lengths != sorted(lengths):
        yield "train.stages", "seq_len may only grow with data.packing=best, which packs rows ahead"


def _shapes(cfg: Config, *devices: int) -> Iterator[Fault]:
    """Faults of the shapes of stages other than the largest."""
    for rows, length in cfg.stages.shapes if cfg.train.stages else ():
        for key, message in mesh_rules.sizes(cfg.of_shape(rows, length), *devices):
            # Other faults are not of this shape and are told by the rules themselves.
            if key in ("train.batch_size", "train.accumulate", "data.seq_len"):
                yield "train.stages", f"{rows} x {length}: {message}"


def _feeding(cfg: Config) -> Iterator[Fault]:
    if not cfg.rollout:
        return
    if cfg.train.epochs:
        yield "train.epochs", "are for documents, and prompts are drawn by rollout; set train.steps"
    for index, source in enumerate(cfg.data.sources):
        if source.epochs or isinstance(source.weight, tuple):
            yield (
                f"data.sources.{index}",
                "epochs, and weights over steps, are for documents, and prompts are drawn by "
                "rollout; give a number as the weight",
            )


def _schedules(cfg: Config) -> Iterator[Fault]:
    for key, message in schedule_faults(cfg.optimizer, cfg.train.steps):
        yield f"optimizer.{key}", message


def _samples(cfg: Config) -> Iterator[Fault]:
    if cfg.eval.samples is None:
        return
    if not cfg.eval.every:
        yield "eval.samples", "samples are written at evaluations, but eval.every is 0"
    if not cfg.objective.SAMPLES or cfg.model.scores:
        yield (
            "eval.samples",
            f"objective.kind={cfg.objective.kind} trains no model that generates from a prompt; "
            "leave it out",
        )
    if "params" in cfg.mesh.offload:
        yield "eval.samples", "weights in the host's memory cannot generate; leave it out"
    if cfg.objective.SAMPLES != TEXTS:
        if cfg.eval.samples.prompts:
            yield "eval.samples.prompts", "are for texts; leave them out"
        return
    if not cfg.eval.samples.prompts:
        yield "eval.samples.prompts", "texts need prompts: give some"
    for axis in ("stage", "context"):
        if getattr(cfg.mesh, axis) > 1:
            yield (
                "eval.samples",
                f"weights on a mesh with {axis}={getattr(cfg.mesh, axis)} cannot generate; leave "
                "it out, and use `maxstack generate` on a checkpoint",
            )


def _evaluation(cfg: Config) -> Iterator[Fault]:
    held_out = any(source.holdout > 0 for source in cfg.data.sources)
    if cfg.eval.every:
        if cfg.eval.data is None and not held_out and not cfg.eval.tasks:
            yield (
                "eval.every",
                "evaluation has no documents: give one of data.sources a holdout above 0, or "
                "eval.data, or eval.every: 0",
            )
        if cfg.eval.tasks and (cfg.objective.SCORES or not cfg.objective.FORWARD):
            yield (
                "eval.tasks",
                f"objective.kind={cfg.objective.kind} trains a model that gives no token a "
                "probability by those before it, which tasks need; leave them out",
            )
        return
    if cfg.eval.baselines:
        yield (
            "eval.baselines",
            "baselines are measured on evaluation documents, but eval.every is 0; "
            "give it a number of steps",
        )
    if cfg.checkpoint.keep_best:
        yield (
            "checkpoint.keep_best",
            f"keep_best={cfg.checkpoint.keep_best} needs evaluations, but eval.every "
            "is 0; give it a number of steps",
        )
    if cfg.train.stop_early:
        yield (
            "train.stop_early",
            "is decided by evaluations, but eval.every is 0; give it a number of steps",
        )


def _folder(cfg: Config) -> Iterator[Fault]:
    if storage.is_url(cfg.run.output_dir):
        yield (
            "run.output_dir",
            f"{cfg.run.output_dir} is a URL, and object storage has no locks and no appending, "
            "which a run's folder needs; give a local path, or one where the bucket is mounted "
            "(gcsfuse, mount-s3)",
        )


def _tiers(cfg: Config) -> Iterator[Fault]:
    # By real path: two tiers in one folder would take each other's steps for their own.
    taken = {os.path.realpath(os.path.expanduser(cfg.run.output_dir)): "run.output_dir"}
    for index, tier in enumerate(cfg.checkpoint.tiers):
        if storage.is_url(tier.path):
            yield (
                f"checkpoint.tiers.{index}.path",
                f"{tier.path} is a URL, and a step is finished by renaming files, which object "
                "storage cannot; give a local path where the bucket is mounted (gcsfuse, mount-s3)",
            )
        key, path = f"checkpoint.tiers.{index}", os.path.realpath(os.path.expanduser(tier.path))
        if path in taken:
            yield (
                f"{key}.path",
                f"path={tier.path} is also that of {taken[path]}; give each tier a folder of its "
                "own",
            )
        taken[path] = key


def _tiles(cfg: Config) -> Iterator[Fault]:
    for i, rule in enumerate(cfg.quantization.rules):
        tile = rule.bwd_weight_grad_tile_size
        # A float is a share of the row, a whole number its tokens.
        parts = (1 / tile if isinstance(tile, float) else cfg.data.seq_len / tile) if tile else 1.0
        if not parts.is_integer() or cfg.data.seq_len % parts:
            yield (
                f"quantization.rules.{i}.bwd_weight_grad_tile_size",
                f"{tile} does not divide data.seq_len={cfg.data.seq_len}; use a divisor",
            )


def _runtime(cfg: Config) -> Iterator[Fault]:
    # Virtual devices of one process stand for slices, so that elastic training can be tried on a
    # laptop.
    rehearses = cfg.run.virtual_devices and not cfg.distributed
    if cfg.faults.elastic and cfg.runtime != "pathways" and not rehearses:
        yield (
            "faults.elastic",
            "is for one process that drives all slices, and runtime=jax starts one a host; give "
            "runtime=pathways, leave it out, or try it with run.virtual_devices",
        )


def _elastic(cfg: Config) -> Iterator[Fault]:
    if (elastic := cfg.faults.elastic) is None:
        return
    if cfg.mesh.slices <= elastic.least:
        yield (
            "faults.elastic",
            f"mesh.slices={cfg.mesh.slices} with least={elastic.least} leaves none to "
            "lose; give mesh.slices a larger number",
        )
    if not cfg.checkpoint.every:
        yield (
            "faults.elastic",
            "goes on from the newest checkpoint, but checkpoint.every is 0; give it a "
            "number of steps",
        )


def _processes(cfg: Config) -> Iterator[Fault]:
    distributed = cfg.distributed
    if cfg.runtime == "pathways" and (distributed or cfg.run.virtual_devices):
        yield (
            "runtime",
            "pathways is one process over devices elsewhere; leave out "
            f"{'distributed' if distributed else 'run.virtual_devices'}",
        )
    if distributed and distributed.process >= distributed.processes:
        yield (
            "distributed.process",
            f"process={distributed.process} is not one of the {distributed.processes} that "
            f"distributed.processes counts from 0; use {distributed.processes - 1} or less",
        )


def _steps(cfg: Config) -> Iterator[Fault]:
    profile = cfg.train.profile
    if profile and profile.start + profile.steps > cfg.train.steps:
        yield (
            "train.profile",
            f"steps {profile.start} to {profile.start + profile.steps} reach beyond "
            f"train.steps={cfg.train.steps}; start earlier",
        )
