"""XLA's flags for tests: tiny programs cost more to compile than to run."""

from importlib.metadata import version

EMITTERS = {"xla_cpu_use_fusion_emitters": "false"} if version("jaxlib").startswith("0.10.") else {}
"""A third less to compile; later versions have no such flag."""


def flags(**values: str) -> str:
    """For XLA_FLAGS."""
    return " ".join(f"--{name}={value}" for name, value in (values | EMITTERS).items())
