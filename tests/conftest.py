"""Eight virtual CPU devices for the whole session, and compiled programs let go before there are too many."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # XLA warns of what it had to replicate
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):  # tiny programs: compiling them costs more than running them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

MAPPED = 25_000
"""Mappings of memory, of which Linux allows a process 65,530; each compiled program takes some, and XLA aborts where it gets no more."""


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    """Forget compiled programs after a module, where they have become many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPED:
        import jax

        jax.clear_caches()
