"""The compiled steps of a run, one for each shape of batch. A shape of a later stage is compiled
when its stage begins; the first one in the background, while weights are made."""

import concurrent.futures
import os
import time
from typing import Any, NamedTuple

from maxstack.hardware import compiling
from maxstack.plan import executable, fit
from maxstack.run import Run, assemble


class CompiledStep(NamedTuple):
    """The step for one shape of batch."""

    run: Run
    rows: int
    step: Any
    """Compiled (state, batch[, frozen]) -> (state, scalars)."""
    seconds: float
    """Time to compile or load it."""


class CompiledSteps:
    """The steps of a run, by the shapes of its stages."""

    def __init__(self, run: Run):
        self._stages = run.cfg.stages
        # A run for each shape: the kernels are chosen by it, and shapes are checked against memory
        # before the first of them is compiled.
        own = run.cfg.train.batch_size, run.cfg.data.seq_len
        self._runs = {
            shape: run if shape == own else assemble(run.cfg.of_shape(*shape), run.mesh)
            for shape in self._stages.shapes
        }
        self._made: dict[tuple[int, int], concurrent.futures.Future[CompiledStep]] = {}

    def check_memory(self, beside: dict[str, int]) -> None:
        """ConfigError where even a lower bound of a step's memory exceeds that of a device."""
        for run in self._runs.values():
            fit.check_memory(run, beside)

    def start(self, step: int) -> None:
        """Start compiling the step of this number, or loading it from run.executable, in the
        background."""
        shape = self._stages.at(step)[1:]
        if shape not in self._made:
            pool = concurrent.futures.ThreadPoolExecutor(1, "compile")
            self._made[shape] = pool.submit(self._compiled, shape)
            # The thread ends with its one task, and an error waits in the future for whoever asks.
            pool.shutdown(wait=False)

    def at(self, step: int) -> CompiledStep:
        """The compiled step of this number; waits for it."""
        self.start(step)
        return self._made[self._stages.at(step)[1:]].result()

    def changes(self, step: int) -> bool:
        """Whether a step has another shape of batch than the one before."""
        return self._stages.at(step)[1:] != self._stages.at(step - 1)[1:]

    def _compiled(self, shape: tuple[int, int]) -> CompiledStep:
        begin, run = time.perf_counter(), self._runs[shape]
        if path := run.cfg.run.executable:
            step = executable.load(run, os.path.expanduser(path))
        else:
            step = compiling.compiled(run.lower(), run.mesh)
        return CompiledStep(run, shape[0], step, time.perf_counter() - begin)
