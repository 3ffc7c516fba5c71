"""`python -m maxstack.train CONFIG [key=value ...]`: main and the loop, top to bottom."""

import argparse
import contextlib
import gc
import os
import pkgutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import cli
from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.command import CONFIG, OVERRIDES, argument, command, load_config
from maxstack.errors import ConfigError, DataEnded, Passing
from maxstack.faults import preemption, supervise
from maxstack.hardware import devices, memory
from maxstack.report import trace_requests

if TYPE_CHECKING:
    from maxstack.checkpoint.store import Checkpoints
    from maxstack.data.feed import BatchFeed
    from maxstack.faults.policy import Rewind
    from maxstack.faults.replicas import Recompute
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer
    from maxstack.schema.config import Config


GRACE = 5.0
"""Seconds that a process has to end after an error."""
TRACKERS_GRACE = 1.0
"""Those after a run in which a tracker failed."""
_is_program = False
"""This process ends with its run."""


def program(argv: Sequence[str]) -> int:
    """`main` as a process of its own; an error that is no mistake of the user's leaves with 70, so
    that a supervisor tries again."""
    if {"-h", "--help", "--supervise"} & {*argv}:
        return main(argv)
    global _is_program
    _is_program = True
    memory.use_huge_pages()
    gc.set_threshold(200_000, 20, 100)  # else the search for cycles takes a twentieth of the start
    preemption.listen()
    trace_requests.listen()
    supervise.follow_parent()
    try:
        code = main(argv)
    except Exception as error:
        explained = (
            hasattr(error, "exit_code") or isinstance(error, BrokenPipeError) or cli.lasting(error)
        )
        code = 1 if cli.lasting(error) else getattr(error, "exit_code", CRASHED)
        _end_anyway(code, GRACE)
        if explained:
            raise
        traceback.print_exc()
        return code
    import jax

    from maxstack.report.trackers import FAULTY

    if FAULTY:  # several processes wait for one another first
        _end_anyway(code, TRACKERS_GRACE if jax.process_count() == 1 else GRACE)
    return code


@command(
    "train",
    "Train a model from one YAML file. The same command again resumes from the last checkpoint.",
    "train configs/quickstart.yml train.steps=200 run.name=short",
    CONFIG,
    OVERRIDES,
    argument(
        "--force-config",
        metavar="KEY",
        action="append",
        default=[],
        help="go on from a checkpoint although KEY, or a key below it, "
        "changed; may be given several times",
    ),
    argument(
        "--supervise",
        action="store_true",
        help="stay as the parent of the process, and start it again after a crash, "
        "a hang or a lost peer, with a growing pause; to end the run, signal every parent",
    ),
    argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="with --supervise: give up after so many restarts in a row "
        "without a new step; by default 10",
    ),
    allow_abbrev=False,
)
def main(args: argparse.Namespace) -> int:
    """Train as the arguments say; the exit code is 0 when all steps are done, 42 when a signal
    ended it and running it again goes on."""
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: must be 0 or more")
    cfg = load_config(args)
    if args.supervise:
        forced = [part for key in args.force_config for part in ("--force-config", key)]
        command = [sys.executable, "-m", "maxstack.train", args.config, *args.overrides, *forced]
        return supervise.run(command, Path(cfg.run.output_dir) / cfg.run.name, args.max_restarts)
    from maxstack import elastic

    def once(cfg: "Config", left: Sequence[Any] | None) -> int:
        with contextlib.ExitStack() as ending:
            return train(cfg, ending, args.force_config, left)

    return elastic.train(cfg, once)


def train(
    cfg: "Config",
    ending: contextlib.ExitStack,
    forced: Sequence[str] = (),
    left: Sequence[Any] | None = None,
) -> int:
    """One whole run, in its folder. `ending` is closed however it ends: a save that is under way is
    not lost. `forced`: keys that may have changed since the checkpoint. `left`: the devices that
    are left of all."""
    started = time.monotonic()
    if cfg.runtime == "pathways":
        from maxstack.cluster import pathways

        pathways.environment()
    devices.environment(cfg.run.virtual_devices)
    import jax
    from jax.profiler import TraceAnnotation

    from maxstack import alike, startup
    from maxstack.checks import Checks
    from maxstack.cluster import joining
    from maxstack.evals.evaluation import StopEarly
    from maxstack.faults.policy import NOT_FINITE, Policy, refusal
    from maxstack.hardware.compiling import keep_programs
    from maxstack.meter import Meter
    from maxstack.profile.tracer import Tracer
    from maxstack.report import goodput, run_folder
    from maxstack.report.ledger import Ledger
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer
    from maxstack.report.trackers import Trackers
    from maxstack.run import assemble
    from maxstack.shaped import ShapedSteps

    joining.join(cfg, alike.facts)
    in_this_thread = _is_program and _on_one_cpu_device(cfg) and memory.run_in_this_thread()
    heart = startup.watched(cfg, ending, _is_program)
    keep_programs(cfg.run.compilation_cache, named=cfg.train.profile is not None)
    mesh = startup.make_mesh(cfg, left)
    cfg, dealt = startup.counted(cfg, mesh)
    run = assemble(cfg, mesh)
    steps = ShapedSteps(run)
    steps.check_memory(startup.engine_bytes(run))
    startup.check_can_start(run)
    startup.prepare_tokenizer(cfg)
    startup.check_weights(run)
    first = jax.process_index() == 0
    folder = run_folder.claim(cfg, first, ending)
    ledger = Ledger(folder, first, started, doing=heart.doing if heart else None)
    ending.callback(ledger.stop)
    feed, maker = startup.open_feed(run, folder, ending, dealt)
    meter = Meter(run, feed)
    ending.push(lambda kind, error, _: startup.explain_memory(error, meter))
    log = Log(folder, cfg.train.steps, first)
    ending.push(log.ended)
    start = position = feed.state()
    with ledger.spent("restore"):
        saves = startup.open_checkpoints(run, folder, log.say, forced)
        if saves:
            ending.callback(saves.wait)
        state = saves.restore(feed) if saves else None
    notes = saves.notes if saves else {}
    policy, stopping = Policy(cfg.faults, notes), StopEarly(cfg.train.stop_early, notes)
    begin = saved = int(state.step) if state else 0
    startup.check_steps(cfg, begin)
    meter.restore(notes, begin)

    trackers = Trackers(folder, cfg) if first and cfg.run.trackers else None
    writer = Writer(folder, first, trackers, begin)
    ending.callback(writer.close)
    if saves and state is not None:
        log.say(saves.summary)
        if moved := startup.moved_rate(saves.saved_config, cfg, int(state.guard.updates)):
            log.say(moved)
    owed = saves.owed if saves else False
    if (begin == cfg.train.steps and not owed) or stopping.over:
        done_before = stopping.why if stopping.over else f"train.steps={begin} are done"
        log.say(f"nothing left to do: {done_before}")
        if saves:
            saves.complete(begin, state, feed, saves.notes)
        _close(feed, saves, writer, log)
        ledger.close()
        return 0
    ledger.resume(begin)
    steps.start(begin + 1)
    startup.introduce(run, feed.describe(), log, begins=state is None)
    feed.start()
    frozen = startup.frozen(run)
    if state is None:
        state = startup.fresh(run)
    if first:
        run_folder.write_records(run.cfg, run.kernels, folder)
    evaluator = startup.evaluator(run, log, writer, frozen, maker)
    samples = None
    if cfg.eval.samples:
        samples = pkgutil.resolve_name(cfg.objective.SAMPLES)(run, log, writer)
    with ledger.spent("compile"):
        shaped = steps.at(begin + 1)
    log.say(f"{'loaded' if cfg.run.executable else 'compiled'} the step in {shaped.seconds:.1f} s")

    if in_this_thread:
        # what compiling frees is not worth keeping
        memory.keep_freed(shaped.step.memory_analysis().temp_size_in_bytes)

    compares = cfg.faults.check_every or jax.process_count() > 1
    checks = Checks(run, meter, log, writer) if compares and run.mesh.size > 1 else None
    if checks:
        checks.begin(state)
    tracer = Tracer(shaped, folder, log)
    ending.callback(tracer.close)

    odd = False  # an update was refused, and the copies are to be compared

    def report(row: dict[str, Any] | None) -> "Rewind | None":
        """Write a step's row -> where the policy for faults goes back to. ConfigError where it ends
        the run."""
        nonlocal odd
        if row is None:
            return None
        odd = odd or (row["skipped"] == NOT_FINITE and row["refused"] == 1)
        seconds = row["step_seconds"]
        ledger.step(row["step"], seconds, row["data_wait"] * seconds, counts=not row["skipped"])
        writer.write(row)
        if (share := ledger.news()) is not None:
            writer.write({"step": row["step"], "goodput": share})
        log.step(row, meter.left(row["step"]))
        for line in filter(None, (meter.standing(row), meter.silent(row))):
            log.warn(line)
        if row["skipped"]:
            log.say(refusal(row))
        return policy.read(row)

    def save_now(step: int, evaluated: dict[str, float], last: bool) -> None:
        """Save the state with where the feed and the policies stand."""
        nonlocal saved
        assert saves
        past = policy.to_json() | stopping.to_json() | meter.to_json()
        with ledger.spent("save"):
            saves.save(step, state, feed, past, evaluated, last, position=position, owed=owed)
        saved = step

    def leave(step: int) -> None:
        """Save the state after `step` while the main thread waits, and end what writes."""
        if not report(meter.flush()) and saves:
            if step > saved and saves.due(step, last=True):
                save_now(step, {}, True)
            saves.close()
        over = (step == cfg.train.steps or stopping.over) and not owed
        left = "all steps are done" if over else "the same command goes on from there"
        log.say(f"left after step {step} ({stop.why}); {left}")
        _close(writer, log)

    stop = preemption.Preemption(cfg.faults.grace, leave, begin)
    ending.callback(stop.close)
    step, preempted = begin, False
    if evaluator and (owed or begin == 0):
        try:
            with ledger.spent("evaluation"), stop.waiting(begin, computes=True):
                evaluated = evaluator(begin, state)
                if samples and owed:
                    samples(begin, state)
        except preemption.CutShort:
            preempted = True
        else:
            if why := stopping.read(begin, evaluated):
                log.say(f"the run ends at step {begin}: {why}")
            if saves and owed:
                saves.note(begin, evaluated, stopping.to_json())
            owed = False
    back: Rewind | Recompute | None
    ledger.begin_steps()
    meter.restart()
    while step < cfg.train.steps and not preempted and not stopping.over:
        step += 1
        tracer.before(step)
        try:
            with stop.waiting(step - 1, begins=True, computes=bool(cfg.rollout)):
                feed.refresh(state, frozen)
                with TraceAnnotation("next batch"):
                    batch = next(feed)
        except (DataEnded, Passing):
            report(meter.flush())
            # several processes need not come here at the same step, and a save is one of all
            alone = jax.process_count() == 1 and step - 1 > saved
            if saves and alone and saves.due(step - 1, last=True):
                save_now(step - 1, {}, True)
            raise
        for line in feed.damaged():
            log.warn(line)
        passed_over = policy.skips(step)
        if passed_over:
            back = report(meter.flush())
            state = run.skip_batch(state)
            writer.write({"step": step, "passed_over": 1})
            ledger.passed_over(step)
            meter.restart()
        else:
            with TraceAnnotation("place batch, start step"):
                placed = run.batches.place(batch, shaped.rows)
                state, scalars = shaped.step(state, placed, *frozen)
            back = report(meter.add(step, {**scalars, **feed.metrics()}))
        position = feed.state()
        traced = tracer.after(step, not passed_over)
        done = step == cfg.train.steps
        preempted = not done and stop.requested(step)
        owed = bool(evaluator) and (done or step % cfg.eval.every == 0)
        evaluate = owed and not preempted
        save = saves and saves.due(step, done or preempted)
        # one replica's memory may be the only place with a value that is not finite
        checked = bool(save) or odd
        compare = checks and checks.due(step, checked)
        reshapes = not (done or preempted) and steps.changes(step + 1)
        traced = traced or (tracer.tracing and (done or preempted or reshapes))
        waits = evaluate or save or compare or traced or reshapes or done or preempted
        if waits or in_this_thread:  # then the step has ended
            back = report(meter.flush()) or back
        if checks and compare and not back:
            with ledger.spent("check"):
                back = checks.compare(step, state, checked)
            odd = False
        if back:
            meter.drop()
            tracer.drop()
            jax.tree.map(lambda leaf: leaf.delete(), state)  # else the devices would hold two
            with ledger.spent("restore"):
                state = startup.go_back(back, run, saves, feed, start, policy, log)
            stopping.restore(saves.notes if saves else {})
            step, position = saved, _ = int(state.step), feed.state()
            meter.restore(saves.notes if saves else {}, step)
            ledger.resume(step)
            shaped = tracer.shaped = steps.at(step + 1)
            meter.restart()
        elif evaluate or save or compare or traced or reshapes:
            evaluated = {}
            if traced:
                with ledger.spent("trace"):
                    tracer.end()
            if evaluator and evaluate:
                try:
                    with ledger.spent("evaluation"), stop.waiting(step, computes=True):
                        evaluated = evaluator(step, state)
                        if samples:
                            samples(step, state)
                except preemption.CutShort:
                    preempted = True
                    save = saves and saves.due(step, last=True)
                else:
                    owed = False
                    if why := stopping.read(step, evaluated):
                        log.say(f"the run ends at step {step}: {why}")
                        save = saves and saves.due(step, last=True)
            if saves and save:
                save_now(step, evaluated, done or preempted or stopping.over)
            if reshapes and not preempted:
                with ledger.spent("compile"), stop.waiting(step):
                    shaped = tracer.shaped = steps.at(step + 1)
                log.say(startup.reshaped(shaped, step + 1))
            meter.restart()
    with ledger.spent("save"):
        _close(feed, saves)
    finished = stop.finished = (step == cfg.train.steps or stopping.over) and not preempted
    if summary := meter.summary(finished):
        log.say(summary)
    if finished and evaluator and cfg.eval.baselines:
        with ledger.spent("evaluation"), stop.waiting(step, computes=True):
            evaluator.compare()
    if total := ledger.close():
        writer.write({"step": step, "goodput": total.share})
        log.say(goodput.sentence(total))
    _close(writer, log)
    return 0 if finished else RETRY


def _close(*parts: "BatchFeed | Checkpoints | Writer | Log | None") -> None:
    for part in parts:
        if part is not None:
            part.close()


def _end_anyway(code: int, seconds: float) -> None:
    """End the process after so many seconds: a library may have left a thread or a handler behind
    that nobody ends, as Orbax does where it cannot write, and a tracker whose server is away."""

    def end() -> None:
        time.sleep(seconds)
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def _on_one_cpu_device(cfg: "Config") -> bool:
    """True where the run has one process and one CPU device, told before jax sees its devices."""
    import jax

    alone = not jax.distributed.is_initialized() and cfg.run.virtual_devices in (None, 1)
    return alone and os.environ.get("JAX_PLATFORMS") == "cpu"


if __name__ == "__main__":
    sys.exit(cli.run(program, sys.argv[1:]))
