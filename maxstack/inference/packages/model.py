"""A served folder: a package, or a folder of its versions, of which the newest usable one answers.

A version is a sub-folder whose name is a number. It is tried once its manifest is there, and again
when any of its files changed.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from maxstack.errors import ConfigError, shortened
from maxstack.inference.packages.batching import Settings
from maxstack.inference.packages.folders import MANIFEST, versions_of
from maxstack.inference.packages.metrics import SignatureMetrics
from maxstack.inference.packages.version import Stamp, Version, check_sizes, stamp
from maxstack.inference.packages.worker import Worker
from maxstack.package.loader import PackageError

log = logging.getLogger(__name__)


class Model:
    """A folder and the version in it that answers."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        worker: Worker,
        metrics: Callable[[str, str], SignatureMetrics],
    ):
        self.folder = folder
        self.current: Version | None = None
        self.unloaded = False
        """True after a client's unload until the next load."""
        self.refused: dict[int, tuple[Stamp, str]] = {}
        """Versions that could not be served: their stamps, and why."""
        self.names: list[str] = []
        """Names of signatures of the latest version that answered."""
        self._name: str | None = None
        self._stamp: Stamp = ()
        self._settings = settings
        self._worker = worker
        self._metrics = metrics

    @property
    def name(self) -> str:
        """Name of the package, which all its versions share."""
        return self._name or self.folder.name

    def on_disk(self) -> list[tuple[int, Path]]:
        """Return the versions in the folder, the newest first; a package alone is version 1."""
        if (self.folder / MANIFEST).is_file():
            return [(1, self.folder)]
        return sorted(versions_of(self.folder), reverse=True)

    def load_newest(self, taken: Iterable[str], again: bool = False) -> Version | None:
        """Load and warm the newest version that can be served -> it, or None where it answers
        already or there is none. Refused versions are skipped until their files change, unless
        `again`. `taken` are names of other models. Takes seconds."""
        there = self.on_disk()
        # Forget versions that were deleted.
        self.refused = {n: why for n, why in self.refused.items() if n in dict(there)}
        for number, folder in there:
            own = self.current is not None and self.current.number == number
            if own and not again:
                return None
            # Before it is read: a change meanwhile makes another stamp, so the version is tried
            # again.
            now = stamp(folder)
            if own and now == self._stamp:
                return None
            # Reading a large package again at each poll, only to refuse it, would be for nothing.
            if not again and self.refused.get(number, (None,))[0] == now:
                continue
            try:
                version = self._load(number, folder, taken)
            # Any error, since the folder may hold anything; an older version is tried next.
            except Exception as error:
                self._refuse(number, now, error)
                continue
            self.refused.pop(number, None)
            self._name = version.name
            self._stamp = now
            self.names = [*version.queues]
            return version
        return None

    def refusals(self, number: int | None = None) -> str:
        """Return why versions newer than `number` were refused."""
        found = {n: why for n, (_, why) in self.refused.items() if number is None or n > number}
        return "; ".join(f"version {n}: {found[n]}" for n in sorted(found, reverse=True))

    def index(self) -> list[dict[str, Any]]:
        """Describe the versions as the protocol's repository index does."""
        rows = []
        if self.current is not None:
            number = str(self.current.number)
            rows = [
                {"name": name, "version": number, "state": "READY", "reason": ""}
                for name in self.current.queues
            ]
        elif self.unloaded:
            rows = [
                {"name": self.name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
            ]
        refused = [
            {"name": self.name, "version": str(n), "state": "UNAVAILABLE", "reason": why}
            for n, (_, why) in sorted(self.refused.items())
        ]
        return rows + refused

    def _load(self, number: int, folder: Path, taken: Iterable[str]) -> Version:
        # Sizes first: a copy may be under way, and hashing all of it takes long.
        check_sizes(folder)
        version = Version(folder, number, self._settings, self._metrics)
        if self._name not in (None, version.name):
            raise PackageError(f"{folder}: is named {version.name}; other versions {self._name}")
        if twice := {*version.queues} & {*taken}:
            raise PackageError(f"{folder}: another package has the name {', '.join(sorted(twice))}")
        did = version.warm(self._worker)
        print(f"{version.name} version {number}: {did}", flush=True)
        return version

    def _refuse(self, number: int, now: Stamp, error: Exception) -> None:
        known = isinstance(error, PackageError)
        why = shortened(str(error) if known else f"cannot be used: {error!r}", 1000)
        # One line for a reason, not one at each poll.
        if self.refused.get(number, ((), ""))[1] != why:
            log.warning("%s version %s is refused: %s", self.name, number, why)
        self.refused[number] = now, why


def load_first(model: Model) -> Version:
    """Load the first version of a model; ConfigError where it has none."""
    version = model.load_newest(())
    if version is None:
        why = model.refusals() or "no sub-folder with a number for its name has a manifest.json"
        raise ConfigError(f"{model.folder}: has no version that can be served: {why}")
    return version
