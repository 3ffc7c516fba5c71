"""The training loop, from the first step of a run, or the first after a checkpoint, to its end.

A step is dispatched, and the numbers of the one before are read while it runs, so the devices never
wait for the host. What comes between two steps (`Due`: an evaluation, a save, a comparison of the
devices' copies, the end of a trace, a new shape of batch) first waits for the step itself. Refused
updates, or copies that differ, may send the run back to a checkpoint. A signal ends the loop after
a step on which all processes agree; while the main thread is stuck inside `stop.waiting`, `_leave`
saves from another thread, with the state as it was before.
"""

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from maxstack import startup
from maxstack.callbacks import Callback, Callbacks, Training
from maxstack.checks import Checks
from maxstack.cluster.exit_codes import RETRY
from maxstack.compiled_steps import CompiledStep, CompiledSteps
from maxstack.errors import DataEnded, DataError, TransientError
from maxstack.evals.evaluation import Evaluation, StopEarly
from maxstack.faults.policy import NOT_FINITE, Policy, Rewind, describe_refusal
from maxstack.faults.preemption import CutShort, Preemption
from maxstack.faults.replicas import Recompute
from maxstack.hardware import memory
from maxstack.meter import Meter
from maxstack.profile.tracer import Tracer
from maxstack.report import goodput, run_folder
from maxstack.report.ledger import Ledger
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.report.trackers import Trackers
from maxstack.run import Run

if TYPE_CHECKING:
    from maxstack.checkpoint.store import Checkpoints
    from maxstack.data.feed import BatchFeed
    from maxstack.rollouts.maker import Maker


@dataclasses.dataclass(frozen=True)
class Records:
    """The files and figures in which a run records what happens."""

    folder: Path
    ledger: Ledger
    log: Log
    meter: Meter


class Due(NamedTuple):
    """Work that is due between a step and the next."""

    evaluate: bool
    save: bool
    compare: bool
    end_trace: bool
    reshape: bool
    last: bool
    """The loop ends with the step."""
    asked: bool
    """A callback asks for a checkpoint."""


class Loop:
    """The state of a run between two steps, and what happens in each."""

    _checks: Checks | None = None
    _evaluator: Evaluation | None = None
    _samples: Callable[[int, Any], None] | None = None
    _saves: "Checkpoints | None" = None
    _preempted = False
    _not_finite = False
    """An update was not finite: the copies are to be compared after the next step."""
    _owed = False
    """The state is still to be evaluated, as where a signal cut an evaluation short."""

    def __init__(
        self,
        run: Run,
        steps: CompiledSteps,
        feed: "BatchFeed",
        maker: "Maker | None",
        records: Records,
        ending: contextlib.ExitStack,
        callbacks: Sequence[Callback] = (),
    ):
        self._run, self._cfg = run, run.cfg
        self._steps = steps
        self._feed, self._maker = feed, maker
        self._folder = records.folder
        self._ledger, self._log = records.ledger, records.log
        self._meter = records.meter
        self._ending = ending
        drops = run.cfg.train.callback_failure == "drop"
        self._callbacks = Callbacks(callbacks, records.log, drops)
        self._is_first = jax.process_index() == 0
        self._policy = Policy(run.cfg.faults)
        self._stopping = StopEarly(run.cfg.train.stop_early, {})
        # The position that belongs to the state: the feed moves on to the next batch before the
        # state does, and another thread may save in between.
        self._begin = self._position = feed.state()
        self._state: Any = None

    def restore(self, forced: Sequence[str]) -> None:
        """Restore the newest checkpoint, if there is one; `forced`: keys that may have changed
        since."""
        cfg, log = self._cfg, self._log
        with self._ledger.spent("restore"):
            self._saves = startup.open_checkpoints(self._run, self._folder, log.say, forced)
            if self._saves:
                # However the run ends, a save that is under way gets its manifest, without which it
                # does not exist.
                self._ending.callback(self._saves.wait)
                self._state = self._saves.restore(self._feed)
        # The host counts steps by itself from here on: reading state.step would wait for the
        # devices.
        self._step = self._saved = int(self._state.step) if self._state else 0
        startup.check_steps(cfg.train.steps, self._step)
        self._policy.restore(self._notes)
        self._stopping.restore(self._notes)
        self._meter.restore(self._notes, self._step)
        trackers = Trackers(self._folder, cfg) if self._is_first and cfg.run.trackers else None
        self._writer = Writer(self._folder, self._is_first, trackers, self._step)
        self._ending.callback(self._writer.close)
        if self._saves and self._state is not None:
            self._owed = self._saves.owed
            log.say(self._saves.summary)
            updates = int(self._state.guard.updates)
            if moved := startup.moved_rate(self._saves.saved_config, cfg, updates):
                log.say(moved)

    @property
    def is_complete(self) -> bool:
        """True where nothing is left to do."""
        done = self._step == self._cfg.train.steps
        return (done and not self._owed) or self._stopping.over

    def close_complete(self) -> int:
        """Close a run with nothing left to do -> its exit code. Its last checkpoint is copied to
        tiers that lack it."""
        done = f"train.steps={self._step} are done"
        self._log.say(f"nothing left to do: {self._stopping.why if self._stopping.over else done}")
        if self._saves:
            # A run that was killed in its last save may have it on a host's own disk alone. Of 110
            # kills in saves one was lost that way before this.
            self._saves.complete(self._step, self._state, self._feed, self._notes)
        close(self._feed, self._saves, self._writer, self._log)
        self._ledger.close()
        return 0

    def start(self, in_this_thread: bool) -> None:
        """Describe the run, make the state where none was restored, and compile the step.
        `in_this_thread`: the main thread runs the programs (hardware/memory.py)."""
        run, cfg = self._run, self._cfg
        log, begin = self._log, self._step
        begins = self._state is None
        self._ledger.resume(begin)
        # In the background: compiling hides the initialisation of the weights where there are more
        # cores than it uses. On two cores the total stays as it is.
        self._steps.start(begin + 1)
        startup.introduce(run, self._feed.describe(), log, begins)
        self._feed.start()
        self._frozen = startup.frozen_weights(run)
        if begins:
            self._state = startup.first_state(run)
        if self._is_first:
            run_folder.write_records(cfg, run.kernels, self._folder)
        self._evaluator = startup.evaluator(run, log, self._writer, self._frozen, self._maker)
        if cfg.eval.samples:
            self._samples = pkgutil.resolve_name(cfg.objective.SAMPLES)(run, log, self._writer)
        with self._ledger.spent("compile"):
            self._shaped: CompiledStep = self._steps.at(begin + 1)
        how = "loaded" if cfg.run.executable else "compiled"
        log.say(f"{how} the step in {self._shaped.seconds:.1f} s")
        self._in_this_thread = in_this_thread
        # Allocator settings: a tenth of a step goes to clearing pages that were given back.
        if in_this_thread:  # only now: what compiling frees is not worth keeping
            memory.keep_freed(self._shaped.step.memory_analysis().temp_size_in_bytes)
        # Several processes compare their copies once even with faults.check_every=0: what their
        # hosts read may differ.
        if run.mesh.size > 1 and (cfg.faults.check_every or jax.process_count() > 1):
            self._checks = Checks(run, self._meter, log, self._writer)
            self._checks.begin(self._state)
        self._tracer = Tracer(self._shaped, self._folder, log)
        self._ending.callback(self._tracer.close)
        self._stop = Preemption(cfg.faults.grace, self._leave, begin)
        self._ending.callback(self._stop.close)
        can_save = self._saves is not None and self._saves.due(begin, last=True)
        self._callbacks.training = Training(
            run, self._folder, lambda: self._state, self._writer, can_save
        )
        self._callbacks.tell("start", step=begin)
        if self._evaluator and (self._owed or begin == 0):
            self._evaluate_first()
        self._ledger.begin_steps()
        self._meter.restart()

    @property
    def goes_on(self) -> bool:
        """True while there is a next step."""
        done = self._step >= self._cfg.train.steps
        return not (done or self._preempted or self._stopping.over)

    def run_step(self) -> None:
        """Run one step, and what is due after it."""
        self._step += 1
        # The order counts: the trace begins before the batch is awaited, so that the wait is in it;
        # a batch that is skipped is drawn all the same, so that the feed's positions do not depend
        # on it.
        self._tracer.before(self._step)
        batch = self._next_batch()
        passes_over = self._policy.skips(self._step)
        back: Rewind | Recompute | None
        back = self._pass_over() if passes_over else self._update(batch)
        self._position = self._feed.state()
        due = self._due(ends_trace=self._tracer.after(self._step, not passes_over))
        # `_update` has reported the step before, as this one may still run. What is due must not
        # begin from a state that the policy is about to undo.
        if any(due) or self._in_this_thread:  # then the step has ended
            back = self._report(self._meter.flush()) or back
        if due.compare and not back:
            assert self._checks
            with self._ledger.spent("check"):
                back = self._checks.compare(self._step, self._state, due.save or self._not_finite)
            self._not_finite = False
        if back:
            self._go_back(back)
        elif any(due):
            self._follow(due)

    def finish(self) -> int:
        """Close the run after its last step -> its exit code."""
        step, cfg = self._step, self._cfg
        with self._ledger.spent("save"):
            close(self._feed, self._saves)
        finished = (step == cfg.train.steps or self._stopping.over) and not self._preempted
        self._stop.finished = finished
        if summary := self._meter.summary(finished):
            self._log.say(summary)
        self._callbacks.tell("end", step=step)
        if finished and self._evaluator and cfg.eval.baselines:
            with self._ledger.spent("evaluation"), self._stop.waiting(step, computes=True):
                self._evaluator.compare()
        if total := self._ledger.close():
            self._writer.write({"step": step, "goodput": total.share})
            self._log.say(goodput.sentence(total))
        close(self._writer, self._log)
        return 0 if finished else RETRY

    @property
    def left_why(self) -> str:
        """Why the run ended before its last step; "" where it did not."""
        if self._preempted:
            return self._stop.why
        return self._stopping.why if self._stopping.over else ""

    @property
    def _notes(self) -> dict[str, Any]:
        """The notes of the checkpoint that was restored last."""
        return self._saves.notes if self._saves else {}

    def _next_batch(self) -> dict[str, np.ndarray]:
        before, saves = self._step - 1, self._saves
        try:
            rolls_out = self._cfg.rollout is not None
            with self._stop.waiting(before, begins=True, computes=rolls_out):
                self._feed.refresh(self._state, self._frozen)
                with TraceAnnotation("next batch"):
                    batch = next(self._feed)
        except (DataEnded, TransientError):
            self._report(self._meter.flush())
            # Several processes need not get here at the same step, and a save is one of all.
            alone = jax.process_count() == 1 and before > self._saved
            if saves and alone and saves.due(before, last=True):
                self._save(before, {}, last=True)
            raise
        for line in self._feed.skipped():
            self._log.warn(line)
        if self._cfg.run.kinds and "tokens" in batch and self._cfg.model.tokens is None:
            # Sources of one's own may give any numbers, and a lookup would clip them.
            low, high = int(batch["tokens"].min()), int(batch["tokens"].max())
            if low < 0 or high >= self._cfg.decoder.vocab:
                raise DataError(
                    f"step {self._step}: a batch holds tokens from {low} to {high}, and "
                    f"model.vocab={self._cfg.decoder.vocab}; a source gives other ids"
                )
        return batch

    def _update(self, batch: dict[str, np.ndarray]) -> Rewind | None:
        """Start the step on a batch, and report the step before."""
        with TraceAnnotation("place batch, start step"):
            # The state is donated: from here on the name of the old one must not be used.
            placed = self._run.batches.place(batch, self._shaped.rows)
            self._state, scalars = self._shaped.step(self._state, placed, *self._frozen)
        return self._report(self._meter.add(self._step, {**scalars, **self._feed.metrics()}))

    def _pass_over(self) -> Rewind | None:
        """Skip the batch of a step, and report the step before."""
        back = self._report(self._meter.flush())
        self._state = self._run.skip_batch(self._state)
        # No scalars come of a skipped batch, so the step before was flushed, and the time of this
        # one is counted as other.
        self._writer.write({"step": self._step, "passed_over": 1})
        self._ledger.passed_over(self._step)
        self._meter.restart()
        return back

    def _due(self, ends_trace: bool) -> Due:
        """Find what is due after the current step."""
        step, every = self._step, self._cfg.eval.every
        done = step == self._cfg.train.steps
        asked = self._heed_callbacks()
        # Asked once a step, and first: it counts the step as reached in all processes.
        self._preempted = not done and self._stop.requested(step)
        last = done or self._preempted
        self._owed = bool(self._evaluator) and (done or step % every == 0)
        save = self._saves is not None and (asked or self._saves.due(step, last))
        # one replica's memory may be the only place with a value that is not finite
        checked = save or self._not_finite
        reshape = not last and self._steps.changes(step + 1)
        return Due(
            evaluate=self._owed and not self._preempted,
            save=save,
            compare=self._checks is not None and self._checks.due(step, checked),
            # A trace holds steps of one program, whose text is saved beside it.
            end_trace=ends_trace or (self._tracer.tracing and (last or reshape)),
            reshape=reshape,
            last=last,
            asked=asked,
        )

    def _heed_callbacks(self) -> bool:
        """Leave where a callback asks for that -> whether one asks for a checkpoint."""
        if not (training := self._callbacks.training):
            return False
        if training.stopped and not self._stop.why:
            self._stop.request(training.stopped)
        asked, training.asks_save = training.asks_save, False
        return asked

    def _follow(self, due: Due) -> None:
        """Do what is due after the current step."""
        step, save = self._step, due.save
        evaluated: dict[str, float] = {}
        # The trace ends before an evaluation, which would be in it; the save comes after the
        # evaluation, whose metrics decide which checkpoints keep_best keeps.
        if due.end_trace:
            with self._ledger.spent("trace"):
                self._tracer.end()
        if due.evaluate:
            evaluated = self._evaluate(bool(self._samples)) or {}
            if self._preempted or self._stopping.over:
                # An evaluation may end the run, or be cut short: then its state is the last one.
                save = self._saves is not None and self._saves.due(step, last=True)
        if save:
            # A step that a callback asks for goes where the last one goes.
            whole = due.last or due.asked or self._preempted or self._stopping.over
            self._save(step, evaluated, whole)
        if due.reshape and not self._preempted:
            with self._ledger.spent("compile"), self._stop.waiting(step):
                self._shaped = self._tracer.shaped = self._steps.at(step + 1)
            self._log.say(startup.describe_shape(self._shaped, step + 1))
        self._meter.restart()

    def _evaluate_first(self) -> None:
        """Evaluate the state that the run begins or goes on with."""
        owed = self._owed
        evaluated = self._evaluate(bool(self._samples) and owed)
        # The checkpoint that the run resumes from was written without these metrics.
        if evaluated is not None and self._saves and owed:
            self._saves.note(self._step, evaluated, self._stopping.to_json())

    def _evaluate(self, writes_samples: bool) -> dict[str, float] | None:
        """Evaluate the state -> metrics; None where a signal cuts it short."""
        assert self._evaluator
        try:
            with self._ledger.spent("evaluation"), self._stop.waiting(self._step, computes=True):
                evaluated = self._evaluator(self._step, self._state)
                if self._samples and writes_samples:
                    self._samples(self._step, self._state)
        except CutShort:
            self._preempted = True
            return None
        self._owed = False
        if why := self._stopping.read(self._step, evaluated):
            self._log.say(f"stopping at step {self._step}: {why}")
        self._callbacks.tell("evaluation", evaluated, step=self._step)
        return evaluated

    def _report(self, row: dict[str, Any] | None) -> Rewind | None:
        """Write a step's row -> where the policy for faults goes back to. ConfigError where it ends
        the run."""
        if row is None:
            return None
        # Once for a row of refusals: a cause that all replicas share would otherwise cost a
        # comparison after every step.
        if row["skipped"] == NOT_FINITE and row["refused"] == 1:
            self._not_finite = True
        step, seconds = row["step"], row["step_seconds"]
        self._ledger.step(step, seconds, row["data_wait"] * seconds, counts=not row["skipped"])
        self._writer.write(row)
        if (share := self._ledger.news()) is not None:
            self._writer.write({"step": step, "goodput": share})
        self._log.step(row, self._meter.left(step))
        for line in self._meter.warnings(row):
            self._log.warn(line)
        if row["skipped"]:
            self._log.say(describe_refusal(row))
        self._callbacks.tell("step", row, step=step)
        return self._policy.read(row)

    def _go_back(self, decision: Rewind | Recompute) -> None:
        """Restore the state before the batches of a rewind, or before a step to recompute."""
        # The step under way began from the state that is given up, so nobody reads it.
        self._meter.drop()
        self._tracer.drop()
        jax.tree.map(lambda leaf: leaf.delete(), self._state)  # else the devices would hold two
        with self._ledger.spent("restore"):
            self._state, notes = startup.restore_before(
                decision.first, self._run, self._saves, self._feed, self._begin
            )
        self._step = self._saved = int(self._state.step)
        self._position = self._feed.state()
        # A rewind is the policy's own decision: restored notes would forget the batches to skip.
        # Steps that are computed again decide anew, by numbers that may have been wrong.
        if isinstance(decision, Rewind):
            self._log.say(
                f"rewound to step {self._step}; skipping the batches of steps {decision.first} to "
                f"{decision.last} (faults.spike)"
            )
        else:
            self._policy.restore(notes)
            self._log.say(f"back to step {self._step}")
        self._stopping.restore(self._notes)
        self._meter.restore(self._notes, self._step)
        self._ledger.resume(self._step)
        self._shaped = self._tracer.shaped = self._steps.at(self._step + 1)
        self._meter.restart()

    def _save(self, step: int, evaluated: dict[str, float], last: bool) -> None:
        """Save the state after `step`, with the positions of the feed and the policies."""
        assert self._saves
        notes = self._policy.to_json() | self._stopping.to_json() | self._meter.to_json()
        position, owed = self._position, self._owed
        with self._ledger.spent("save"):
            self._saves.save(
                step, self._state, self._feed, notes, evaluated, last, position=position, owed=owed
            )
        self._saved = step
        self._callbacks.tell("checkpoint", step, step=step)

    def _leave(self, step: int) -> None:
        """Save the state after `step` while the main thread waits, and end what writes."""
        # Where the last step's numbers ask for a rewind, its state is not worth saving.
        if not self._report(self._meter.flush()) and self._saves:
            if step > self._saved and self._saves.due(step, last=True):
                self._save(step, {}, True)
            self._saves.close()
        over = (step == self._cfg.train.steps or self._stopping.over) and not self._owed
        left = "all steps are done" if over else "run the same command to continue"
        self._log.say(f"left after step {step} ({self._stop.why}); {left}")
        close(self._writer, self._log)


def close(*parts: "BatchFeed | Checkpoints | Writer | Log | None") -> None:
    """Close each part that there is."""
    for part in parts:
        if part is not None:
            part.close()
