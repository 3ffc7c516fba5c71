"""What a run looks after every so many steps: that what devices hold alike is alike, and that no
process holds up the others."""

from typing import TYPE_CHECKING

from maxstack.cluster.peers import Processes
from maxstack.meter import Meter
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run, State

if TYPE_CHECKING:
    from maxstack.faults.replicas import Recompute


class Checks:
    """Between two steps, in all processes at the same one. Making one compiles small programs."""

    def __init__(self, run: Run, meter: Meter, log: Log, writer: Writer):
        cfg = run.cfg.faults
        self._meter, self._log, self._writer = meter, log, writer
        self._corruption = self._stragglers = None
        if cfg.check_every and run.mesh.size > 1:
            from maxstack.faults.replicas import Corruption, Replicas
            from maxstack.faults.stragglers import Stragglers

            replicas = Replicas(run.abstract, run.mesh)
            log.say(replicas.describe(cfg.check_every))
            self._corruption = Corruption(replicas, cfg.check_every, log.say)
            self._stragglers = Stragglers(cfg.slow, cfg.check_every, Processes())

    def due(self, step: int, saving: bool) -> bool:
        """Whether anything is to be checked after a step, which is to be saved or not."""
        return bool(
            self._corruption
            and self._stragglers
            and (self._corruption.due(step, saving) or self._stragglers.due(step))
        )

    def __call__(self, step: int, state: State, saving: bool) -> "Recompute | None":
        """Check the state after a step -> where to go back to, if need be. ConfigError where a
        device is to be taken out of service."""
        assert self._corruption and self._stragglers, "it is due"
        if self._stragglers.due(step):
            report = self._stragglers.check(step, self._meter.lag())
            self._writer.write({"step": step, **report.numbers})
            for line in report.lines:
                self._log.say(line)
        return self._corruption.check(step, state) if self._corruption.due(step, saving) else None
