"""Periodic comparisons: of the copies of the weights on several devices, and of the processes'
speeds."""

from maxstack.cluster.peers import Peers
from maxstack.errors import ConfigError
from maxstack.faults.replicas import (
    Corruption,
    Recompute,
    Replicas,
    describe_sizes,
    find_suspects,
)
from maxstack.faults.stragglers import Stragglers
from maxstack.meter import Meter
from maxstack.report.log import Log
from maxstack.report.metrics import Writer
from maxstack.run import Run, State


class Checks:
    """Comparisons between two steps, in all processes at the same one, for a run on several
    devices. The constructor compiles small programs."""

    def __init__(self, run: Run, meter: Meter, log: Log, writer: Writer):
        cfg = run.cfg.faults
        self._log, self._writer = log, writer
        self._meter = meter
        self._every = cfg.check_every
        self._replicas = replicas = Replicas(run.abstract, run.mesh)
        if self._every:
            log.say(replicas.describe(self._every))
        self._corruption = Corruption(replicas, self._every, log.say)
        self._stragglers = Stragglers(cfg.slow, self._every, Peers())

    def begin(self, state: State) -> None:
        """ConfigError where the copies that several processes begin with are not alike."""
        # One process makes or reads all its copies alike; several may read different files.
        differences = self._replicas.compare(self._replicas.hashes(state))
        if differences and Peers().count > 1:
            raise ConfigError(
                f"the processes begin with different states: {describe_sizes(differences)} of "
                f"{self._replicas.name_devices(find_suspects(differences))}; what they read "
                "(model.from, a checkpoint, an adapter) is not the same on all hosts"
            )

    def due(self, step: int, saving: bool) -> bool:
        """True where anything is to be compared after a step, which is to be saved or not."""
        if not self._every:
            return False
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
