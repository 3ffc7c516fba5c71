"""A pytest plugin that prints, after each run, the test files that take the most processor time,
with the processes that they start; and writes their durations to $MAXSTACK_TESTS_DURATIONS."""

import collections
import json
import multiprocessing.forkserver
import os
from pathlib import Path

import pytest

DURATIONS = "MAXSTACK_TESTS_DURATIONS"
SHOWN = 10


def _processor() -> float:
    """Return the seconds of this process and of its children that have ended. The fork server and
    its children are not among these, so their time is read from /proc."""
    times = os.times()
    spent = times.user + times.system + times.children_user + times.children_system
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return spent
    return spent + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """The plugin: a worker of xdist measures, the main process adds up."""

    def __init__(self, is_worker):
        self._is_worker = is_worker
        self._last = 0.0
        self._files = collections.defaultdict(collections.Counter)

    def pytest_configure(self):
        path = os.environ.get(DURATIONS)
        if path and not self._is_worker and not Path(path).absolute().parent.is_dir():
            raise pytest.UsageError(f"{DURATIONS}={path}: there is no such folder")

    def pytest_collection_finish(self):
        self._last = _processor()  # imports and collection belong to no file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = _processor()
        report.user_properties = [*report.user_properties, ("processor", now - self._last)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report):
        processor = dict(report.user_properties).get("processor")
        if processor is not None:
            file = self._files[report.nodeid.partition("::")[0]]
            file.update(processor=processor, seconds=report.duration)

    def pytest_terminal_summary(self, terminalreporter):
        if not self._files:
            return
        whole = sum(self._files.values(), collections.Counter())
        dearest = sorted(self._files, key=lambda file: -self._files[file]["processor"])
        terminalreporter.section("processor seconds")
        for name, spent in [*((f, self._files[f]) for f in dearest[:SHOWN]), ("all tests", whole)]:
            terminalreporter.line(f"{spent['processor']:7.0f}  {name}")
        if path := os.environ.get(DURATIONS):
            file = Path(path)
            seconds = json.loads(file.read_text()) if file.exists() else {}
            seconds |= {name: round(spent["seconds"], 1) for name, spent in self._files.items()}
            ordered = dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
            file.write_text(json.dumps(ordered, indent=0) + "\n")
