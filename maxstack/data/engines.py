"""Engines: tasks over many processes, of this machine or of a Ray cluster, and the check that these
see the same files.

A task's values travel as they come, so progress can be shown within a task. On one machine each
process has a pipe and gets the next task when it has ended one; a pipe that breaks is a process
that died. On Ray a task is a streaming generator, which runs again elsewhere if its process is
lost, and gives nothing twice. Machines may mount other folders under the same path, so each process
checks once that it sees the sizes of the sources and a note that the main process wrote.
"""

import contextlib
import functools
import os
import secrets
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, TypeVar, cast

from maxstack.config import storage
from maxstack.data.workers import set_worker_signals
from maxstack.errors import ConfigError, DataError, installing, shortened

Task = TypeVar("Task")
Function = Callable[[Any, Task], Iterator[Any]]
_DIED = "Run the same command again: what was finished is kept"
_RETRIES, _SECONDS = 3, 10
"""Times that Ray runs a lost task again, and seconds that its address may take to answer."""


class Engine(ABC):
    """Runs one function for many tasks."""

    @abstractmethod
    def map(
        self, function: Function[Task], context: Any, tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Any]]:
        """Yield (task, value) for each value that `function(context, task)` yields, as they come:
        those of a task in order, those of several in any.

        The function is at a module's top level, and its values are small plain data. A task may
        run again after a failure, and then yields the same values, which are not given twice; what
        it writes must be atomic. `context` is pickled once for each process. A ConfigError or
        DataError of a task is raised here, and ends the others.
        """


class Processes(Engine):
    """Processes of this machine."""

    def __init__(self, workers: int):
        self._workers = workers

    def map(
        self, function: Function[Task], context: Any, tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Any]]:
        # A pipe for each process rather than a queue, whose lock may die with its holder.
        spawn, waiting = get_context("spawn"), iter(tasks)
        pipes = [spawn.Pipe() for _ in range(min(self._workers, len(tasks)))]
        processes = [
            spawn.Process(target=_serve, args=(theirs, function, context), daemon=True)
            for _, theirs in pipes
        ]
        try:
            with ThreadPoolExecutor(len(pipes) or 1) as pool:  # each waits for its process to read
                list(pool.map(lambda process: process.start(), processes))
            for _, theirs in pipes:
                theirs.close()
            running = {ours: task for (ours, _), task in zip(pipes, waiting, strict=False)}
            for ours, task in running.items():
                ours.send(task)
            while running:
                for ours in cast(list[connection.Connection], connection.wait([*running])):
                    kind, value = ours.recv()
                    if kind == "error":
                        raise value
                    if kind == "value":
                        yield running[ours], value
                        continue
                    del running[ours]
                    # The next task goes to whoever is free, since tasks differ in length.
                    for task in waiting:
                        running[ours] = task
                        ours.send(task)
                        break
        except (EOFError, ConnectionError) as error:
            raise ConfigError(
                f"a worker process died, perhaps for lack of memory; try fewer --workers. {_DIED}"
            ) from error
        finally:
            for process in processes:
                if process.pid is not None:
                    # Safe at any moment, since what a task writes is atomic.
                    process.kill()
                    process.join()


class Ray(Engine):
    """Processes of a Ray cluster: the one at `address`, HOST:PORT, or None: one of this machine,
    started for the purpose. A task whose process or node is lost runs again elsewhere.

    Paths without `://` must mean the same files on all its nodes; relative ones start at this
    process's working folder there too.
    """

    def __init__(self, workers: int | None, address: str | None = None):
        self._workers, self._address = workers, address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is None:  # a cluster runs what anyone sends it: this one listens on 127.0.0.1
            # Without this, Ray replaces 127.0.0.1 by the machine's own address.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--engine ray needs the ray package: {installing('ray')}") from error
        self._ray: Any = ray

    def map(
        self, function: Function[Task], context: Any, tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Any]]:
        ray, waiting = self._ray, iter(tasks)
        self._connect()
        # Streaming, since values of a task that ran again are then not given twice.
        run = ray.remote(num_cpus=1, max_retries=_RETRIES, num_returns="streaming")(_run_there)
        # Once, rather than with each task: the context holds the positions of all records.
        shared = ray.put((function, context, os.getcwd()))
        running: dict[Any, Task] = {}
        try:
            while True:
                room = self._most() - len(running)
                for _, task in zip(range(room), waiting, strict=False):
                    running[run.remote(shared, task)] = task
                if not running:
                    return
                for stream in ray.wait([*running], fetch_local=False)[0]:
                    kind, value = ray.get(next(stream))
                    if kind == "error":
                        raise value
                    if kind == "value":
                        yield running[stream], value
                    else:
                        del running[stream]
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"the Ray cluster failed, or lost a task {_RETRIES + 1} times: "
                f"{shortened(str(error), 300)}. {_DIED}"
            ) from error

    def _most(self) -> int:
        """Return how many tasks the cluster gets at once: two for each CPU, so that none waits for
        this process."""
        cpus = self._ray.cluster_resources().get("CPU", 1)
        return self._workers or max(1, 2 * int(cpus))

    def _connect(self) -> None:
        """Join the cluster, until this process ends."""
        if self._ray.is_initialized():
            return
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            settings |= {"num_cpus": self._workers, "include_dashboard": False}
        try:
            if self._address is not None:  # for which Ray waits three minutes and more
                host, _, port = self._address.rpartition(":")
                socket.create_connection((host, int(port)), _SECONDS).close()
            self._ray.init(address=self._address or "local", **settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--address {self._address}: no Ray cluster can be joined: "
                f"{shortened(str(error), 300)}; this machine must be one of its nodes "
                "(ray start --address=HOST:PORT)"
            ) from error


def _run_there(shared: tuple[Function[Task], Any, str], task: Task) -> Iterator[tuple[str, Any]]:
    """Run `_values` in a process of a cluster."""
    function, context, folder = shared
    with contextlib.suppress(OSError):  # relative paths are then missing, and named
        os.chdir(folder)
    yield from _values(function, context, task)


def _values(function: Function[Task], context: Any, task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the values of a task, then its end or error."""
    try:
        for value in function(context, task):
            yield "value", value
        yield "end", None
    except (ConfigError, DataError) as error:
        yield "error", error
    except Exception:  # whose class another process may not know
        yield "error", RuntimeError(traceback.format_exc())


def _serve(own: connection.Connection, function: Function[Task], context: Any) -> None:
    """Run the tasks of a process of this machine."""
    set_worker_signals()
    with contextlib.suppress(EOFError, ConnectionError):  # the main process has ended
        while True:
            for message in _values(function, context, own.recv()):
                own.send(message)


@dataclass(frozen=True)
class SharedFiles:
    """Files to read, and a note in the folder to write to, as the main process sees them; every
    process, which may be on another machine, must see the same."""

    sizes: tuple[tuple[str, int], ...]
    """Path and size of each local file that is read."""
    note: str
    """Path of the note, whose text is unique to this call."""
    text: str


def shared_files(read: Iterable[str], note: str) -> SharedFiles:
    """Write the note, and record the sizes of the local files that are read."""
    # The sizes of sources do not tell whether --out is shared; a text that nobody else has does.
    text = secrets.token_hex(8)
    with storage.replacing(note) as unfinished:
        unfinished.write_text(text)
    local = sorted({path for path in read if not storage.is_url(path)})
    return SharedFiles(tuple((path, os.path.getsize(path)) for path in local), note, text)


@functools.lru_cache(maxsize=4)
def check_shared(files: SharedFiles) -> None:
    """ConfigError if this process sees other files than the main process. Checked once."""
    for path, size in files.sizes:
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            raise ConfigError(
                f"{_where()}: {path}: missing, or of another size than on the main machine; "
                f"{_ADVICE}"
            )
    try:
        text = storage.read_whole(files.note).decode()
    except FileNotFoundError:
        text = ""
    if text != files.text:
        folder = files.note.rpartition("/")[0]
        raise ConfigError(
            f"{_where()}: {folder}: not the folder to which the main machine writes; {_ADVICE}"
        )


_ADVICE = (
    "sources and --out must be the same files on every node: put them in a folder that all nodes "
    "mount, or give URLs"
)


def _where() -> str:
    return f"a worker on {socket.gethostname()} in {os.getcwd()}"
