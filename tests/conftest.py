"""Eight virtual CPU devices, one folder of compiled programs, and the order of tests."""

import ctypes
import gc
import json
import math
import os
import sys
import warnings
from pathlib import Path

import processor_time
import programs
import pytest
import waiting
from flags import flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # XLA warns of what it had to replicate
XLA_FLAGS = [
    *flags(
        xla_backend_optimization_level="0",
        xla_force_host_platform_device_count="8",
        xla_cpu_enable_concurrency_optimized_scheduler="false",
    ).split(),
    *os.environ.get("XLA_FLAGS", "").split(),
]
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(XLA_FLAGS))  # workers inherit them

gc.set_threshold(200_000, 20, 100)  # as in training: tracing makes many objects, and few cycles
COMPILED = "MAXSTACK_TESTS_COMPILED"
ALONE = {
    "tests/drills/test_drills.py::test_drill",
    "tests/models/test_parity.py::test_logits_and_gradients_are_those_of_transformers",
    "tests/test_documents.py::test_a_page_works_from_top_to_bottom",
}
"""Tests that share nothing with their file, and may run on another worker than the rest of it."""
FIRST = "tests/test_types.py"
FRESH = (
    "tests/hardware/",
    "tests/package/",
    "tests/plan/",
    "tests/profile/",
    "tests/test_run.py",
)
"""Tests that ask the compiler something, or save what it made: a program that was read from a
folder says nothing and cannot be saved again."""
MAPPED = 25_000
"""Mappings of memory, of which Linux allows a process 65,530; each compiled program takes some, and
XLA aborts where it gets no more."""
RESIDENT = 3 << 30
"""Bytes of memory."""


def pytest_configure(config):
    """Name the folder of compiled programs, once for all workers of xdist."""
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(processor_time.ProcessorTime(is_worker))
    if not is_worker:
        for given in config.args:  # of which xdist's workers say nothing
            if not Path(given.partition("::")[0]).exists():
                raise pytest.UsageError(f"no such file or folder: {given}")
        config.pluginmanager.register(waiting.Waiting())
        os.environ[COMPILED] = str(programs.FOLDER)
        os.environ["XDG_STATE_HOME"] = str(programs.FOLDER.parent / "state")  # whose runs are whose


def pytest_collection_modifyitems(items):
    """The longest files first, after the one test that takes a minute of one processor."""
    seconds = json.loads((Path(__file__).parent / "durations.json").read_text())
    seconds[FIRST] = math.inf
    items.sort(key=lambda item: -seconds.get(_file(item), 0.0))
    for item in items:
        if (needed := item.get_closest_marker("compiler")) and (missing := _missing(*needed.args)):
            item.add_marker(pytest.mark.skip(reason=f"the extra {missing} is not installed"))


def pytest_terminal_summary(terminalreporter):
    """What came of each combination that test_combinations.py tried, in whichever worker."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == "combination"
    ]
    for i, line in enumerate(sorted(found)):
        if not i:
            terminalreporter.section("combinations")
        terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file on one worker, because they compile the same programs, but for those
    that share nothing. (xdist 3.8's own groups are lost without a word under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid if nodeid.partition("[")[0] in ALONE else nodeid.partition("::")[0]

    return ByFile(config, log)


def _file(item):
    return item.nodeid.partition("::")[0]


def _missing(name):
    """The extra that brings the compiler of a topology, where it is not installed."""
    from maxstack.plan import topology

    modules, extra = topology._PLUGINS[topology.parse(name).chip.platform]
    return "" if any(map(topology._importable, modules)) else extra


def pytest_unconfigure(config):
    """Remove what killed processes have left half-written there."""
    if not hasattr(config, "workerinput"):
        programs.clear()


@pytest.fixture
def maxstack(capsys):
    """Calls a command, a line and further words, which must end with `code` -> what it printed;
    where it fails, with its error."""
    from maxstack import cli

    def call(line, *words, code=0):
        assert cli.main([*line.split(), *map(str, words)]) == code
        printed = capsys.readouterr()
        return printed.out + printed.err if code else printed.out

    return call


@pytest.fixture(autouse=True)
def _programs(request):
    """Read compiled programs from their folder, whatever a command in this process has set before,
    but for the tests of FRESH."""
    _read_programs(request.node.nodeid)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_fixtures(request):
    """The same for what a module makes once for its tests."""
    _read_programs(request.node.nodeid)


def _read_programs(nodeid):
    programs.read_from(None if nodeid.startswith(FRESH) else os.environ[COMPILED])


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    """Forget compiled programs after a module, where they have become many, or large: three workers
    share a machine's memory."""
    yield
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if maps.read_bytes().count(b"\n") > MAPPED or resident > RESIDENT:
        import jax

        if tiny := sys.modules.get("tiny"):
            tiny._RUNS.clear()
        jax.clear_caches()
        # A test that makes errors of warnings is not to blame for what others left open.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
