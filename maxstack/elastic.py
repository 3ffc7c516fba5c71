"""Elastic runs: one process drives several slices, and when some are lost it continues without
them, on a smaller mesh, from the newest checkpoint, with the same batches.

An error of jax does not tell whether a slice was lost, so each slice is asked for a small sum, and
those that do not answer in ANSWER seconds count as lost. The whole run is then begun anew in the
same process, on as many of the others as everything divides over; global batches stay as they were,
as lanes do not depend on devices. Several processes are restarted by their launcher instead.
"""

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.cluster.exit_codes import RETRY
from maxstack.errors import ConfigError
from maxstack.hardware.devices import slice_of

if TYPE_CHECKING:
    from maxstack.schema.config import Config

LOSS = "DATA_LOSS", "DEADLINE_EXCEEDED", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"
"""Prefixes of jax's errors that a lost slice may cause; a sum on its devices tells whether it
was."""
ANSWER = 60.0
"""Seconds that a slice has to compute something small."""


class TooFew(ValueError):
    """Not enough slices are left; they may come back."""

    exit_code = RETRY


def train(cfg: "Config", once: Callable[["Config", Sequence[Any] | None], int]) -> int:
    """Run `once(configuration, devices or None for all)`, and again on the remaining slices
    whenever some are lost. Other errors are raised, as is a loss of more slices, or more often,
    than faults.elastic allows."""
    elastic, lost = cfg.faults.elastic, frozenset[int]()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for attempt in range(elastic.attempts + 1 if elastic else 1):
        try:
            return once(*restrict(cfg, lost))
        except Exception as error:
            # A text, not the error: its traceback's frames hold the lost attempt's state on the
            # devices, and the next attempt has to fit beside it.
            loss = None if elastic is None or attempt == elastic.attempts else find_loss(error)
            if loss is None:
                raise
        assert elastic
        for number, handler in handlers.items():  # the attempt that set others has ended
            signal.signal(number, handler)
        clear()
        lost = find_lost(devices_by_slice(cfg.mesh.slices))  # some may be back
        print(
            f"elastic: {loss}; lost of {cfg.mesh.slices} slices: "
            f"{', '.join(map(str, sorted(lost))) or 'none'}; "
            f"attempt {attempt + 1} of at most {elastic.attempts} to continue",
            file=sys.stderr,
        )
    raise AssertionError("the last attempt returns or raises")


def clear() -> None:
    """Free what the ended attempt leaves behind: its watchdog, a trace being recorded, programs,
    and the state that only they held."""
    import jax

    from maxstack.faults.heartbeat import retire

    retire()
    with contextlib.suppress(RuntimeError):  # no trace is being recorded
        # A trace that the lost attempt was recording makes jax refuse the next one's.
        jax.profiler.stop_trace()
    jax.clear_caches()
    # jax keeps frames of a program's first call in a circle.
    gc.collect()


def restrict(cfg: "Config", lost: frozenset[int]) -> tuple["Config", Sequence[Any] | None]:
    """The configuration on the largest number of remaining slices that everything divides over, and
    their devices. TooFew where there are not enough."""
    if not lost:
        return cfg, None
    from maxstack.schema import rules

    assert cfg.faults.elastic
    left = [
        devices
        for number, devices in devices_by_slice(cfg.mesh.slices).items()
        if number not in lost
    ]
    least = cfg.faults.elastic.least
    # Fewer than are left, where a batch or a layer does not divide over all of them.
    for count in range(len(left), least - 1, -1):
        smaller = cfg.model_copy(update={"mesh": cfg.mesh.model_copy(update={"slices": count})})
        devices = [device for each in left[:count] for device in each]
        with contextlib.suppress(ConfigError):
            rules.sizes_on(smaller, len(devices), f"{count} slices")
            return smaller, devices
    raise TooFew(
        f"faults.elastic: {len(left)} of {cfg.mesh.slices} slices are left, and no "
        f"number of them from faults.elastic.least={least} on "
        "serves this run; start it again when the others are back"
    )


def devices_by_slice(count: int) -> dict[int, list[Any]]:
    """Number -> devices, by the devices' own slice numbers; without them, equal parts in order."""
    import jax

    devices = jax.devices()
    numbers = [slice_of(device) for device in devices]
    # Devices of a CPU, or of one slice, have no slice numbers that tell them apart.
    if len({*numbers}) != count:
        numbers = [i // (len(devices) // count) for i in range(len(devices))]
    parts: dict[int, list[Any]] = {}
    for number, device in zip(numbers, devices, strict=True):
        parts.setdefault(number, []).append(device)
    return parts


def find_loss(error: BaseException | None) -> str | None:
    """Text of a jax error that a lost slice may have caused, in an error or in those that it was
    raised from, as where a save then failed too. It returns text because the error's frames hold
    the state on the devices."""
    import jax

    # The chain is followed: the first error may be followed by that of a save, which fails too.
    while error and not (
        isinstance(error, jax.errors.JaxRuntimeError) and str(error).lstrip().startswith(LOSS)
    ):
        error = error.__context__
    return str(error).splitlines()[0][:200] if error else None


def find_lost(asked: Mapping[int, Sequence[Any]]) -> frozenset[int]:
    """Numbers of the slices that do not answer in time."""
    answers: dict[int, bool] = {}

    def ask(number: int) -> None:
        answers[number] = responds(asked[number])

    # All at once and as daemons: a call to a lost device may never return.
    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ANSWER
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return frozenset(number for number in asked if not answers.get(number))


def responds(devices: Sequence[Any]) -> bool:
    """Whether all devices of a slice compute a sum."""
    import jax
    import numpy as np

    try:
        # Dispatched on all before any is read, so that the slice is waited for once.
        parts = [jax.device_put(np.float32(1.0), device) + 1.0 for device in devices]
        return all(float(part) == 2.0 for part in parts)
    except jax.errors.JaxRuntimeError:
        return False
