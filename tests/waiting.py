"""Tests that take long are named while they run. A plugin of pytest."""

import threading
import time

TOLD = 60.0
"""Seconds after which a test is named, and named again."""
LOOKS = 5.0
"""Seconds between looks at what runs."""


class Waiting:
    """The plugin, in the process that shares out the tests."""

    def __init__(self):
        self._began, self._told = {}, {}
        self._ended = threading.Event()

    def pytest_runtest_logstart(self, nodeid):
        self._began[nodeid] = self._told[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self._began.pop(nodeid, None)

    def pytest_sessionstart(self, session):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        threading.Thread(target=self._tell, args=(reporter,), daemon=True).start()

    def pytest_sessionfinish(self):
        self._ended.set()

    def _tell(self, reporter):
        while not self._ended.wait(LOOKS):
            now = time.monotonic()
            for nodeid, began in [*self._began.items()]:
                if now - self._told[nodeid] >= TOLD:
                    self._told[nodeid] = now
                    reporter.ensure_newline()
                    reporter.write_line(f"running for {now - began:.0f} s: {nodeid}")
