"""Jobs of bench_gpu.py for an op: every backend against float64 on the device, then its speed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from bench.gpu_blocks import Sizes
from bench.gpu_errors import compare, float64
from bench.gpu_programs import Job, Program, Ran, calls

from maxstack.kernels.backends import Device, Op

Run = Callable[..., Any]
"""The `run` of a backend."""


class Bench(NamedTuple):
    """Settings of a section's measurements."""

    size: str
    device: Device
    peak: float | None
    allowed: Callable[[str, str, str], str | None]
    """(op, backend, name of a check) -> why its speed may not be shown."""
    sizes: Sizes


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op, for any backend to compute."""

    op: Op
    case: Any
    make: Callable[[], tuple[jax.Array, ...]]
    """The inputs, always the same numbers."""
    forward: Callable[[Run], Callable[..., Any]]
    """A backend's run -> the result as a function of the inputs."""
    both: Callable[[Run], Callable[..., dict[str, jax.Array]]]
    """A backend's run -> the result and the gradients, by name, as a function of the inputs."""


def elsewhere(op: Op, device: Device) -> Iterator[Job]:
    """A row for each backend that is for other platforms."""
    for backend in op.backends:
        if device.platform not in backend.platforms:
            reason = f"runs on {' and '.join(backend.platforms)}, and this is a {device.platform}"
            row = {"op": op.name, "case": "every case", "backend": backend.name}
            yield Job("check", row, dict, lambda ran: {}, reason)


def backends_for(op: Op, device: Device) -> list[str]:
    """Names of the backends that are for the device's platform."""
    return [backend.name for backend in op.backends if device.platform in backend.platforms]


def checks(call: Call, name: str, late: bool = False) -> Iterator[Job]:
    """A job for each backend but the reference."""
    expected = functools.cache(lambda: float64(call.both(call.op["reference"].run), call.make()))
    for backend in backends_for(call.op, call.case.device):
        if backend != "reference":
            yield _check(call, name, backend, expected, late)


def _check(call: Call, name: str, backend: str, expected: Callable[[], Any], late: bool) -> Job:
    return Job(
        "check",
        {"op": call.op.name, "case": name, "backend": backend},
        lambda: {"both": Program(call.both(call.op[backend].run), call.make)},
        lambda ran: compare(ran["both"].outputs, expected(), call.case.dtype),
        _refusal(call, backend),
        late,
    )


def _refusal(call: Call, backend: str) -> str | None:
    try:
        return call.op[backend].supports(call.case)
    except ImportError as error:
        return f"failed: {error}"


def speeds(
    bench: Bench,
    section: str,
    call: Call,
    row: dict[str, Any],
    backend: str,
    check: str,
    flops: float,
    figures: Callable[[dict[str, Ran]], dict[str, Any]],
    peer: Run | None = None,
    too_large: str | None = None,
    memory: bool = False,
) -> Iterator[Job]:
    """A job for each size of a backend's blocks.

    `check` is the check that must have passed; `flops` are those of the forward pass; `peer` runs
    in place of a backend; `too_large` is why a peer or the reference is not tried; `memory` asks
    for a program `memory`, of which only the compiler's figures count.
    """
    if peer or backend == "reference":
        refused = too_large
    else:
        refused = _refusal(call, backend) or bench.allowed(call.op.name, backend, check)
    times = calls(flops, bench.peak)
    name = " ".join(map(str, [backend, *row.values()]))

    def job(blocks: dict[str, int] | None, default: bool) -> Job:
        def programs() -> dict[str, Program]:
            options = {"blocks": blocks} if blocks else {}
            run = functools.partial(peer or call.op[backend].run, **options)
            both = call.both(run)
            timed = {
                "forward": Program(call.forward(run), call.make, times),
                "both": Program(both, call.make, max(1, times // 3)),
            }
            untimed = {"memory": Program(both, call.make, runs=False)} if memory else {}
            return timed | untimed

        def finish(ran: dict[str, Ran]) -> dict[str, Any]:
            keys = {"op": call.op.name, "shape_class": dict(call.case.shape_class)}
            outputs = ran["both"].outputs
            return (
                figures(ran) | keys | bench.sizes.differs(default, name, outputs, call.case.dtype)
            )

        full_row = row | {"backend": backend, "blocks": blocks}
        return Job(section, full_row, programs, finish, refused)

    for i, blocks in enumerate(bench.sizes.of(call.op, backend, call.case)):
        yield job(blocks, default=i == 0)
