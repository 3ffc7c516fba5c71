"""The packages that a process serves: found by name, loaded, replaced, unloaded.

Folders are looked at every few seconds. A newer version is opened and warmed beside the one that
answers, one model at a time, and then takes its place for new requests. The old version answers
those that it has, and its memory is freed after the last. A version that cannot be served is
refused with a line, and the one before goes on.
"""

import asyncio
import gc
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from maxstack.errors import ConfigError, quoted
from maxstack.inference.packages import metrics
from maxstack.inference.packages.batching import Queue, Settings
from maxstack.inference.packages.metrics import SignatureMetrics
from maxstack.inference.packages.model import Model, load_first
from maxstack.inference.packages.version import Version
from maxstack.inference.packages.worker import Worker
from maxstack.inference.server.refusal import Refusal

log = logging.getLogger(__name__)


class Repository:
    """The models of some folders. ConfigError for a folder with no version that can be served.
    Everything else is for the event loop."""

    def __init__(self, folders: Sequence[Path], settings: Settings, poll: float):
        self.worker = Worker()
        self.closed = False
        """True once new requests are refused."""
        self._poll = poll
        self._metrics: dict[tuple[str, str], SignatureMetrics] = {}
        self._loading = asyncio.Lock()
        """Held while a model is loaded or unloaded: compilers take all cores."""
        self._answering: set[Version] = set()
        """Versions that may have unanswered requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.models: list[Model] = []
        for folder in folders:
            model = Model(folder, settings, self.worker, self._metrics_of)
            # Before the server listens: a folder without a version that works is the user's
            # mistake.
            version = load_first(model)
            if twice := {*version.queues} & {name for each in self.models for name in each.names}:
                raise ConfigError(
                    f"{folder}: another package is named {min(twice)} too; give it its own process"
                )
            model.current = version
            self._answering.add(version)
            self.models.append(model)

    def start(self) -> None:
        """Start to run programs and to look for newer versions."""
        self.worker.start()
        if self._poll:
            self._spawn(self._poll_folders())

    async def drain(self) -> None:
        """Refuse new requests and wait until the others are answered."""
        self.closed = True
        # Old versions too may still have requests.
        for version in [*self._answering]:
            await version.idle()

    async def stop(self) -> None:
        """End the worker and all tasks."""
        self.closed = self.worker.stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.worker.stop)

    def check(self) -> None:
        """Raise Refusal while shutting down."""
        if self.closed:
            raise Refusal(503, "the server is shutting down")

    def find(self, name: str, version: str | None) -> tuple[Version, Queue]:
        """Return the version and queue of a name. Refusal for one that is not served."""
        model = self.model(name)
        current = model.current
        if current is None:
            raise Refusal(503, f"{name} is unloaded; POST /v2/repository/models/{name}/load")
        # Known but not served here: 400 with the reason says more than 404.
        if name in current.refused and name not in current.queues:
            raise Refusal(400, f"{name} {current.refused[name]}; open the package by its loader")
        if name not in current.queues:
            raise Refusal(404, f"version {current.number} has no {name}")
        if version not in (None, "", str(current.number)):
            raise Refusal(
                404, f"{name} version {quoted(version)} is not served; {current.number} is"
            )
        return current, current.queues[name]

    def model(self, name: str) -> Model:
        """Return the model with this name of a package or signature. Refusal with status 404."""
        for model in self.models:
            refused = model.current.refused if model.current else ()
            if name in (model.name, *model.names, *refused):
                return model
        served = ", ".join(self.names)
        raise Refusal(404, f"no model {quoted(name)} is served here; there are {served}")

    @property
    def names(self) -> list[str]:
        """Names of all that is served."""
        return [name for model in self.models if model.current for name in model.current.queues]

    async def load(self, name: str) -> None:
        """Serve the newest version, trying refused ones again. Refusal where that fails."""
        model = self.model(name)
        async with self._loading:
            self.check()
            await self._replace(model, again=True)
        number = model.current.number if model.current else None
        if why := model.refusals(number):
            left = f"version {number} answers" if number is not None else "none answers"
            raise Refusal(400, f"{why}; {left}")
        if number is None:
            raise Refusal(400, f"{model.folder}: no version is there")

    async def unload(self, name: str) -> None:
        """Unload a model once it has answered its requests, until `load`."""
        model = self.model(name)
        async with self._loading:
            old = model.current
            model.current = None
            model.unloaded = True
            if old is not None:
                task = self._spawn(self._retire(old))
                # This frame would hold the version while `_retire` frees its memory.
                del old
                await task

    def text(self) -> str:
        """Return metrics for Prometheus."""
        waiting = {
            (queue.metrics.model, queue.metrics.version): queue.length
            for version in self._answering
            for queue in version.queues.values()
        }
        return metrics.text(self._metrics.values(), waiting)

    def index(self) -> list[dict[str, Any]]:
        """Return all versions that are served or were refused."""
        return [row for model in self.models for row in model.index()]

    async def _poll_folders(self) -> None:
        """Look for newer versions at every interval."""
        while not self.closed:
            await asyncio.sleep(self._poll)
            for model in self.models:
                async with self._loading:
                    if self.closed or model.unloaded:
                        continue
                    try:
                        await self._replace(model)
                    # A folder that fails once, as on a network, must not end the polling of the
                    # others.
                    except Exception as error:
                        log.error(
                            "%s: cannot be checked for newer versions", model.folder, exc_info=error
                        )

    async def _replace(self, model: Model, again: bool = False) -> None:
        """Serve a newer version, if there is one; the old one answers its requests."""
        # Names of the last version of each, also where it is unloaded and may come back.
        taken = {name for each in self.models if each is not model for name in each.names}
        version = await asyncio.to_thread(model.load_newest, taken, again)
        if version is None:
            return
        old = model.current
        # One assignment on the event loop, so a request sees the old version or the new one.
        model.current = version
        model.unloaded = False
        self._answering.add(version)
        if old is not None:
            print(f"{version.name}: version {version.number} instead of {old.number}", flush=True)
            self._spawn(self._retire(old))

    async def _retire(self, version: Version) -> None:
        """Free a version's memory once it has answered its requests."""
        await version.idle()
        self._answering.discard(version)
        del version
        # jax keeps frames of a program's first call in a cycle, so the weights stay without this:
        # 0.13 s, 5 ms with the modules frozen at the start.
        gc.collect()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _metrics_of(self, name: str, version: str) -> SignatureMetrics:
        return self._metrics.setdefault((name, version), SignatureMetrics(name, version))
