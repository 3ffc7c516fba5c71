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
from maxstack.inference.packages.metrics import Figures
from maxstack.inference.packages.version import Stamp, Version, check_sizes, stamp
from maxstack.inference.packages.worker import Worker
from maxstack.package.loader import PackageError

log = logging.getLogger(__name__)


class Model:
    """A folder and the version of it that answers."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        worker: Worker,
        figures: Callable[[str, str], Figures],
    ):
        self.folder = folder
        self.current: Version | None = None
        self.unloaded = False
        """True between a client's unload and load."""
        self.refused: dict[int, tuple[Stamp, str]] = {}
        """Versions that could not be served: what they were, and why."""
        self.names: list[str] = []
        """Those of the latest version that answered."""
        self._name: str | None = None
        self._stamp: Stamp = ()
        self._settings, self._worker, self._figures = settings, worker, figures

    @property
    def name(self) -> str:
        """The package's, that of all its versions."""
        return self._name or self.folder.name

    def on_disk(self) -> list[tuple[int, Path]]:
        """The versions that are there, the newest first; a package alone is version 1."""
        if (self.folder / MANIFEST).is_file():
            return [(1, self.folder)]
        return sorted(versions_of(self.folder), reverse=True)

    def look(self, taken: Iterable[str], again: bool = False) -> Version | None:
        """Open and warm the newest version that can be served -> it, or None where it answers
        already or there is none. Versions that were refused are passed over until their files
        change, or with `again`. `taken` are names of other models. Takes seconds."""
        there = self.on_disk()
        self.refused = {n: why for n, why in self.refused.items() if n in dict(there)}
        for number, folder in there:
            own = self.current is not None and self.current.number == number
            if own and not again:
                return None
            now = stamp(folder)
            if own and now == self._stamp:
                return None
            if not again and self.refused.get(number, (None,))[0] == now:
                continue
            try:
                version = self._opened(number, folder, taken)
            except Exception as error:
                self._refuse(number, now, error)
                continue
            self.refused.pop(number, None)
            self._name, self._stamp, self.names = version.name, now, [*version.queues]
            return version
        return None

    def why(self, number: int | None = None) -> str:
        """Why versions were refused, those that are newer than `number`."""
        found = {n: why for n, (_, why) in self.refused.items() if number is None or n > number}
        return "; ".join(f"version {n}: {found[n]}" for n in sorted(found, reverse=True))

    def index(self) -> list[dict[str, Any]]:
        """The versions in the words of the protocol's repository index."""
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

    def _opened(self, number: int, folder: Path, taken: Iterable[str]) -> Version:
        check_sizes(folder)
        version = Version(folder, number, self._settings, self._figures)
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
        if self.refused.get(number, ((), ""))[1] != why:
            log.warning("%s version %s is refused: %s", self.name, number, why)
        self.refused[number] = now, why


def check_start(model: Model) -> Version:
    """The version that a model answers with at first; ConfigError where it has none."""
    version = model.look(())
    if version is None:
        why = model.why() or "no sub-folder with a number for its name has a manifest.json"
        raise ConfigError(f"{model.folder}: has no version that can be served: {why}")
    return version
