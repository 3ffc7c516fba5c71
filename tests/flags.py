"""XLA's flags for tests: tiny programs cost more to compile than to run."""

from importlib.metadata import version

CHEAP = {"xla_cpu_parallel_codegen_split_count": "1"}
"""A fourteenth less to compile."""
if version("jaxlib").startswith("0.10."):
    CHEAP["xla_cpu_use_fusion_emitters"] = "false"  # a third less; later versions have no such flag
PATIENT = {"xla_cpu_collective_call_terminate_timeout_seconds": "300"}
"""XLA ends a process where a device waits longer for the others, by default 40 s, which it may on a
machine with other work."""


def flags(**values: str) -> str:
    """For XLA_FLAGS."""
    return " ".join(f"--{name}={value}" for name, value in (values | CHEAP | PATIENT).items())
