"""Profiler trace of some steps, in the run's folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import jax

from maxstack.report.log import Log

if TYPE_CHECKING:
    from maxstack.schema.config import ProfileConfig


class Profiler:
    """Runs jax's profiler over the steps that train.profile names."""

    def __init__(self, cfg: "ProfileConfig | None", folder: Path, log: Log):
        self._cfg, self._folder, self._log, self._on = cfg, folder / "profile", log, False

    def before(self, step: int) -> None:
        """Start the trace when its first step is about to run."""
        if self._cfg and step == self._cfg.start:
            jax.profiler.start_trace(str(self._folder))
            self._on = True

    def after(self, step: int, scalars: dict[str, jax.Array]) -> None:
        """End the trace once its last step has run."""
        if self._cfg and self._on and step == self._cfg.start + self._cfg.steps - 1:
            jax.block_until_ready(scalars)
            jax.profiler.stop_trace()
            self._on = False
            self._log.say(f"profile of steps {self._cfg.start} to {step} in {self._folder}")
