"""The parts of a run's start, before the first step: mesh, watchdog, checks, checkpoints, feed,
first state. What is heavy to import (Orbax, feeds, rewards) is imported where a run needs it:
imports were half of the processor time of a start."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxstack import config, optim, sharding
from maxstack.cluster.peers import Peers
from maxstack.compiled_steps import CompiledStep
from maxstack.errors import ConfigError, shortened
from maxstack.hardware import compiling
from maxstack.hardware.chips import peak_flops
from maxstack.load import run_folder
from maxstack.models.pipeline import bubble
from maxstack.report.log import Log
from maxstack.report.metrics import last_step
from maxstack.report.run_folder import folder_of
from maxstack.report.trackers import check_installed
from maxstack.run import Run
from maxstack.schema import objective_rules, rules
from maxstack.schema.data import PICTURED, holds_text
from maxstack.state import State, count, flat
from maxstack.step import select

if TYPE_CHECKING:
    from maxstack.checkpoint.store import Checkpoints
    from maxstack.data.deal import EpochPlan
    from maxstack.data.feed import BatchFeed
    from maxstack.evals.evaluation import Evaluation
    from maxstack.faults.heartbeat import Heartbeat
    from maxstack.meter import Meter
    from maxstack.report.metrics import Writer
    from maxstack.rollouts.maker import Maker
    from maxstack.schema.config import Config


def count_steps(cfg: "Config", mesh: jax.sharding.Mesh) -> "tuple[Config, EpochPlan | None]":
    """Return the configuration with the train.steps that train.epochs take, and the plan by which
    lanes exchange documents, the same in every process."""
    if cfg.train.epochs is None:
        return cfg, None
    prepare_tokenizer(cfg)  # how many rows the documents fill depends on it
    from maxstack.data.batches import Batches
    from maxstack.data.epochs import plan_epochs, set_epochs
    from maxstack.objectives.objective import objective_of

    cfg, fields = set_epochs(cfg), objective_of(cfg).fields
    # Not those of a Run, which is assembled later: its schedules need the number of steps.
    lanes = Batches(cfg, mesh, fields).rows(cfg.train.batch_size)
    found = plan_epochs(cfg, lanes, fields)
    train = cfg.train.model_copy(update={"steps": found.steps})
    return cfg.model_copy(update={"train": train}), found


def prepare_tokenizer(cfg: "Config") -> None:
    """Learn the tokenizer in process 0 where the configuration asks for it, while the others wait.
    ConfigError where the model has too few tokens for the tokenizer."""
    from maxstack.data import vocabulary

    if getattr(cfg.data.tokenizer, "learn", None):
        if Peers().number == 0:
            vocabulary.learn_vocabulary(cfg)
        # One process learns, since two that learned would write the same file.
        Peers().barrier("tokenizer")
    if cfg.model.tokens is None:
        vocabulary.check_vocabulary(cfg.data, cfg.objective.token_ids(cfg.decoder.vocab))


def make_mesh(cfg: "Config", devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The mesh over these devices, by default all. ConfigError where a size does not divide over
    it, now that the number of devices is known."""
    if cfg.faults.elastic and jax.process_count() > 1:
        raise ConfigError(
            "faults.elastic: is for one process that drives all slices, and there are several; "
            "leave it out, lost processes are restarted"
        )
    mesh = sharding.make_mesh(cfg.mesh, devices or jax.devices())
    if faults := rules.device_faults(cfg, mesh.size):
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in faults))
    return mesh


def start_watchdog(cfg: "Config", ending: contextlib.ExitStack, ends: bool) -> "Heartbeat | None":
    """Start the heartbeat and the watchdog of this process, which last until `ending` is closed, or
    until the process ends where it `ends` with the run; None where faults.watchdog is null."""
    if cfg.faults.watchdog is None:
        return None
    from maxstack.faults.heartbeat import Heartbeat

    # The folder is not claimed yet; a watchdog only ever appends to the file.
    log = folder_of(cfg) / "log.txt"
    return ending.enter_context(Heartbeat(cfg.faults.watchdog, log, Peers(), ends))


def open_checkpoints(
    run: Run, folder: Path, say: Callable[[str], None], forced: Sequence[str]
) -> "Checkpoints | None":
    """The run's checkpoints; None where nothing is saved or restored, so that Orbax, which takes
    seconds to import, is not imported."""
    cfg, folder = run.cfg.checkpoint, folder / "checkpoints"
    if (
        not cfg.every
        and not cfg.tiers
        and cfg.restore in ("none", "latest")
        and not folder.exists()
    ):
        return None
    from maxstack.checkpoint.store import Checkpoints

    return Checkpoints(run, folder, say, forced)


def engine_bytes(run: Run) -> dict[str, int]:
    """Bytes that the rollout engine keeps on a device beside training, by part."""
    if run.cfg.rollout is None:
        return {}
    from maxstack.rollouts.capacity import cache_bytes

    return cache_bytes(run)


def open_feed(
    run: Run,
    folder: Path,
    ending: contextlib.ExitStack,
    plan: "EpochPlan | None" = None,
) -> "tuple[BatchFeed, Maker | None]":
    """Open the feed of a run's batches, which `ending` closes, and the maker of rollouts where it
    learns from samples. ConfigError or DataError where a part of it cannot be used."""
    from maxstack.data.batches import BatchMetrics
    from maxstack.data.feed import Feed

    cfg, size = run.cfg, run.cfg.train.batch_size
    if cfg.rollout is None:
        fields = run.objective.fields
        feed = Feed(
            cfg.data,
            run.batches.rows(size),
            size,
            fields=fields,
            stages=cfg.stages,
            metrics=BatchMetrics(cfg.data, run.batches, fields),
            plan=plan,
            may_end=cfg.train.epochs is not None,
        )
        ending.callback(feed.close)
        # Registered for closing first: a check that fails must not leave worker processes behind.
        feed.mixture.check()
        return feed, None
    from maxstack.rewards.pool import Pool  # every other run starts without it
    from maxstack.rewards.sandbox import prefix
    from maxstack.rollouts.feed import RolloutFeed
    from maxstack.rollouts.maker import Maker

    environment = cfg.rollout.environment
    pool = Pool(cfg.rewards, cfg.rollout.workers, prefix() if cfg.rollout.sandbox else ())
    ending.callback(pool.close)
    pool.check(environment.call if environment else None)
    maker = Maker(run, pool)
    rollouts = RolloutFeed(run, maker, folder)
    ending.callback(rollouts.close)
    rollouts.mixture.check()
    return rollouts, maker


def evaluator(
    run: Run,
    log: Log,
    writer: "Writer",
    frozen: tuple[dict[str, Any], ...],
    maker: "Maker | None",
) -> "Evaluation | None":
    """The evaluation of a run: rewards where `maker` makes samples, else the held-out loss, and
    tasks; None where eval.every is 0."""
    if not run.cfg.eval.every:
        return None
    from maxstack.evals.evaluation import Evaluation, Part

    parts, compare = list[Part](), lambda: None
    if maker:
        from maxstack.rollouts.evaluation import RewardEvaluator

        parts.append(RewardEvaluator(run, maker, log, writer))
    elif run.cfg.eval.data or any(source.holdout for source in run.cfg.data.sources):
        from maxstack.evals.held_out import Evaluator

        held_out = Evaluator(run, log, writer, frozen)
        parts, compare = [held_out], held_out.compare
    if run.cfg.eval.tasks:
        from maxstack.evals.tasks import TaskEvaluator

        parts.append(TaskEvaluator(run, log, writer))
    return Evaluation(run.cfg, parts, compare)


def introduce(run: Run, sources: list[str], log: Log, begins: bool = False) -> None:
    """Log a description of the run that is about to start; `begins`: from weights that no
    checkpoint holds."""
    cfg = run.cfg
    for line in (*_sizes(run), *_surprises(run, begins)):
        log.say(line)
    for choice in run.kernels:
        log.say(f"kernel: {choice}")
    if cfg.xla.flags:
        flags = " ".join(f"{name}={value}" for name, value in cfg.xla.flags.items())
        if not compiling.flags_for(cfg, run.mesh.devices.flat[0].platform):
            flags = f"flags for {cfg.xla.platform}, not used here: {flags}"
        log.say(f"xla: {flags}")
    for line in sources:
        log.say(f"data: {line}")
    if any(holds_text(vars(source)) for source in cfg.data.sources):
        log.say(f"tokenizer: {getattr(cfg.data.tokenizer, 'path', 'bytes')}")
    if begins and cfg.model.weights:
        log.say(f"weights: those of {cfg.model.weights}")
    elif begins and cfg.checkpoint.restore in ("latest", "none"):
        records = {*objective_rules.record_kinds(cfg)} - {None, *PICTURED}
        warning = ", with which post-training achieves little" if records else ""
        log.say(
            f"weights: random{warning}; model.from=FOLDER, Org/Name or a run starts from others"
        )
    if cfg.objective.kind == "sft" and not cfg.data.has_records:
        log.say(
            "objective.kind=sft: no source has records, so the loss counts every token of the "
            "texts; set `record` for conversations"
        )
    if not cfg.checkpoint.every:
        log.say("checkpoint.every=0: this run saves no weights")


def _sizes(run: Run) -> Iterator[str]:
    """Lines about parameters, devices and steps."""
    cfg, mesh = run.cfg, run.mesh
    rewrite = run.weights.rewrite
    size, opt_size = count(run.abstract.params)[1], count(run.abstract.opt)[1]
    trained = f", {run.trained:,} of them trained" if run.trained < run.weights.parameters else ""
    low = {use.rule.weight_qtype for use in rewrite.matches.values() if use.mode == "ptq"}
    types = ", ".join([cfg.model.param_dtype, *sorted(qtype or "" for qtype in low)])
    yield (
        f"{cfg.run.name}: {run.weights.parameters:,} parameters{trained}, {size / 2**20:,.1f} MiB "
        f"in {types}; optimizer state {opt_size / 2**20:,.1f} MiB"
    )
    axes = " x ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1) or "one device"
    kind = mesh.devices.flat[0].device_kind
    peak = peak_flops(kind)
    yield (
        f"devices: {mesh.size} x {kind} ({axes}); peak "
        f"{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown, so no MFU'}; "
        f"{run.flops_per_token / 1e6:,.1f} MFLOP a token, causal"
    )
    if cfg.train.epochs:
        yield f"train.epochs={cfg.train.epochs:g}: {cfg.train.steps:,} steps"
    if (stages := mesh.shape["stage"]) > 1:
        idle = bubble(stages, cfg.mesh.rounds, cfg.mesh.microbatches or stages)
        yield (
            f"pipeline: {stages} stages, a bubble of {idle:.1%}; more mesh.microbatches or "
            "mesh.rounds shrink it"
        )


def _surprises(run: Run, begins: bool) -> Iterator[str]:
    """Lines about what a user may not expect of this configuration."""
    cfg, skipped = run.cfg, run.weights.rewrite.skipped
    if skipped:
        yield (
            f"lora: no adapters for {', '.join(skipped)}, although lora.targets match: experts, "
            "tables and the head get none"
        )
    if begins and cfg.lora and cfg.model.weights is None:
        yield (
            "lora: the base is random: neither model.from nor checkpoint.restore gives its "
            "weights, and only adapters are trained"
        )
    if cfg.lora and cfg.lora.adapter and getattr(cfg.objective, "reference", "") == "adapter_off":
        yield (
            "objective.reference=adapter_off: compares with the model without any adapter, not "
            f"with lora.adapter={cfg.lora.adapter}, with which the run begins; "
            "objective.reference=start does"
        )
    if begins and cfg.model.weights:
        yield from differences_from_folder(run, cfg.model.weights)
    if begins and (done := last_step(folder_of(cfg))):
        yield (
            f"found metrics to step {done} but no checkpoint; restarting from step 0; "
            f"checkpoint.every={cfg.checkpoint.every}"
        )


def check_steps(steps: int, begin: int) -> None:
    """ConfigError where the checkpoint is beyond train.steps."""
    if begin > steps:
        raise ConfigError(
            f"train.steps={steps}, but the run is already at step {begin}; raise "
            "train.steps, set checkpoint.restore to an earlier step, or choose another run.name"
        )


def moved_rate(written: dict[str, Any], cfg: "Config", updates: int) -> str:
    """A line where the learning rate of the next update differs from that of the configuration that
    wrote the checkpoint; "" where it does not."""
    # More train.steps at a resume move the rate of schedules that end with the run, without a word
    # in the configuration.
    text = (
        optim.describe_rate_change(written, cfg.optimizer, cfg.train.steps, updates)
        if written
        else ""
    )
    if not text:
        return ""
    changed = [
        f"{key}: {old} -> {new}"
        for key, old, new in config.difference(written, cfg.model_dump(mode="json"))
        if key == "train.steps" or key.startswith("optimizer.")
    ]
    return f"{text}; changed: {shortened(', '.join(changed), 400)}"


def differences_from_folder(run: Run, weights: str) -> Iterator[str]:
    """Lines about what a folder says of training that a run does otherwise."""
    from maxstack.hf.contents import open_contents

    if run_folder(weights):
        return
    said, seq_len = open_contents(weights).folder.config, run.cfg.data.seq_len
    most = said.get("max_position_embeddings")
    if isinstance(most, int) and seq_len > most:
        yield (
            f"data.seq_len={seq_len} is more than max_position_embeddings={most} of {weights}: "
            "its weights have not seen later positions"
        )
    dropout = re.compile("dropout|_pdrop")
    if dropped := [f"{key}={said[key]}" for key in filter(dropout.search, said) if said[key]]:
        yield (
            f"{weights} asks for dropout in training ({', '.join(dropped)}), which is not applied; "
            "transformers' Trainer applies it"
        )


def check_can_start(run: Run) -> None:
    """Check a run before it allocates anything. ConfigError for a requested kernel that does not
    support it, a tracker that is not installed, a compiler flag that XLA does not know."""
    cfg = run.cfg
    _ = run.kernels  # traces the step, and raises
    if jax.process_index() == 0:
        check_installed(cfg.run.trackers)
    if (folder_of(cfg) / "quantization.json").is_file():
        raise ConfigError(
            f"run.name: {folder_of(cfg)} holds a model that maxstack quantize wrote; give this run "
            f"another name: run.name={cfg.run.name}-lora"
        )
    if cfg.model.scores and not cfg.objective.SCORES:
        raise ConfigError(
            f"model.head.scores: objective.kind={cfg.objective.kind} needs logits, and a reward "
            "model gives none; leave it out, or set objective.kind=reward"
        )
    # The compilation of the step would tell an unknown flag too, after the run's folder is claimed.
    compiling.check_flags(cfg, run.mesh)
    frozen = [path for path, use in run.weights.rewrite.matches.items() if use.mode == "ptq"]
    _check_rank(run)
    if frozen and not cfg.lora and not cfg.optimizer.trainable:
        raise ConfigError(
            f"quantization: mode ptq keeps {len(frozen)} weights ({frozen[0]}, ...) in low "
            "precision and never trains them, while the rest is trained; set lora to train "
            "adapters, mode: qt to train in low precision, or optimizer.trainable to say what is "
            "meant"
        )


def check_weights(run: Run) -> None:
    """Check the weights that a run without checkpoints begins from, and its teachers'. DataError
    where model.weights are of another model, ConfigError where lora.adapter does not fit lora or a
    teacher has another tokenizer."""
    cfg = run.cfg
    # A run that resumes does not read these weights again; their folder may be gone.
    if (folder_of(cfg) / "checkpoints").exists():
        return
    if cfg.lora and cfg.lora.adapter:
        run.weights.read_adapter(cfg.lora.adapter)
    if cfg.model.weights is not None or run.others:
        from maxstack import starting_weights

        if cfg.model.weights is not None:
            starting_weights.check(run)
        for teacher in run.others.values():
            starting_weights.check_teacher(run, teacher)


def _check_rank(run: Run) -> None:
    """ConfigError where lora.rank is more than the full rank of every target."""
    if not run.cfg.lora or not run.weights.rewrite.adapted:
        return
    # A weight of more dimensions is a matrix [in, out...] to an adapter.
    smaller = {
        path: min(weight.matrix[0], math.prod(weight.matrix[1:]))
        for path, weight in run.weights.rewrite.adapted.items()
    }
    path = max(smaller, key=smaller.__getitem__)
    if run.cfg.lora.rank > smaller[path]:
        raise ConfigError(
            f"lora.rank={run.cfg.lora.rank}: the largest target, {path}, has "
            f"{[*run.weights.rewrite.adapted[path].matrix]}; an adapter of rank {smaller[path]} is "
            "the whole weight, so give a smaller rank"
        )


def explain_memory(error: BaseException | None, meter: "Meter") -> None:
    """ConfigError where memory ran out in the first step: a restart would fail in the same way."""
    # Only in the first step: memory that runs out later is no mistake, and a supervisor tries
    # again.
    if isinstance(error, jax.errors.JaxRuntimeError) and meter.begins:
        told = re.search(r"RESOURCE_EXHAUSTED: (.*)", str(error))
        if told:
            raise ConfigError(
                f"memory: the first step ran out of it ({told[1].rstrip('.')}); use "
                "train.accumulate, model.remat, more devices or a smaller train.batch_size; "
                "`maxstack plan` shows what a step needs"
            ) from error


def first_state(run: Run) -> State:
    """The state before the first step: random weights or those of model.weights, with the adapter
    of lora.adapter."""
    folder, adapter = run.cfg.model.weights, run.cfg.lora and run.cfg.lora.adapter
    if folder is None and not adapter:
        return run.init()
    # An adapter beside random weights: the same weights as without it, by path so that it can be
    # added.
    if folder is None:
        return run.begin_with(flat(run.init().params))
    from maxstack import starting_weights

    # One weight at a time: the original and its quantized form are never both whole in memory.
    loaded = starting_weights.original(run, finite=not run.cfg.checkpoint.allow_nonfinite)
    return run.begin_with(run.weights.from_original(loaded))


def frozen_weights(run: Run) -> tuple[dict[str, Any], ...]:
    """Return the step's last argument where the objective has second sets of weights, by name: of
    another model all weights; of this model, as the run began, only those that a step changes,
    since the state has the others."""
    if not run.objective.frozen:
        return ()
    own = {*run.objective.frozen} - {*run.others}
    # Made anew from the run's beginning, also where it resumes: the reference is the model as the
    # run began, which no checkpoint holds.
    second = select(run.changed, first_state(run).params) if own else None
    return (
        {
            name: first_state(run.others[name]).params if name in run.others else second
            for name in run.objective.frozen
        },
    )


def restore_before(
    step: int,
    run: Run,
    saves: "Checkpoints | None",
    feed: "BatchFeed",
    begin: np.ndarray,
) -> tuple[State, dict[str, Any]]:
    """The state of the newest checkpoint before the batch of a step, and its notes, with the feed
    set to continue there. `begin`: where the feed began."""
    state = saves.restore(feed, before=step) if saves else None
    if saves and state is not None:
        return state, saves.notes
    # No checkpoint is old enough: the run begins again, as it did at its start.
    feed.restore(begin)
    state = saves.restore(feed) if saves and run.cfg.checkpoint.elsewhere else first_state(run)
    assert state is not None, "a path gives a state or an error"
    return state, {}


def describe_shape(shaped: CompiledStep, step: int) -> str:
    """A line about batches of another shape."""
    rows, length = shaped.rows, shaped.run.cfg.data.seq_len
    return (
        f"batches are {rows:,} x {length:,} tokens from step {step}; compiled the step in "
        f"{shaped.seconds:.1f} s"
    )
