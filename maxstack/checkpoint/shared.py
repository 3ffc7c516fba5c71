"""A tier that every process sees: steps in Orbax's format, which any mesh reads whatever mesh wrote
them, each with a manifest."""

import contextlib
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from maxstack.checkpoint import manifest
from maxstack.checkpoint.manifest import Damage
from maxstack.cluster.peers import Processes

# What goes wrong in a save is told in one line.
logging.getLogger("absl").addFilter(
    lambda record: "_SignalingThread.run() raised" not in record.getMessage()
)
logging.getLogger("asyncio").addFilter(
    lambda record: "exception was never retrieved" not in record.getMessage()
)
warnings.filterwarnings("ignore", r"coroutine '\w*\.?save_checkpointables", RuntimeWarning)


class Shared:
    """The steps below `folder`. A step is a folder of that number with a manifest; what has none
    was never finished.

    `begin` and all that reads belong to one thread, `finish` to another, in all processes alike.
    """

    def __init__(self, folder: Path, processes: Processes, aside: Path | None = None):
        """`aside`: where steps are put that no longer count, by default beside `folder`."""
        self.folder, self._processes, self._aside = folder, processes, aside or folder.parent

    def steps(self) -> list[int]:
        """The finished steps that process 0 sees, oldest first. Every process asks at the same
        time."""
        return self._processes.tell(
            "steps", manifest.steps(self.folder) if self._processes.number == 0 else []
        )[0]

    there = steps

    def path(self, step: int) -> Path:
        """Where a step lies."""
        return self.folder / f"{step}"

    def clear(self) -> list[str]:
        """Remove a killed process's leavings -> a line for each. Whatever else has a step's name
        and no manifest is moved aside: it may be of a version that wrote none, or no step at
        all."""
        found = []
        if self._processes.number == 0 and self.folder.exists():
            for path in [*self.folder.iterdir()]:
                number, _, more = path.name.partition(".")
                if number.isdigit() and path.is_dir() and not (path / manifest.NAME).exists():
                    why = f"{path / manifest.NAME}: is missing, so the save was never finished"
                    begun = manifest.mark(path).exists()
                    if begun or more.startswith("orbax-checkpoint-tmp") or not any(path.iterdir()):
                        shutil.rmtree(path)
                        found.append(f"cleared away: {why}")
                    elif not more:
                        found.append(f"{why}; put aside as {self._move(path, 'unfinished')}")
            for mark in self.folder.glob(f"*{manifest.UNFINISHED}"):
                mark.unlink()
        self._processes.wait("clear")
        return found

    def begin(self, step: int, parts: Mapping[str, Any]) -> Callable[[], None]:
        """Copy the arrays off the devices and write on in the background; what comes back waits for
        that, and raises what went wrong."""
        try:
            if self._processes.number == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                manifest.mark(self.path(step)).touch()
            saving = ocp.save_checkpointables_async(self.path(step), dict(parts))
        except Exception as error:  # told by `finish`, where every process hears of it
            raised = error

            def failed() -> None:
                raise raised

            return failed
        return saving.result

    def finish(self, step: int, written: Callable[[], None], facts: Mapping[str, Any]) -> None:
        """Wait for what `begin` began and make it count: a checksum of each file, then the
        manifest. OSError where any process could not."""
        each, folder = self._processes, self.path(step)
        files, wrong = {}, ""
        try:
            written()
            files = manifest.checksums(folder, manifest.files(folder)[each.number :: each.count])
        except Exception as error:  # whatever a file system, tensorstore or Orbax has to say
            wrong = _first_line(error)
        told = each.tell("written", {"wrong": wrong, "files": files})
        failures = [one["wrong"] for one in told if one["wrong"]]
        if not failures and each.number == 0:
            try:
                manifest.write(
                    folder,
                    {name: entry for one in told for name, entry in one["files"].items()},
                    facts,
                )
                manifest.mark(folder).unlink(missing_ok=True)
            except OSError as error:
                failures = [_first_line(error)]
        if failures := each.tell("finished", failures)[0]:
            if each.number == 0:
                for path in (folder, *self.folder.glob(f"{step}.orbax-checkpoint-tmp*")):
                    shutil.rmtree(path, ignore_errors=True)
                manifest.mark(folder).unlink(missing_ok=True)
            raise OSError("; ".join(dict.fromkeys(failures)))

    def facts(self, step: int) -> dict[str, Any]:
        """What the manifest says of a step."""
        return manifest.read(self.path(step))[0]

    def holds(self, step: int) -> Mapping[str, Any]:
        """Names of a step's parts -> Orbax's metadata of them."""
        return ocp.checkpointables_metadata(self.path(step)).metadata

    def load(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Parts of a step."""
        return ocp.load_checkpointables(self.path(step), dict(wanted))

    @contextlib.contextmanager
    def verified(self, step: int) -> Iterator[None]:
        """While the step is read inside, its files are held against their checksums, each process
        taking a share. Damage, the same in every process, where a file is not what was written,
        whatever reading it led to."""
        each, found, raised = self._processes, list[str](), None
        reading = threading.Thread(
            target=lambda: found.extend(
                manifest.damages(self.path(step), slice(each.number, None, each.count))
            )
        )
        reading.start()
        try:
            yield
        except Exception as error:  # a damaged file may make any library fail
            raised = error
        reading.join()
        if wrong := [line for one in each.tell("verified", found) for line in one]:
            raise Damage("\n".join(wrong))
        if raised:
            raise raised

    def set_aside(self, step: int, name: str) -> Path:
        """Move a step out of the way, into a folder `name`, where it no longer counts."""
        to = (
            self._move(self.path(step), name) if self._processes.number == 0 else self._aside / name
        )
        self._processes.wait("aside")
        return to

    def _move(self, path: Path, name: str) -> Path:
        to = self._aside / name / f"{time.time_ns()}" / path.name
        to.parent.mkdir(parents=True)
        return path.rename(to)

    def trim(self, chosen: Callable[[list[int]], list[int]]) -> None:
        """Delete those of the finished steps that are chosen; process 0 does."""
        if self._processes.number == 0:
            self.remove(chosen(manifest.steps(self.folder)))

    def remove(self, steps: list[int]) -> None:
        """Delete steps."""
        for step in steps:
            manifest.delete(self.path(step))


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0][:500]) or type(error).__name__
