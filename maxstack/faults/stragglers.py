"""The process that holds up the others, by name. All take equally long for a step, so what is
compared is what each does for itself.

Devices: each works alone, at the same time as all others, on the same small problem. Hosts: how
long a process's own devices had nothing to do because their next step was not yet dispatched. A
slow network between processes is not seen.
"""

import bisect
import math
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxstack.cluster.peers import Processes

PROBE = 0.05
"""Seconds that the problem takes; long enough to average over turns of a scheduler or a throttled
clock."""
TRIES = 3
"""Of which a device's fastest counts, where it was slow in the one before."""
CPU_SIZE, SIZE = 256, 1024
"""Rows of the matrices."""


class Lag(NamedTuple):
    """Sums over some steps of one process."""

    steps: int
    seconds: float
    late: float
    """Seconds in which its devices had finished the step before, and the next was not
    dispatched."""
    starved: float
    """Those of them in which it waited for a batch."""


class Speed(NamedTuple):
    """What one process tells the others."""

    host: str
    devices: dict[str, float]
    """Device -> seconds for the problem."""
    step: float
    """Seconds a step, as are `late` and `starved`."""
    late: float
    starved: float


class Report(NamedTuple):
    """What one comparison found."""

    lines: list[str]
    """For the log: one for each process and each reason."""
    numbers: dict[str, float]
    """For the metrics: device_skew, the slowest device's time over the median of the others;
    host_skew, the largest share of a step in which the others waited for one process."""


class Stragglers:
    """Compares the processes' speeds; a call of one in all processes at the same step. `slow`: how
    many times what the others need is slow.

    A process is named where two comparisons in a row find it, because other programs on its machine
    can disturb a single one: a process that becomes slow is named within 2 * `every` steps.
    """

    def __init__(self, slow: float, every: int, processes: Processes):
        self._slow, self._every, self._processes = slow, every, processes
        self._suspected: set[tuple[int, str]] = set()
        local = jax.local_devices()
        cpu = (
            local[0].platform == "cpu"
        )  # its devices share the cores, so one of them speaks for all
        self._devices = local[:1] if cpu else local
        self._several = processes.count > 1 or len(self._devices) > 1
        if self._several:
            size = CPU_SIZE if cpu else SIZE
            self._inputs = [
                jax.device_put(
                    jnp.full((size, size), 0.5, jnp.float32 if cpu else jnp.bfloat16), device
                )
                for device in self._devices
            ]
            self._waiting = ThreadPoolExecutor(len(self._devices), "probe")
            self._rounds = self._calibrated()

    def due(self, step: int) -> bool:
        """Whether to compare after `step`; never where there is nobody to compare with."""
        return self._several and step % self._every == 0

    def check(self, step: int, lag: Lag) -> Report:
        """Work on the problem, tell the others, and compare; `lag`: of the steps since the last
        time. The devices have nothing else to do."""
        steps, best = max(lag.steps, 1), [math.inf] * len(self._devices)
        for _ in range(TRIES):
            self._processes.wait("stragglers")
            best = [min(pair) for pair in zip(best, self._probe(self._rounds), strict=True)]
            own = Speed(
                socket.gethostname(),
                {str(d.id): s for d, s in zip(self._devices, best, strict=True)},
                lag.seconds / steps,
                lag.late / steps,
                lag.starved / steps,
            )
            speeds = [Speed(*told) for told in self._processes.tell("stragglers", own)]
            if not slow_devices(speeds, self._slow):
                break
        return self.judge(step, speeds)

    def judge(self, step: int, speeds: Sequence[Speed]) -> Report:
        """What the numbers of all processes say, in their order, and those of the last time."""
        devices, hosts = slow_devices(speeds, self._slow), slow_hosts(speeds, self._slow)
        found = devices | hosts
        lines = [
            f"step {step}: process {process} ({speeds[process].host}) is slow: "
            f"{found[process, what]}"
            for process, what in sorted(found)
            if (process, what) in self._suspected
        ]
        self._suspected = {*found}
        times = [seconds for speed in speeds for seconds in speed.devices.values()]
        numbers = {"device_skew": max(_over_others(times))} if len(times) > 1 else {}
        return Report(
            lines, numbers | ({"host_skew": max(_held_up(speeds))} if len(speeds) > 1 else {})
        )

    def _calibrated(self) -> int:
        """How often the problem is repeated: the first process finds out, and all do as it does."""
        self._probe(1)
        rounds = 1
        if self._processes.number == 0:
            while (seconds := min(max(self._probe(rounds)) for _ in range(5))) < PROBE / 4:
                rounds *= 2
            rounds = max(1, round(rounds * PROBE / seconds))
        return self._processes.tell("stragglers", rounds)[0]

    def _probe(self, rounds: int) -> list[float]:
        """Seconds of each device, all at work at once."""
        begin = time.perf_counter()
        made = [_work(x, rounds) for x in self._inputs]

        def finished(result: jax.Array) -> float:
            result.block_until_ready()
            return time.perf_counter() - begin

        return list(self._waiting.map(finished, made))


def slow_devices(speeds: Sequence[Speed], slow: float) -> dict[tuple[int, str], str]:
    """(process, "devices") -> what to say of it, where one of its devices took `slow` times the
    median of all others."""
    each = [
        (process, name, seconds)
        for process, speed in enumerate(speeds)
        for name, seconds in speed.devices.items()
    ]
    ratios = _over_others([seconds for *_, seconds in each])
    found: dict[tuple[int, str], str] = {}
    for process, speed in enumerate(speeds):
        mine = [
            (ratio, name, seconds)
            for (of, name, seconds), ratio in zip(each, ratios, strict=True)
            if of == process and ratio > slow
        ]
        if mine:
            ratio, _, seconds = max(mine)
            which = (
                "its devices need"
                if len(mine) == len(speed.devices)
                else f"its device {', '.join(name for _, name, _ in mine)} needs"
            )
            found[process, "devices"] = (
                f"{which} {seconds * 1e3:.0f} ms for what the others do in "
                f"{seconds / ratio * 1e3:.0f} ms, "
                f"{ratio:.1f} times as long (their median)"
            )
    return found


def slow_hosts(speeds: Sequence[Speed], slow: float) -> dict[tuple[int, str], str]:
    """(process, "host") -> what to say of it, where steps take `slow` times what they would if its
    devices waited for their host no longer than the median of the others."""
    found: dict[tuple[int, str], str] = {}
    others = _medians([speed.late for speed in speeds])
    for process, (speed, held_up, other) in enumerate(
        zip(speeds, _held_up(speeds), others, strict=True)
    ):
        if held_up > 1.0 - 1.0 / slow:
            what = "its batches" if speed.starved > speed.late / 2 else "its Python thread"
            found[process, "host"] = (
                f"all wait for {what}; its devices have nothing to do for "
                f"{speed.late:.3g} s of a step's "
                f"{speed.step:.3g} s, the others' for {other:.3g} s (their median)"
            )
    return found


def _held_up(speeds: Sequence[Speed]) -> list[float]:
    """For each process, the share of a step in which its devices waited for their host longer than
    the others did."""
    others = _medians([speed.late for speed in speeds])
    return [
        max(0.0, speed.late - other) / speed.step if speed.step else 0.0
        for speed, other in zip(speeds, others, strict=True)
    ]


def _over_others(values: Sequence[float]) -> list[float]:
    """Each value over the median of the others."""
    return [value / other for value, other in zip(values, _medians(values), strict=True)]


def _medians(values: Sequence[float]) -> list[float]:
    """For each value the median of all others; of a single one, itself."""
    if len(values) < 2:
        return [*values]
    ordered, found = sorted(values), []
    for value in values:
        out = bisect.bisect_left(ordered, value)
        found.append(
            statistics.mean(
                ordered[i + (i >= out)] for i in ((len(values) - 2) // 2, (len(values) - 1) // 2)
            )
        )
    return found


@jax.jit
def _work(x: jax.Array, rounds: Any) -> jax.Array:
    """Matrices multiplied, one after the other; the values stay finite."""
    return jax.lax.fori_loop(0, rounds, lambda i, y: jnp.tanh(x @ y), x)
