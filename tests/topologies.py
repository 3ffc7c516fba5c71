"""Topologies whose compilers `make test-all` installs."""

import pytest


def needs(name):
    """Marks a test that compiles for a topology that is not here (conftest.py)."""
    return pytest.mark.compiler(name)
