"""Topologies whose compilers may not be installed."""

import pytest

from maxstack.plan import topology


def needs(name):
    """Skips where the extra that brings the compiler of `name` is missing; the test extra brings all of them on Linux."""
    modules, extra = topology._PLUGINS[topology.parse(name).chip.platform]
    return pytest.mark.skipif(not any(map(topology._importable, modules)), reason=f"the extra {extra} is not installed")
