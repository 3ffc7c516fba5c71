"""The compiled steps of a run whose batches have several shapes, each compiled when it is due."""

import concurrent.futures
import os
import time
from typing import Any, NamedTuple

from maxstack.hardware import compiling
from maxstack.plan import executable, fit
from maxstack.run import Run, assemble


class CompiledStep(NamedTuple):
    """A run of one shape of batch."""

    run: Run
    rows: int
    step: Any
    """Compiled (state, batch[, frozen]) -> (state, scalars)."""
    seconds: float
    """Time that compiling or loading it took."""


class CompiledSteps:
    """The steps of a run, by the shapes of its stages. ConfigError where a device has not the
    memory for one of them."""

    def __init__(self, run: Run):
        self._stages = run.cfg.stages
        own = run.cfg.train.batch_size, run.cfg.data.seq_len
        self._runs = {
            shape: run if shape == own else assemble(run.cfg.of_shape(*shape), run.mesh)
            for shape in self._stages.shapes
        }
        self._made: dict[tuple[int, int], concurrent.futures.Future[CompiledStep]] = {}

    def check_memory(self, beside: dict[str, int]) -> None:
        """ConfigError where a device has less than the least that a step holds."""
        for run in self._runs.values():
            fit.check_memory(run, beside)

    def start(self, step: int) -> None:
        """Compile what a step runs, or load it from run.executable, while the caller goes on."""
        shape = self._stages.at(step)[1:]
        if shape not in self._made:
            pool = concurrent.futures.ThreadPoolExecutor(1, "compile")
            self._made[shape] = pool.submit(self._compiled, shape)
            pool.shutdown(wait=False)

    def at(self, step: int) -> CompiledStep:
        """What a step runs."""
        self.start(step)
        return self._made[self._stages.at(step)[1:]].result()

    def changes(self, step: int) -> bool:
        """True where a step has other batches than the one before."""
        return self._stages.at(step)[1:] != self._stages.at(step - 1)[1:]

    def _compiled(self, shape: tuple[int, int]) -> CompiledStep:
        begin, run = time.perf_counter(), self._runs[shape]
        if path := run.cfg.run.executable:
            step = executable.load(run, os.path.expanduser(path))
        else:
            step = compiling.compiled(run.lower(), run.mesh)
        return CompiledStep(run, shape[0], step, time.perf_counter() - begin)
