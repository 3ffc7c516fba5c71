"""What the suite costs: processor seconds of each file's tests and of every process that they
start, and what jax compiles in the workers and in their forks. A plugin of pytest, which prints the
files that cost most after each run."""

import collections
import json
import multiprocessing.forkserver
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compile",  # compiled, or read from the cache
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}
READ = "/jax/compilation_cache/cache_hits"
FORKS = "MAXSTACK_TESTS_FORKS"
"""The folder in which forked processes write what they compiled, a file for each worker."""
DURATIONS = "MAXSTACK_TESTS_DURATIONS"
SHOWN = 10


class Compiled(collections.Counter):
    """Programs that jax compiled in this process, and seconds."""

    def listen(self):
        """Count from now on. Imports jax."""
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._occurrence)

    def _duration(self, event, seconds, **_):
        if name := EVENTS.get(event):
            self[name] += seconds
            self["programs"] += name == "compile"

    def _occurrence(self, event, **_):
        self["read"] += event == READ


def count_in_fork():
    """Count what this forked process compiles; the function that writes it at its end."""
    path = _forks()
    compiled = Compiled()
    compiled.listen()

    def write():
        if path and compiled:
            with path.open("a") as file:
                file.write(json.dumps(compiled) + "\n")

    return write


def _forks():
    """The file of this worker's forks."""
    folder = os.environ.get(FORKS)
    return Path(folder) / os.environ.get("PYTEST_XDIST_WORKER", "main") if folder else None


def _processor():
    """Seconds of this process, of its children that have ended, and of the server of forks with
    its own, which are not this process's children."""
    times = os.times()
    spent = times.user + times.system + times.children_user + times.children_system
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return spent
    return spent + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Price:
    """The plugin: a worker measures, the process that shares out the tests adds up."""

    def __init__(self, is_worker):
        self._is_worker = is_worker
        self._compiled, self._listening = Compiled(), False
        self._last, self._forks_read = 0.0, 0
        self._files = collections.defaultdict(collections.Counter)

    def pytest_configure(self):
        if not self._is_worker:
            if (path := os.environ.get(DURATIONS)) and not Path(path).absolute().parent.is_dir():
                raise pytest.UsageError(f"{DURATIONS}={path}: there is no such folder")
            os.environ[FORKS] = tempfile.mkdtemp(prefix="maxstack-forks-")

    def pytest_unconfigure(self):
        if not self._is_worker:
            shutil.rmtree(os.environ.pop(FORKS), ignore_errors=True)

    def pytest_collection_finish(self):
        self._since_last()  # imports and collection are no file's own

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.user_properties = [*report.user_properties, ("price", self._since_last())]
        return report

    def pytest_runtest_logreport(self, report):
        price = dict(report.user_properties).get("price")
        if price is not None:
            file = self._files[report.nodeid.partition("::")[0]]
            file.update(price | {"seconds": report.duration})

    def pytest_terminal_summary(self, terminalreporter):
        if not self._files:
            return
        whole = sum(self._files.values(), collections.Counter())
        dearest = sorted(self._files, key=lambda file: -self._files[file]["processor"])
        terminalreporter.section("processor seconds")
        for name, price in [*((f, self._files[f]) for f in dearest[:SHOWN]), ("all tests", whole)]:
            terminalreporter.line(
                f"{price['processor']:7.0f}  {name} ({price['programs']} programs, of which "
                f"{price['read']} read from the cache; seconds to trace {price['trace']:.0f}, "
                f"lower {price['lower']:.0f}, compile {price['compile']:.0f})"
            )
        if path := os.environ.get(DURATIONS):
            file = Path(path)
            seconds = json.loads(file.read_text()) if file.exists() else {}
            seconds |= {name: round(price["seconds"], 1) for name, price in self._files.items()}
            ordered = dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
            file.write_text(json.dumps(ordered, indent=0) + "\n")

    def _since_last(self):
        if not self._listening and "jax" in sys.modules:
            self._compiled.listen()
            self._listening = True
        spent = _processor()
        price = collections.Counter(processor=spent - self._last) + self._compiled
        self._last = spent
        self._compiled.clear()
        if (path := _forks()) and path.exists():
            lines = path.read_text().splitlines()
            for line in lines[self._forks_read :]:
                price.update(json.loads(line))
            self._forks_read = len(lines)
        return dict(price)
