"""All drills: the function of each, and how often its fault is injected."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from drills import changes, disks, hangs, kills, learning, leaving, silent, tiers, values
from drills.runs import Outcome


class Drill(NamedTuple):
    """drill(folder, count, random) -> Outcome. Drills in folders beside each other share baselines
    and compiled programs."""

    function: Callable[[Path, int, random.Random], Outcome]
    full: int
    """By `make drills`."""
    kinds: int
    """By `make test-release`: every kind of the fault once."""
    once: int = 1
    """By `make test-all`; 0: left to `make test-release`."""


DRILLS = {
    1: Drill(kills.sigkill, 100, 2),
    2: Drill(kills.in_a_save, 110, 11),
    3: Drill(disks.damaged, 40, 5),
    4: Drill(disks.full, 12, 4, 0),
    5: Drill(kills.preempt, 6, 1),
    6: Drill(values.poisoned, 20, 7, 2),
    7: Drill(values.spikes, 4, 1, 0),
    8: Drill(silent.corrupt, 9, 3),
    9: Drill(hangs.worker, 8, 2, 0),
    10: Drill(hangs.killed, 9, 1, 0),
    11: Drill(hangs.stopped, 6, 1, 0),
    12: Drill(changes.elastic, 4, 1, 0),
    13: Drill(changes.changed, 24, 12, 2),
    14: Drill(silent.flipped, 8, 3, 0),
    15: Drill(hangs.straggler, 6, 2, 0),
    16: Drill(tiers.tiers, 12, 5),
    17: Drill(changes.crowded, 10, 1, 0),
    18: Drill(learning.samples, 60, 6),
    19: Drill(leaving.asked, 12, 12, 2),
    0: Drill(changes.clock, 6, 2),
}
