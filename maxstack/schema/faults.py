"""The configuration of faults: refused updates, spikes, hangs, lost slices."""

from collections.abc import Iterator

from pydantic import Field

from maxstack.config import Fault, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SpikeConfig(Section):
    """Detection of spikes, and when to rewind."""

    deviations: PositiveFloat = 6.0
    """Threshold in standard deviations above the running mean, for the loss and for the logarithm
    of the gradient norm."""
    window: int = Field(128, ge=2)
    """Window in steps of the exponential moving mean and deviation; refused updates do not
    count."""
    warm_up: int = Field(100, ge=2)
    """Number of accepted updates before spike detection begins."""
    rewind_after: PositiveInt | None = None
    """Number of spikes in a series of consecutive refused updates after which the run restores a
    checkpoint from before them and skips their batches; null: never."""
    before: NonNegativeInt = 100
    """Number of batches before the first of these spikes to skip as well (PaLM, arXiv:2204.02311,
    section 5.1)."""
    max_rewinds: NonNegativeInt = 3
    """Maximum number of rewinds in the whole run; the next one ends it with an error."""


class WatchdogConfig(Section):
    """A separate process that watches each process of the run. If the run hangs, it writes the
    stacks of all threads to the log and ends the process."""

    step: PositiveFloat = 600.0
    """Timeout of a step in seconds, or ten times the slowest step so far if that is longer."""
    other: PositiveFloat = 3600.0
    """Timeout in seconds of everything else: start-up, compiling, restoring, an evaluation, waiting
    for a save."""


class ElasticConfig(Section):
    """Lets one process that drives several slices (runtime: pathways) continue without lost ones:
    on fewer slices, from the newest checkpoint, with the same batches."""

    least: PositiveInt = 1
    """Minimum number of slices to continue on."""
    attempts: PositiveInt = 10
    """Maximum number of times that a process continues after losing slices."""


class FaultsConfig(Section):
    """Fault handling. An update whose loss or gradient norm is not finite is always refused:
    weights and optimizer state stay as they were, and the run goes on."""

    max_skips: NonNegativeInt = 10
    """Maximum number of refused updates in a row; one more ends the run with an error."""
    spike: SpikeConfig | None = None
    """Also refuse updates with a spike of the loss or of the gradient norm; null: refuse only
    non-finite values."""
    watchdog: WatchdogConfig | None = WatchdogConfig()
    """End a run that hangs, and all processes of a run that has lost one of them; null: no
    watchdog."""
    grace: PositiveFloat = 120.0
    """Seconds after a signal in which the process saves and exits; what is not saved by then is
    lost. `maxstack submit` sets what the cluster grants."""
    elastic: ElasticConfig | None = None
    """Continue without lost slices; null: a lost slice ends the process, which is restarted."""
    check_every: NonNegativeInt = 100
    """Steps between checks that compare replicated weights across devices (to find silent data
    corruption) and the speeds of processes; 0: never."""
    slow: float = Field(1.5, gt=1)
    """Report a process as slow if, in two comparisons in a row, its devices take this many times as
    long as the others', or waiting for it makes steps this many times as long."""

    def own_faults(self) -> Iterator[Fault]:
        if self.spike and self.spike.rewind_after and self.spike.rewind_after > self.max_skips:
            yield (
                "spike.rewind_after",
                f"{self.spike.rewind_after} spikes in a row are never reached, because "
                f"faults.max_skips={self.max_skips} ends the run before; use {self.max_skips} or "
                "less, or a larger faults.max_skips",
            )
