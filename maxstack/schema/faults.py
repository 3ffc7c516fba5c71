"""The configuration of faults: refused updates, spikes, hangs, lost slices."""

from collections.abc import Iterator

from pydantic import Field

from maxstack.config import Fault, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SpikeConfig(Section):
    """Definition of a spike, and when the run goes back before it."""

    deviations: PositiveFloat = 6.0
    """A spike is a loss, or the logarithm of a gradient norm, that lies more than this many
    standard deviations above the running mean."""
    window: int = Field(128, ge=2)
    """Steps of the exponential mean and deviation. Values of refused updates are not among them."""
    warm_up: int = Field(100, ge=2)
    """Accepted updates before anything is judged a spike."""
    rewind_after: PositiveInt | None = None
    """Spikes among the refused updates in a row after which the run goes back to a checkpoint
    before them and passes over their batches; null: never."""
    before: NonNegativeInt = 100
    """Batches before the first of these spikes that are passed over too (PaLM, arXiv:2204.02311,
    section 5.1)."""
    max_rewinds: NonNegativeInt = 3
    """Rewinds in the whole run; where one more would be needed the run ends with an error."""


class WatchdogConfig(Section):
    """A process of its own beside each process of the run, which writes the stacks of all threads
    into the log and ends a run that hangs."""

    step: PositiveFloat = 600.0
    """Seconds without a finished step after which the run hangs; ten times the slowest step so far
    where that is longer."""
    other: PositiveFloat = 3600.0
    """The same for anything but steps: start-up, compiling, restoring, an evaluation, waiting for a
    save."""


class ElasticConfig(Section):
    """A run of several slices that one process drives (runtime: pathways) goes on without lost
    ones: on fewer, from the newest checkpoint, with the same batches."""

    least: PositiveInt = 1
    """Slices without which the run ends."""
    attempts: PositiveInt = 10
    """Times that a process goes on so."""


class FaultsConfig(Section):
    """An update whose loss or gradient norm is not finite is refused: weights and optimizer state
    stay as they were, and the run goes on."""

    max_skips: NonNegativeInt = 10
    """Refused updates in a row that a run may survive; with one more it ends with an error. 0: the
    first one ends it."""
    spike: SpikeConfig | None = None
    """Refuse spikes of the loss and of the gradient norm too; null: only what is not finite."""
    watchdog: WatchdogConfig | None = WatchdogConfig()
    """Ends a run that hangs, and all processes of one that lost one; null: nobody watches."""
    grace: PositiveFloat = 120.0
    """Seconds after a signal in which the process has saved and left; what is not saved then is
    lost. `maxstack submit` gives what the cluster grants."""
    elastic: ElasticConfig | None = None
    """Go on without lost slices; null: their loss ends the process, and it is started again."""
    check_every: NonNegativeInt = 100
    """Steps between comparisons of what the devices hold alike (silent data corruption) and of the
    processes' speeds; 0: never."""
    slow: float = Field(1.5, gt=1)
    """A process is named as slow where its devices take this many times as long as the others', or
    where waiting for it makes steps this many times as long; two comparisons in a row must say
    so."""

    def own_faults(self) -> Iterator[Fault]:
        if self.spike and self.spike.rewind_after and self.spike.rewind_after > self.max_skips:
            yield (
                "spike.rewind_after",
                f"{self.spike.rewind_after} spikes in a row are never reached, because "
                f"faults.max_skips={self.max_skips} ends the run before; use {self.max_skips} or "
                "less, or a larger faults.max_skips",
            )
