"""Finds and names the process that holds up the others.

All processes take equally long for a step, since they wait for each other in its collectives, so
work is compared that each does alone. Of devices it is a small problem that all solve at the same
time; of hosts, how long their devices had nothing to do because the next step was not dispatched
yet. A process is named where it is slow in two comparisons in a row, since other programs on its
machine can disturb a single one. A slow network between processes is not seen."""

import math
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.cluster.peers import Peers

PROBE = 0.05
"""Seconds that the problem takes, long enough to average over scheduling and a throttled clock."""
TRIES = 3
"""Attempts at the problem where a device is slow; its fastest counts."""
CPU_SIZE, SIZE = 256, 1024
"""Rows of the problem's matrices."""


class Lag(NamedTuple):
    """Sums over several steps of one process."""

    steps: int
    seconds: float
    late: float
    """Seconds in which its devices had finished a step, and the next was not dispatched."""
    starved: float
    """Those in which it waited for a batch."""


class Speed(NamedTuple):
    """The times of one process."""

    host: str
    devices: dict[str, float]
    """Device -> seconds for the problem."""
    step: float
    """Seconds per step, like `late` and `starved`."""
    late: float
    starved: float


class Report(NamedTuple):
    """The result of one comparison."""

    lines: list[str]
    """Lines for the log, one for each process and reason."""
    numbers: dict[str, float]
    """Metrics: device_skew, the slowest device's time over the median of the others; host_skew, the
    largest share of a step in which the others waited for one process."""


class Stragglers:
    """Compares the processes' speeds, in all of them at the same step. A process counts as slow
    from `slow` times the others' time on, and is named within 2 * `every` steps."""

    def __init__(self, slow: float, every: int, peers: Peers):
        self._slow, self._every = slow, every
        self._peers = peers
        self._suspected: set[tuple[int, str]] = set()
        local = jax.local_devices()
        cpu = local[0].platform == "cpu"
        # Devices of a CPU share its cores, so the time of one is the time of all.
        self._devices = local[:1] if cpu else local
        self._several = peers.count > 1 or len(self._devices) > 1
        if self._several:
            size, dtype = (CPU_SIZE, jnp.float32) if cpu else (SIZE, jnp.bfloat16)
            matrix = jnp.full((size, size), 0.5, dtype)
            self._inputs = [jax.device_put(matrix, device) for device in self._devices]
            # A thread waits for each device: waiting in turn would give later devices the earlier
            # ones' time.
            self._waiting = ThreadPoolExecutor(len(self._devices), "probe")
            self._rounds = self._calibrate()

    def due(self, step: int) -> bool:
        """Return whether to compare after `step`; never with a single device."""
        return self._several and step % self._every == 0

    def compare_speeds(self, step: int, lag: Lag) -> Report:
        """Work on the problem, exchange the times, and compare; `lag`: of the steps since the last
        check. The devices must be idle."""
        steps = max(lag.steps, 1)
        best = [math.inf] * len(self._devices)
        for _ in range(TRIES):
            self._peers.barrier("stragglers")
            # The least of the tries: other programs only ever add time.
            best = [min(pair) for pair in zip(best, self._probe(self._rounds), strict=True)]
            own = Speed(
                socket.gethostname(),
                {str(d.id): s for d, s in zip(self._devices, best, strict=True)},
                lag.seconds / steps,
                lag.late / steps,
                lag.starved / steps,
            )
            speeds = [Speed(*each) for each in self._peers.exchange("stragglers", own)]
            if not find_slow_devices(speeds, self._slow):
                break
        return self.judge(step, speeds)

    def judge(self, step: int, speeds: Sequence[Speed]) -> Report:
        """Compare the speeds of all processes, in their order; name those that the last comparison
        suspected too."""
        # One comparison named an undisturbed process in 1 of 200 checks, two in a row in none.
        reasons = find_slow_devices(speeds, self._slow) | find_slow_hosts(speeds, self._slow)
        lines = [
            f"step {step}: process {process} ({speeds[process].host}) is slow: {reason}"
            for (process, what), reason in sorted(reasons.items())
            if (process, what) in self._suspected
        ]
        self._suspected = {*reasons}
        times = [seconds for speed in speeds for seconds in speed.devices.values()]
        numbers = {}
        if len(times) > 1:
            numbers["device_skew"] = max(_over_others(times))
        if len(speeds) > 1:
            numbers["host_skew"] = max(_held_up(speeds))
        return Report(lines, numbers)

    def _calibrate(self) -> int:
        """Return how often all repeat the problem, by the speed of process 0."""
        # Compiles.
        self._probe(1)
        rounds = 1
        if self._peers.number == 0:
            # Doubled until it can be timed, then scaled to PROBE: a device's speed is not known
            # beforehand.
            while (seconds := min(max(self._probe(rounds)) for _ in range(5))) < PROBE / 4:
                rounds *= 2
            rounds = max(1, round(rounds * PROBE / seconds))
        # That of process 0: with a number of its own each would do other work.
        return self._peers.exchange("stragglers", rounds)[0]

    def _probe(self, rounds: int) -> list[float]:
        """Return the seconds of each device, all working at once."""
        begin = time.perf_counter()
        results = [_work(x, rounds) for x in self._inputs]

        def finished(result: jax.Array) -> float:
            result.block_until_ready()
            return time.perf_counter() - begin

        return list(self._waiting.map(finished, results))


def find_slow_devices(speeds: Sequence[Speed], slow: float) -> dict[tuple[int, str], str]:
    """Map (process, "devices") to a reason where one of its devices took `slow` times the median of
    all others."""
    devices = [(process, name) for process, speed in enumerate(speeds) for name in speed.devices]
    times = [seconds for speed in speeds for seconds in speed.devices.values()]
    ratios = dict(zip(devices, _over_others(times), strict=True))
    reasons: dict[tuple[int, str], str] = {}
    for process, speed in enumerate(speeds):
        slow_ones = [
            (ratio, name, seconds)
            for name, seconds in speed.devices.items()
            if (ratio := ratios[process, name]) > slow
        ]
        if slow_ones:
            ratio, _, seconds = max(slow_ones)
            which = f"its device {', '.join(name for _, name, _ in slow_ones)} needs"
            if len(slow_ones) == len(speed.devices):
                which = "its devices need"
            reasons[process, "devices"] = (
                f"{which} {seconds * 1e3:.0f} ms for what the others do in "
                f"{seconds / ratio * 1e3:.0f} ms, {ratio:.1f} times as long (their median)"
            )
    return reasons


def find_slow_hosts(speeds: Sequence[Speed], slow: float) -> dict[tuple[int, str], str]:
    """Map (process, "host") to a reason where steps take `slow` times what they would if its
    devices waited for their host no longer than the median of the others."""
    reasons: dict[tuple[int, str], str] = {}
    others = _medians([speed.late for speed in speeds])
    for process, (speed, held_up, other) in enumerate(
        zip(speeds, _held_up(speeds), others, strict=True)
    ):
        # A step that is `slow` times as long as it would be waits this share of itself.
        if held_up > 1.0 - 1.0 / slow:
            what = "its batches" if speed.starved > speed.late / 2 else "its Python thread"
            reasons[process, "host"] = (
                f"all wait for {what}; its devices have nothing to do for {speed.late:.3g} s of a "
                f"step's {speed.step:.3g} s, the others' for {other:.3g} s (their median)"
            )
    return reasons


def _held_up(speeds: Sequence[Speed]) -> list[float]:
    """Return the share of a step in which each process's devices waited for their host longer than
    the others."""
    others = _medians([speed.late for speed in speeds])
    return [
        max(0.0, speed.late - other) / speed.step if speed.step else 0.0
        for speed, other in zip(speeds, others, strict=True)
    ]


def _over_others(values: Sequence[float]) -> list[float]:
    """Divide each value by the median of the others."""
    return [value / other for value, other in zip(values, _medians(values), strict=True)]


def _medians(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all others; for a single value itself. By one sort, since
    there may be thousands of devices."""
    if len(values) < 2:
        return [*values]
    ordered = np.sort(values)
    own = np.searchsorted(ordered, values)
    middle = ((len(values) - 2) // 2, (len(values) - 1) // 2)
    # Without a value itself, those from its place on move down by one.
    return np.mean([ordered[np.where(i >= own, i + 1, i)] for i in middle], axis=0).tolist()


@jax.jit
def _work(x: jax.Array, rounds: Any) -> jax.Array:
    """Multiply matrices one after the other; tanh keeps the values finite."""
    return jax.lax.fori_loop(0, rounds, lambda i, y: jnp.tanh(x @ y), x)
