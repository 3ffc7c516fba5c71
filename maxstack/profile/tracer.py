"""Takes traces of a run's steps with jax's profiler: those that train.profile names, and those that
are requested while the run goes on.

A thread of process 0 looks for requests, and announces a step far enough ahead for all processes to
begin with it. The training loop calls `before` and `after` around each step. When a trace ends,
process 0 writes the program's text and facts beside it in another thread."""

import collections
import contextlib
import dataclasses
import json
import math
import operator
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax

from maxstack.cluster.peers import Peers
from maxstack.compiled_steps import CompiledStep
from maxstack.plan import buffers, fit
from maxstack.profile import trace_files
from maxstack.profile.planes import STEP
from maxstack.report import trace_requests
from maxstack.report.log import Log

EVERY = 1.0
"""Seconds between checks for a request, in a thread so that no step waits for a file."""
AHEAD = 3.0
"""Seconds until the first step of a trace of several processes, so that all know of it in time."""
FEW = 10
"""Steps before several processes take a request: the first ones are dispatched faster than they
run, so their times do not tell the speed."""
VALUES = 300
"""Values kept per block of memory, the largest."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A trace to take: its first step, or None for the next, and the number of steps."""

    first: int | None
    steps: int
    request: str = ""


class Tracer:
    """Takes traces of the steps between `before` and `after`, one at a time."""

    def __init__(self, shaped: CompiledStep, folder: Path, log: Log):
        self.shaped = shaped
        """The program that the next steps run."""
        self._folder = folder
        self._log = log
        self._peers = Peers()
        self._step = 0
        self._requests = 0
        self._begins: collections.deque[float] = collections.deque(maxlen=32)
        profile = shaped.run.cfg.train.profile
        self._planned = Wanted(profile.start, profile.steps) if profile else None
        self._wanted: Wanted | None = None
        self._taking: Wanted | None = None
        self._ran: list[int] = []
        self._annotation: Any = contextlib.nullcontext()
        self._stop = threading.Event()
        self._writing: threading.Thread | None = None
        # The thread takes 24 us a second, and steps wait for no file.
        threading.Thread(target=self._listen, daemon=True, name="trace requests").start()

    def before(self, step: int) -> None:
        """Start a step, and a trace if one is wanted from this step on."""
        self._step = step
        self._begins.append(time.monotonic())
        for wanted in (self._planned, self._wanted):
            if wanted and wanted.first in (None, step):
                self._begin(wanted, step)
        if self._taking:
            # The annotation carries the number of the step, which the trace itself does not know.
            self._annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
            self._annotation.__enter__()

    def after(self, step: int, ran: bool) -> bool:
        """End a step that ran the program or skipped its batch. Return True if a trace ends with
        it, once its results have arrived."""
        if not self._taking:
            return False
        self._annotation.__exit__(None, None, None)
        # Only steps that ran the program leave a run in the trace, and timeline.py numbers the runs
        # by this list.
        self._ran += [step] if ran else []
        assert self._taking.first is not None
        return step >= self._taking.first + self._taking.steps - 1

    @property
    def tracing(self) -> bool:
        """True during a trace."""
        return self._taking is not None

    def end(self) -> None:
        """End the trace, and write it with what is needed to read it."""
        assert self._taking
        taken = self._taking
        ran = self._ran
        self._clear()
        try:
            # Holds up the step for 0.3 to 0.4 s on one device and 2.5 to 2.9 s on eight: told as
            # `trace` in goodput.
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a full disk must not end the job
            self._refuse(taken, f"jax's profiler could not write it: {error}")
            return
        if not ran:
            self._refuse(taken, "all its batches were skipped")
        elif self._peers.number == 0:
            self.wait()
            # In a thread, so that no step waits for the text and its compression.
            self._writing = threading.Thread(target=self._write, args=(taken, ran), name="trace")
            self._writing.start()

    def drop(self) -> None:
        """Discard a trace whose steps are undone."""
        if self._taking:
            jax.profiler.stop_trace()
            self._refuse(self._taking, "the run was rewound to a step before it")
            self._clear()

    def wait(self) -> None:
        """Wait until the last trace is written."""
        if self._writing:
            self._writing.join()

    def close(self) -> None:
        """Stop listening, and end a trace in progress."""
        self._stop.set()
        if self._taking:
            jax.profiler.stop_trace()
            self._clear()
        self.wait()

    def _clear(self) -> None:
        self._taking = None
        self._ran = []
        self._annotation = contextlib.nullcontext()

    def _begin(self, wanted: Wanted, step: int) -> None:
        if wanted is self._wanted:
            self._wanted = None
        if self._taking:
            self._refuse(wanted, f"another one, from step {self._taking.first}, is in progress")
            return
        # A trace that would outlast the run ends with it.
        steps = min(wanted.steps, self.shaped.run.cfg.train.steps - step + 1)
        self._taking = Wanted(step, steps, wanted.request)
        options = jax.profiler.ProfileOptions()
        # A name of our own for each process: jax's is the time, so the processes of one trace would
        # differ.
        options.session_id = trace_files.session(self._peers.number)
        folder = self._folder / trace_requests.FOLDER / str(step)
        try:
            jax.profiler.start_trace(str(folder), profiler_options=options)
        except (OSError, RuntimeError) as error:
            self._clear()
            self._refuse(wanted, f"jax's profiler does not start: {error}")
            return
        self._answer(wanted.request, "tracing", first=step, last=step + steps - 1)

    def _refuse(self, wanted: Wanted, why: str) -> None:
        """Report that a trace was not taken."""
        self._log.warn(f"no trace from step {wanted.first or self._step} on: {why}")
        self._answer(wanted.request, "refused", why=why)

    def _answer(self, request: str, state: str, **more: Any) -> None:
        # One answer for one request; a signal has nobody who waits for an answer.
        if request and self._peers.number == 0:
            trace_requests.answer(self._folder, request, state, **more)

    def _write(self, taken: Wanted, ran: list[int]) -> None:
        trace = self._folder / trace_requests.FOLDER / str(taken.first)
        try:
            trace_files.write(trace, self.shaped.step.as_text(), self._facts(ran))
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # the disk is full, or XLA gives no text
            self._refuse(taken, f"{trace}: {error}")
            return
        self._log.say(f"trace of steps {ran[0]} to {ran[-1]}: maxstack profile {self._folder}")
        self._answer(taken.request, "done", first=taken.first)

    def _facts(self, ran: list[int]) -> trace_files.Facts:
        run = self.shaped.run
        cfg = run.cfg
        stats = self.shaped.step.memory_analysis()
        device = run.mesh.local_devices[0]
        tokens = cfg.train.batch_size * cfg.data.seq_len
        used = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return trace_files.Facts(
            steps=ran,
            device_kind=device.device_kind,
            devices=run.mesh.size,
            processes=self._peers.count,
            mesh=dict(run.mesh.shape),
            tokens=tokens,
            flops=run.flops_per_token * tokens,
            memory=self._memory(stats),
            usable=fit.usable(device, run.mesh.size),
            peak=used,
            allocations=self._allocations(stats),
            kept=bool(cfg.run.executable or (cfg.run.compilation_cache and not cfg.train.profile)),
        )

    def _memory(self, stats: Any) -> dict[str, int]:
        if stats is None:
            return {}
        total = buffers.memory(self.shaped.step)
        return {
            "arguments": total.arguments,
            "code": total.code,
            "temporaries": stats.temp_size_in_bytes,
            "needed": total.needed,
        }

    def _allocations(self, stats: Any) -> list[buffers.Allocation]:
        """Return the compiler's buffer assignment, if it gives one."""
        assignment = getattr(stats, "serialized_buffer_assignment_proto", b"")
        if not assignment:
            return []
        # The assignment in memory names instructions by number; no dump and no second compilation
        # are needed.
        (module,) = self.shaped.step.runtime_executable().hlo_modules()
        rows = trace_files.allocations(assignment, module.as_serialized_hlo_module_proto())
        for row in rows:
            # Only the largest are ever shown.
            row.values = sorted(row.values, key=lambda value: -value[2])[:VALUES]
        return rows

    def _listen(self) -> None:
        """Check for requests until the run ends. Process 0 takes them, and tells the others from
        which step on to trace."""
        while not self._stop.wait(EVERY):
            if trace_requests.signalled():
                try:
                    trace_requests.ask(self._folder, trace_requests.STEPS)
                except OSError as error:
                    self._log.warn(f"{self._folder}: cannot request a trace: {error.strerror}")
            # A request waits until steps run: before that, compiling would count as the first step.
            if len(self._begins) < (FEW if self._peers.count > 1 else 1):
                continue
            if self._peers.number:
                try:
                    self._follow()
                except jax.errors.JaxRuntimeError:
                    return  # process 0 is gone, and the run with it
            elif request := trace_requests.take(self._folder):
                self._take(request)

    def _take(self, request: dict[str, Any]) -> None:
        name = str(request.get("request"))
        steps = request.get("steps")
        busy = self._taking or self._wanted
        if busy:
            why = f"a trace from step {busy.first or 'the next'} on is in progress"
        elif not isinstance(steps, int) or steps < 1:
            why = f"{json.dumps(steps)} is not a number of steps"
        else:
            why = ""
        if why:
            self._refuse(Wanted(None, 0, name), why)
            return
        assert isinstance(steps, int)
        first = None
        if self._peers.count > 1:
            begins = [*self._begins]
            # The median: by the shortest step the trace lay 3,000 steps ahead, since the first
            # steps are dispatched in a moment.
            seconds = statistics.median(map(operator.sub, begins[1:], begins))
            # A step in the future, since the other processes hear of it up to EVERY seconds later
            # and all must begin with the same one.
            first = self._step + 2 + math.ceil(AHEAD / max(seconds, 1e-3))
            if first > self.shaped.run.cfg.train.steps:
                self._answer(
                    name, "refused", why="the run ends before all processes could start it"
                )
                return
            self._peers.post("trace", self._requests, [first, steps])
            self._requests += 1
            self._answer(name, "waiting", first=first)
        self._wanted = Wanted(first, steps, name)

    def _follow(self) -> None:
        """Take the trace that process 0 announced."""
        if (said := self._peers.read_post("trace", self._requests)) is None:
            return
        self._requests += 1
        first, steps = said
        # Beginning later than the others would give traces of different steps; better none here.
        if first <= self._step:
            self._log.warn(
                f"process {self._peers.number} learned too late of a trace at step {first}"
            )
        else:
            self._wanted = Wanted(int(first), int(steps))
