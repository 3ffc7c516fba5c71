"""The comparisons every so many steps: of what several devices hold alike, and of the processes'
speeds."""

from typing import TYPE_CHECKING

from maxstack.cluster.peers import Peers
from maxstack.meter import Meter
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run, State

if TYPE_CHECKING:
    from maxstack.faults.replicas import Recompute


class Checks:
    """Comparisons between two steps, in all processes at the same one. The constructor compiles
    small programs."""

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
            self._stragglers = Stragglers(cfg.slow, cfg.check_every, Peers())

    def due(self, step: int, saving: bool) -> bool:
        """True where anything is to be compared after a step, which is to be saved or not."""
        if self._corruption is None or self._stragglers is None:
            return False
        return self._corruption.due(step, saving) or self._stragglers.due(step)

    def compare(self, step: int, state: State, saving: bool) -> "Recompute | None":
        """Compare speeds and copies after a step -> the step to go back to, if need be. ConfigError
        where a device is to be taken out of service."""
        assert self._corruption and self._stragglers, "it is due"
        if self._stragglers.due(step):
            report = self._stragglers.compare_speeds(step, self._meter.lag())
            self._writer.write({"step": step, **report.numbers})
            for line in report.lines:
                self._log.say(line)
        if not self._corruption.due(step, saving):
            return None
        return self._corruption.compare_copies(step, state)
