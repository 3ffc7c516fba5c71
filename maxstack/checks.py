"""The comparisons every so many steps: of the copies that several devices hold, and of the
processes' speeds."""

from maxstack.cluster.peers import Peers
from maxstack.faults.replicas import Corruption, Recompute, Replicas
from maxstack.faults.stragglers import Stragglers
from maxstack.meter import Meter
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run, State


class Checks:
    """Comparisons between two steps, in all processes at the same one, for a run with
    faults.check_every on several devices. The constructor compiles small programs."""

    def __init__(self, run: Run, meter: Meter, log: Log, writer: Writer):
        cfg = run.cfg.faults
        self._meter, self._log, self._writer = meter, log, writer
        replicas = Replicas(run.abstract, run.mesh)
        log.say(replicas.describe(cfg.check_every))
        self._corruption = Corruption(replicas, cfg.check_every, log.say)
        self._stragglers = Stragglers(cfg.slow, cfg.check_every, Peers())

    def due(self, step: int, saving: bool) -> bool:
        """True where anything is to be compared after a step, which is to be saved or not."""
        return self._corruption.due(step, saving) or self._stragglers.due(step)

    def compare(self, step: int, state: State, saving: bool) -> Recompute | None:
        """Compare speeds and copies after a step -> the step to go back to, if need be. ConfigError
        where a device is to be taken out of service."""
        if self._stragglers.due(step):
            report = self._stragglers.compare_speeds(step, self._meter.lag())
            self._writer.write({"step": step, **report.numbers})
            for line in report.lines:
                self._log.say(line)
        if not self._corruption.due(step, saving):
            return None
        return self._corruption.compare_copies(step, state)
