"""Pools whose processes can be told from all others."""

import os
import uuid

import pytest
from rewards.cases import awaited, marked

from maxstack.rewards.pool import Pool

MARK = "MAXSTACK_TESTS_MARK"


@pytest.fixture
def mark(monkeypatch):
    """In the environment of all processes that the test begins."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    return mark


@pytest.fixture
def pool(mark):
    """Makes pools, which leave no process when they are closed."""
    made = []

    def make(*rewards, workers=1, sandbox=()):
        made.append(Pool(rewards, workers, sandbox))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert awaited(lambda: not marked(mark)), os.popen("ps -ef --forest").read()
