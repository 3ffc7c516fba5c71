"""One process of bench_gpu.py: makes the jobs of some sections, runs them, and prints a line of
JSON for whatever happens.

example: cd scripts; python -m bench.gpu_worker < specification.json    (the JSON that bench_gpu.py
makes, on standard input)
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench.verdicts import Verdicts

if TYPE_CHECKING:
    from bench.gpu_blocks import Sizes

MARK = "@bench "
"""Start of the lines for bench_gpu.py, since libraries print too."""
MODULES = {
    "attention": "bench.gpu_attention",
    "cross_entropy": "bench.gpu_cross_entropy",
    "linear_cross_entropy": "bench.gpu_cross_entropy",
    "grouped_matmul": "bench.gpu_grouped",
    "ceilings": "bench.gpu_ceilings",
}
"""Module of a section's speeds, or of an op's checks."""


def tell(**event: Any) -> None:
    """Print an event."""
    print(MARK + json.dumps(event), flush=True)


def main() -> None:
    """Run the sections of the specification, without the jobs that are done."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    from bench import gpu_without_pydantic

    given = json.load(sys.stdin)
    gpu_without_pydantic.install()
    from maxstack.hardware import devices

    devices.environment(None)
    import jax
    from bench.gpu_blocks import Sizes

    tell(device=describe(jax.devices()[0]))
    verdicts, sizes, rows = Verdicts(given["rows"]), Sizes(given["tune"], given["tuned"]), []
    for section in given["sections"]:
        begin = time.time()
        order = [*given["shares"]]
        left = sum(given["shares"][name] for name in order[order.index(section) :])
        limit = max(0.0, given["end"] - begin) * given["shares"][section] / left
        for job, figures in _figures(section, given, verdicts, sizes, limit):
            verdicts.add(job.row, figures)
            rows.append({"section": section, **job.row, **figures})
            tell(row=rows[-1], key=job.key)
            if figures["status"] == "failed" and not healthy():
                sys.exit("the device answers no more after this; starting over")
        sizes.keep(rows, jax.devices()[0].device_kind)
        tell(section=section, seconds=round(time.time() - begin, 1))


def _figures(
    section: str, given: dict[str, Any], verdicts: Verdicts, sizes: "Sizes", limit: float
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(job, its figures) of a section's jobs that are not done; no job begins after `limit`
    seconds."""
    from bench import gpu_programs

    done, waiting, end = {*given["done"]}, [], time.time() + limit
    for job in jobs(section, given, verdicts, sizes):
        if job.key in done:
            continue
        if job.refused is None:
            waiting.append(job)
            continue
        status, _, reason = job.refused.partition(": ")
        if status not in ("wrong", "unchecked", "failed"):
            status, reason = "unsupported", job.refused
        yield job, {"status": status, "reason": reason}

    def begin(job: Any, phase: str) -> None:
        tell(begin=job.key, phase=phase, row=job.row)

    waiting.sort(key=lambda job: job.late)
    yield from gpu_programs.run(_until(waiting, end), given["threads"], given["repeats"], begin)
    yield from (
        (job, {"status": "not reached", "reason": f"the section's {limit:.0f} s were over"})
        for job in waiting
    )


def _until(waiting: list[Any], end: float) -> Iterator[Any]:
    """Take jobs from `waiting` while there is time."""
    while waiting and time.time() < end:
        yield waiting.pop(0)


def jobs(section: str, given: dict[str, Any], verdicts: Verdicts, sizes: "Sizes") -> Iterator[Any]:
    """The jobs of a section."""
    import jax
    from bench import gpu_programs

    from maxstack.kernels.backends import Device

    size, device, peak = given["size"], Device.of(jax.devices()[0]), peak_of(jax.devices()[0])
    if section == "check":
        for op in given["ops"]:
            try:
                yield from importlib.import_module(MODULES[op]).checks(size, device)
            except ImportError as error:
                yield gpu_programs.Job(
                    "check",
                    {"op": op, "case": "every case", "backend": "all"},
                    dict,
                    lambda ran: {},
                    f"failed: {error}",
                )
    elif section == "train":
        from bench import gpu_train

        yield from gpu_train.jobs(given, peak, verdicts)
    else:
        from bench.gpu_ops import Bench

        bench = Bench(size, device, peak, verdicts.refusal, sizes)
        yield from importlib.import_module(MODULES[section]).speeds(bench)


def peak_of(device: Any) -> float | None:
    """bfloat16 FLOP/s by the datasheet; None on a CPU and for a chip that is not in chips.yml."""
    from maxstack.hardware import chips

    chip = chips.by_kind(device.device_kind)
    return chip.peak_flops if chip else None


def describe(device: Any) -> dict[str, Any]:
    """Device, versions and flags, on which the results depend."""
    import importlib.metadata

    packages = "jax", "jaxlib", "flax", "optax", "tokamax", "nvidia-cudnn-cu13", "jax-cuda13-plugin"
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "memory": memory,
        "peak_bf16_flops": peak_of(device),
        "python": sys.version.split()[0],
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def healthy() -> bool:
    """True if the device still computes: after an illegal access a CUDA context does not."""
    import jax.numpy as jnp

    try:
        return float(jnp.ones(8).sum()) == 8
    except Exception:
        return False


if __name__ == "__main__":
    main()
