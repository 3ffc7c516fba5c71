"""The parts of a run's start, before the first step: mesh, watchdog, checkpoints, first state,
compilation."""

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
from maxstack.errors import ConfigError, shortened
from maxstack.faults.policy import Rewind
from maxstack.hardware import compiling
from maxstack.hardware.chips import peak_flops
from maxstack.load import run_folder
from maxstack.models.pipeline import bubble
from maxstack.report.log import Log
from maxstack.report.metrics import last_step
from maxstack.report.run_folder import folder_of
from maxstack.report.trackers import check_installed
from maxstack.run import Run
from maxstack.schema import rules
from maxstack.schema.data import PICTURED, holds_text
from maxstack.shaped import Shaped
from maxstack.state import State, count, flat
from maxstack.step import select

if TYPE_CHECKING:
    from maxstack.checkpoint.store import Checkpoints
    from maxstack.data.deal import Dealt
    from maxstack.data.feed import BatchFeed
    from maxstack.evals.evaluation import Evaluation
    from maxstack.faults.heartbeat import Heartbeat
    from maxstack.faults.policy import Policy
    from maxstack.faults.replicas import Recompute
    from maxstack.meter import Meter
    from maxstack.report.metrics import Writer
    from maxstack.rollouts.maker import Maker
    from maxstack.schema.config import Config


def counted(cfg: "Config", mesh: jax.sharding.Mesh) -> "tuple[Config, Dealt | None]":
    """The configuration with the train.steps that train.epochs take, and how documents are dealt
    then, the same in every process."""
    if cfg.train.epochs is None:
        return cfg, None
    prepare_tokenizer(cfg)  # how many rows the documents fill depends on it
    from maxstack.data.batches import Batches
    from maxstack.data.epochs import dealt, with_epochs
    from maxstack.objectives.objective import objective_of

    cfg, fields = with_epochs(cfg), objective_of(cfg).fields
    lanes = Batches(cfg, mesh, fields).rows(cfg.train.batch_size)
    found = dealt(cfg, lanes, fields)
    train = cfg.train.model_copy(update={"steps": found.steps})
    return cfg.model_copy(update={"train": train}), found


def prepare_tokenizer(cfg: "Config") -> None:
    """Process 0 learns the tokenizer that the configuration wants learnt, and the others wait;
    ConfigError where the model has too few tokens for it."""
    from maxstack.data import fits

    if getattr(cfg.data.tokenizer, "learn", None):
        from maxstack.data import vocabulary

        if Peers().number == 0:
            vocabulary.learn(cfg)
        Peers().barrier("tokenizer")
    if cfg.model.tokens is None:
        fits(cfg.data, cfg.objective.token_ids(cfg.decoder.vocab))


def make_mesh(cfg: "Config", devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The mesh over all devices, or these; ConfigError where a size does not divide by it, now that
    their number is known."""
    if cfg.faults.elastic and jax.process_count() > 1:
        raise ConfigError(
            "faults.elastic: is for one process that drives all slices, and there are "
            "several; leave it out, they are started again"
        )
    mesh = sharding.make_mesh(cfg.mesh, devices or jax.devices())
    if faults := rules.device_faults(cfg, mesh.size):
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in faults))
    return mesh


def watched(cfg: "Config", ending: contextlib.ExitStack, ends: bool) -> "Heartbeat | None":
    """The heartbeat of this process, until `ending` is closed, or where it `ends` with the run
    until its end; None where no watchdog is wanted."""
    if cfg.faults.watchdog is None:
        return None
    from maxstack.faults.heartbeat import Heartbeat

    log = folder_of(cfg) / "log.txt"
    return ending.enter_context(Heartbeat(cfg.faults.watchdog, log, Peers(), ends))


def open_checkpoints(
    run: Run, folder: Path, say: Callable[[str], None], forced: Sequence[str]
) -> "Checkpoints | None":
    """The run's checkpoints; None where nothing is to be saved or restored, so that orbax is not
    even imported."""
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
    """Bytes of a device that the engine of a run keeps beside training, by part."""
    if run.cfg.rollout is None:
        return {}
    from maxstack.rollouts.capacity import cache_bytes

    return cache_bytes(run)


def open_feed(
    run: Run,
    folder: Path,
    ending: contextlib.ExitStack,
    dealt: "Dealt | None" = None,
) -> "tuple[BatchFeed, Maker | None]":
    """The feed of a run's batches, until `ending` is closed, and what makes them where they are
    samples of the model. ConfigError or DataError where a part of it cannot be used."""
    from maxstack.data.fed import Fed
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
            figures=Fed(cfg.data, run.batches, fields),
            dealt=dealt,
            may_end=cfg.train.epochs is not None,
        )
        ending.callback(feed.close)
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
    """The evaluation of a run: by rewards where `maker` makes samples, else by the loss, and by
    tasks; None where there is to be none."""
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
    """Log the run that is about to begin, in a few lines; `begins`: from weights that no checkpoint
    holds."""
    cfg = run.cfg
    size, opt_size = (count(tree)[1] for tree in (run.abstract.params, run.abstract.opt))
    trained = f", {run.trained:,} of them trained" if run.trained < run.weights.parameters else ""
    low = {
        use.rule.weight_qtype for use in run.weights.rewrite.matches.values() if use.mode == "ptq"
    }
    types = ", ".join([cfg.model.param_dtype, *sorted(qtype or "" for qtype in low)])
    mesh = " x ".join(f"{axis}={n}" for axis, n in run.mesh.shape.items() if n > 1) or "one device"
    kind = run.mesh.devices.flat[0].device_kind
    peak = peak_flops(kind)
    log.say(
        f"{cfg.run.name}: {run.weights.parameters:,} parameters{trained}, {size / 2**20:,.1f} MiB "
        f"in {types}; optimizer state {opt_size / 2**20:,.1f} MiB"
    )
    log.say(
        f"devices: {run.mesh.size} x {kind} ({mesh}); peak "
        f"{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown, so no MFU'}; "
        f"{run.flops_per_token / 1e6:,.1f} MFLOP "
        "a token, with the keys that a query sees"
    )
    if cfg.train.epochs:
        log.say(f"train.epochs={cfg.train.epochs:g}: {cfg.train.steps:,} steps")
    if (stages := run.mesh.shape["stage"]) > 1:
        idle = bubble(stages, cfg.mesh.rounds, cfg.mesh.microbatches or stages)
        log.say(
            f"pipeline: {stages} stages, idle in {idle:.1%} of their turns; more "
            "mesh.microbatches or mesh.rounds make that less"
        )
    if run.weights.rewrite.skipped:
        log.say(
            f"lora: no adapters beside {', '.join(run.weights.rewrite.skipped)}, which "
            "lora.targets match: experts, tables and the head take none"
        )
    if begins and cfg.lora and cfg.model.weights is None:
        log.say(
            "lora: the base is random: neither model.from nor checkpoint.restore gives "
            "its weights, and adapters alone are trained"
        )
    if cfg.lora and cfg.lora.adapter and getattr(cfg.objective, "reference", "") == "adapter_off":
        log.say(
            "objective.reference=adapter_off: compares with the model without an adapter, and not "
            f"with what the run begins with by lora.adapter={cfg.lora.adapter}; "
            "objective.reference=start does"
        )
    if begins and cfg.model.weights:
        for line in unlike_folder(run, cfg.model.weights):
            log.say(line)
    if begins and (done := last_step(folder_of(cfg))):
        log.say(
            f"this run has metrics up to step {done} and no checkpoint: from step 0; "
            f"checkpoint.every={cfg.checkpoint.every}"
        )
    for choice in run.kernels:
        log.say(f"kernel: {choice}")
    if cfg.xla.flags:
        flags = " ".join(f"{name}={value}" for name, value in cfg.xla.flags.items())
        if not compiling.flags_for(cfg, run.mesh.devices.flat[0].platform):
            flags = f"flags for {cfg.xla.platform}, left out here: {flags}"
        log.say(f"xla: {flags}")
    for line in sources:
        log.say(f"data: {line}")
    if any(holds_text(vars(source)) for source in cfg.data.sources):
        log.say(f"tokenizer: {getattr(cfg.data.tokenizer, 'path', 'none, bytes are the tokens')}")
    if begins and cfg.model.weights:
        log.say(f"weights: those of {cfg.model.weights}")
    elif begins and cfg.checkpoint.restore in ("latest", "none"):
        answers = {*cfg.objective.records(cfg)} - {None, *PICTURED}
        little = ", of which post-training makes little" if answers else ""
        log.say(
            f"weights: drawn at random{little}; model.from=FOLDER, Org/Name or a run starts from "
            "others"
        )
    if cfg.objective.kind == "sft" and not cfg.data.has_records:
        log.say(
            "objective.kind=sft: no source has records, so every token of the texts counts; for "
            "conversations set `record`"
        )
    if not cfg.checkpoint.every:
        log.say("checkpoint.every=0: no weights of this run are kept")


def check_steps(cfg: "Config", begin: int) -> None:
    """ConfigError where the checkpoint is beyond train.steps."""
    if begin > cfg.train.steps:
        raise ConfigError(
            f"train.steps={cfg.train.steps}, but the run is already at step {begin}; raise "
            "train.steps, set checkpoint.restore to an earlier step, or choose another run.name"
        )


def moved_rate(written: dict[str, Any], cfg: "Config", updates: int) -> str:
    """A line where the next update has another learning rate than by the configuration that wrote
    the checkpoint; "" where it has not."""
    text = optim.moved_rate(written, cfg.optimizer, cfg.train.steps, updates) if written else ""
    if not text:
        return ""
    changed = [
        f"{key}: {old} -> {new}"
        for key, old, new in config.difference(written, cfg.model_dump(mode="json"))
        if key == "train.steps" or key.startswith("optimizer.")
    ]
    return f"{text}; changed: {shortened(', '.join(changed), 400)}"


def unlike_folder(run: Run, weights: str) -> Iterator[str]:
    """Lines about what a folder says of training that a run does not do: shorter rows, dropout, one
    adapter of a module that is several weights here."""
    from maxstack.hf.binding import bind
    from maxstack.hf.contents import open_contents

    if run_folder(weights):
        return
    contents, seq_len = open_contents(weights), run.cfg.data.seq_len
    said = contents.folder.config
    most = said.get("max_position_embeddings")
    if isinstance(most, int) and seq_len > most:
        yield (
            f"data.seq_len={seq_len} is more than max_position_embeddings={most} of {weights}: "
            "later positions are new to these weights"
        )
    dropout = re.compile("dropout|_pdrop")
    if dropped := [f"{key}={said[key]}" for key in filter(dropout.search, said) if said[key]]:
        yield (
            f"{weights} asks for dropout in training ({', '.join(dropped)}), which is not applied; "
            "transformers' Trainer applies it"
        )
    lora, adapted = run.cfg.lora, run.weights.rewrite.adapted
    if not lora:
        return
    shapes = {path: leaf.shape for path, leaf in run.weights.original.items()}
    for tensor in bind(contents.family, run.cfg.model, shapes):
        if (parts := sum(target.path in adapted for target in tensor.targets)) > 1:
            yield (
                f"lora: {tensor.name} is one module of {weights}, to which peft gives one lora_A; "
                f"here each of its {parts} parts has its own, and `maxstack lora export` writes "
                f"them as one of rank {parts} x {lora.rank}"
            )
            return


def check_can_start(run: Run) -> None:
    """Check a run before anything is made. ConfigError where a kernel is asked for that cannot
    serve, a tracker that is not installed, or a flag that the compiler does not know."""
    cfg, _ = run.cfg, run.kernels
    if jax.process_index() == 0:
        check_installed(cfg.run.trackers)
    if (folder_of(cfg) / "quantization.json").is_file():
        raise ConfigError(
            f"run.name: {folder_of(cfg)} holds weights in low precision that maxstack quantize "
            f"made, and stays as it is; give a run.name of its own: run.name={cfg.run.name}-lora"
        )
    if cfg.model.scores and not cfg.objective.SCORES:
        raise ConfigError(
            f"model.head.scores: objective.kind={cfg.objective.kind} needs logits, and a reward "
            "model gives none; leave it out, or set objective.kind=reward"
        )
    compiling.check_flags(cfg, run.mesh)
    frozen = [path for path, use in run.weights.rewrite.matches.items() if use.mode == "ptq"]
    _check_rank(run)
    if frozen and not cfg.lora and not cfg.optimizer.trainable:
        raise ConfigError(
            f"quantization: {len(frozen)} weights, {frozen[0]} first, would be kept in low "
            "precision and never trained (mode ptq), and the rest would be; set lora to train "
            "adapters, mode: qt to train in low precision, or optimizer.trainable for what is meant"
        )


def check_weights(run: Run) -> None:
    """Check the weights that a run begins from, its teachers' too, where it has no checkpoints.
    DataError where model.weights are not of this model, ConfigError where lora.adapter is not
    lora's or a teacher's tokenizer not the run's."""
    cfg = run.cfg
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
    """ConfigError where an adapter has as many parameters as any weight that it could be beside."""
    if not run.cfg.lora or not run.weights.rewrite.adapted:
        return
    smaller = {
        path: min(weight.matrix[0], math.prod(weight.matrix[1:]))
        for path, weight in run.weights.rewrite.adapted.items()
    }
    path = max(smaller, key=smaller.__getitem__)
    if run.cfg.lora.rank > smaller[path]:
        raise ConfigError(
            f"lora.rank={run.cfg.lora.rank}: {path} has "
            f"{[*run.weights.rewrite.adapted[path].matrix]}, and no target more; an adapter of "
            f"rank {smaller[path]} is the whole weight, so give a smaller rank"
        )


def explain_memory(error: BaseException | None, meter: "Meter") -> None:
    """ConfigError where memory ran out before the first step: a restart would meet it again."""
    if isinstance(error, jax.errors.JaxRuntimeError) and meter.begins:
        told = re.search(r"RESOURCE_EXHAUSTED: (.*)", str(error))
        if told:
            raise ConfigError(
                f"memory: the first step found too little ({told[1].rstrip('.')}); use "
                "train.accumulate, model.remat, more devices or a smaller train.batch_size; "
                "`maxstack plan` says what a step needs"
            ) from error


def fresh(run: Run) -> State:
    """The state before the first step: random weights, or those of the folder that model.weights
    names, and the adapter that lora.adapter does."""
    folder, adapter = run.cfg.model.weights, run.cfg.lora and run.cfg.lora.adapter
    if folder is None and not adapter:
        return run.init()
    if folder is None:
        return run.begin_with(flat(run.init().params))
    from maxstack import starting_weights

    loaded = starting_weights.original(run, finite=not run.cfg.checkpoint.allow_nonfinite)
    return run.begin_with(run.weights.from_original(loaded))


def frozen(run: Run) -> tuple[dict[str, Any], ...]:
    """The last argument of the step, where the objective has second sets of weights: by name, as
    the run began with them, the weights that a step changes, or all of another model. The others
    are those of the state."""
    if not run.objective.frozen:
        return ()
    own = {*run.objective.frozen} - {*run.others}
    second = select(run.changed, fresh(run).params) if own else None
    return (
        {
            name: fresh(run.others[name]).params if name in run.others else second
            for name in run.objective.frozen
        },
    )


def go_back(
    decision: "Rewind | Recompute",
    run: Run,
    saves: "Checkpoints | None",
    feed: "BatchFeed",
    start: np.ndarray,
    policy: "Policy",
    log: Log,
) -> State:
    """The state at the newest checkpoint before the batches of a rewind, or before the step to
    recompute, with the feed set to go on there. `start`: where the feed began."""
    state = saves.restore(feed, before=decision.first) if saves else None
    notes = saves.notes if saves and state is not None else {}
    if state is None:
        feed.restore(start)
        state = saves.restore(feed) if saves and run.cfg.checkpoint.elsewhere else fresh(run)
        assert state is not None, "a path gives a state or an error"
    if isinstance(decision, Rewind):
        log.say(
            f"rewound to step {int(state.step)}; the batches of steps {decision.first} to "
            f"{decision.last} will be passed over (faults.spike)"
        )
    else:
        policy.restore(notes)
        log.say(f"back to step {int(state.step)}")
    return state


def reshaped(shaped: Shaped, step: int) -> str:
    """A line about batches of another shape."""
    rows, length = shaped.rows, shaped.run.cfg.data.seq_len
    return (
        f"batches have {rows:,} x {length:,} tokens from step {step} on; the step was compiled in "
        f"{shaped.seconds:.1f} s"
    )
