"""Temporaries of a program on one CPU device: the system gives their pages once."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import jax
import jax.numpy as jnp
from maxstack.hardware import memory

memory.run_in_this_thread()
squares = jax.jit(lambda x: (x[None] * x[:, None]) @ jnp.ones((len(x), 8)))
x = jnp.arange(4096.0)
squares(x).block_until_ready()
memory.keep_freed(64 << 20)
for _ in range(12):
    squares(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    squares(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("tunables", "kept"), [("glibc.malloc.hugetlb=0", False), (None, True)], ids=str
)
def test_pages_are_kept_between_steps_unless_the_environment_chooses(tunables, kept):
    """64 MiB of temporaries, which glibc always takes from the system, are 16,384 pages a call."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"GLIBC_TUNABLES": tunables} if tunables else {})
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(made.stdout) < 1000) == kept
