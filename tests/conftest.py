"""Eight virtual CPU devices for the whole session, and the tiny configurations that tests share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # XLA warns of what it had to replicate
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):  # tiny programs: compiling them costs more than running them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
