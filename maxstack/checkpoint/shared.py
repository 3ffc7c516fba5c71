"""A tier that every process sees: steps in Orbax's format, which any mesh reads whatever mesh wrote
them, each with a manifest.

Orbax's stateless functions save and load. Several processes write a step together: each its shards,
then the checksums of its share of the files, and process 0 the manifest, once all have succeeded.
"""

import contextlib
import errno
import logging
import re
import shutil
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from maxstack.checkpoint import manifest
from maxstack.checkpoint.manifest import Unreadable
from maxstack.cluster.peers import Peers

# A failed save is one line in the log; libraries would print a traceback as well.
logging.getLogger("absl").addFilter(
    lambda record: "_SignalingThread.run() raised" not in record.getMessage()
)
logging.getLogger("asyncio").addFilter(
    lambda record: "exception was never retrieved" not in record.getMessage()
)
warnings.filterwarnings("ignore", r"coroutine '\w*\.?save_checkpointables", RuntimeWarning)
_OS_ERROR = re.compile(rf"\[OS error {errno.EIO}:[^\]]*\]")
"""A failing disk in an error message of tensorstore."""


class Shared:
    """The steps below `folder`. One thread calls `begin` and all that reads, another `finish`, in
    all processes alike."""

    def __init__(self, folder: Path, peers: Peers, aside: Path | None = None):
        """`aside`: where steps go that no longer count, by default beside `folder`."""
        self.folder = folder
        self._peers = peers
        self._aside = aside or folder.parent

    def steps(self) -> list[int]:
        """List the finished steps that process 0 sees, oldest first. Every process calls it at the
        same time."""
        # Process 0's list for all: two processes once listed a folder before and after a step was
        # moved out of it, and one then waited 600 s.
        own = manifest.steps(self.folder) if self._peers.number == 0 else []
        return self._peers.exchange("steps", own)[0]

    present = steps

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"{step}"

    def clear(self) -> list[str]:
        """Remove what a killed process left; return a line for each. Whatever else has a step's
        name and no manifest is moved aside: it may be of another program."""
        lines = []
        if self._peers.number == 0 and self.folder.exists():
            for path in [*self.folder.iterdir()]:
                number, _, more = path.name.partition(".")
                if number.isdigit() and path.is_dir() and not (path / manifest.NAME).exists():
                    why = f"{path / manifest.NAME}: is missing, so the save was never finished"
                    begun = manifest.mark(path).exists()
                    # Ours for certain: marked, Orbax's own temporary, or empty. Anything else is
                    # moved, not deleted.
                    if begun or more.startswith("orbax-checkpoint-tmp") or not any(path.iterdir()):
                        shutil.rmtree(path)
                        lines.append(f"cleared away: {why}")
                    elif not more:
                        lines.append(f"{why}; put aside as {self._move(path, 'unfinished')}")
            for mark in self.folder.glob(f"*{manifest.UNFINISHED}"):
                mark.unlink()
        self._peers.barrier("clear")
        return lines

    def begin(self, step: int, parts: Mapping[str, Any]) -> Callable[[], None]:
        """Copy the arrays off the devices and start to write; return a function that waits for the
        end and raises its error."""
        try:
            if self._peers.number == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clear_failed()
                # Before Orbax writes: a kill at any moment leaves a mark beside what it left.
                manifest.mark(self.path(step)).touch()
            saving = ocp.save_checkpointables_async(self.path(step), dict(parts))
        except Exception as error:  # `finish` raises it and tells the other processes
            failed = Future[None]()
            failed.set_exception(error)
            return failed.result
        return saving.result

    def finish(self, step: int, written: Callable[[], None], facts: Mapping[str, Any]) -> None:
        """Wait for the save that `begin` began, then write checksums and manifest. OSError where
        any process could not."""
        peers, folder = self._peers, self.path(step)
        first = peers.number == 0
        entries: dict[str, manifest.Entry] = {}
        failure = ""
        try:
            written()
            # Read back from the disk, and shared out: one process would read all that the others
            # have written.
            entries = manifest.checksums(folder, slice(peers.number, None, peers.count))
        except Exception as error:  # of a file system, tensorstore or Orbax
            failure = _first_line(error)
        # Through the coordination service, since this runs in a thread beside steps.
        results = peers.exchange("written", [failure, entries])
        failures = [failure for failure, _ in results if failure]
        if first and not failures:
            try:
                manifest.write(folder, dict(ChainMap(*(part for _, part in results))), facts)
                manifest.mark(folder).unlink(missing_ok=True)
            except OSError as error:
                failures = [_first_line(error)]
        # Whether the step counts is process 0's to say: it alone knows whether the manifest was
        # written.
        if failures := peers.exchange("finished", failures)[0]:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
                self._clear_failed()
                manifest.mark(folder).unlink(missing_ok=True)
            raise OSError("; ".join(dict.fromkeys(failures)))

    def _clear_failed(self) -> None:
        """Delete what Orbax wrote of failed saves; its other writers may go on after a failure."""
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts in a step's manifest."""
        return manifest.read(self.path(step))[0]

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Add to the facts of a finished step, in process 0."""
        if self._peers.number == 0:
            manifest.note(self.path(step), facts)

    def contents(self, step: int) -> Mapping[str, Any]:
        """Return the names of a step's parts with Orbax's metadata."""
        return ocp.checkpointables_metadata(self.path(step)).metadata

    def load(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load parts of a step, of the state the wanted arrays alone."""
        context = ocp.Context()
        # Otherwise Orbax asks for every array of the step.
        context.pytree.loading.partial_load = True
        with context:
            return ocp.load_checkpointables(self.path(step), dict(wanted))

    @contextlib.contextmanager
    def verify(self, step: int) -> Iterator[None]:
        """Check a step's files against their checksums, each process a share. A single process does
        so while the block reads them, several do before: a process that raised in the block would
        leave the others waiting. Damage, the same in every process, where a file was lost or
        changed, whatever error that caused in the block; Unreadable where one cannot be read."""
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(self._check, step)
            if self._peers.count > 1:
                checking.result()
            try:
                yield
            except Exception as error:  # a damaged file can make any library fail
                checking.result()
                # tensorstore reads by itself, without our retries: a disk that fails is no damage.
                if found := _OS_ERROR.search(f"{error}"):
                    raise Unreadable(f"{self.path(step)}: cannot be read: {found[0]}") from error
                raise
            checking.result()

    def _check(self, step: int) -> None:
        """Raise Damage or Unreadable."""
        share = slice(self._peers.number, None, self._peers.count)
        lines: list[str] = []
        unreadable = ""
        try:
            lines = [*manifest.damages(self.path(step), share)]
        except Unreadable as error:
            unreadable = f"{error}"
        manifest.judge(self._peers.exchange("verified", [lines, unreadable]))

    def set_aside(self, step: int, name: str) -> Path:
        """Move a step into a folder `name`, where it no longer counts."""
        to = self._aside / name
        if self._peers.number == 0:
            to = self._move(self.path(step), name)
        self._peers.barrier("aside")
        return to

    def _move(self, path: Path, name: str) -> Path:
        # By the time, so that two damaged steps of one number keep apart.
        to = self._aside / name / f"{time.time_ns()}" / path.name
        to.parent.mkdir(parents=True)
        return path.rename(to)

    def trim(self, chosen: Callable[[list[int]], list[int]]) -> None:
        """Delete the `chosen` ones of the finished steps, in process 0."""
        if self._peers.number == 0:
            for step in chosen(manifest.steps(self.folder)):
                manifest.delete(self.path(step))


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0][:500]) or type(error).__name__
