"""All drills: the function of each, how often its fault is injected by `make drills`, and how often in a short form."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from drills import changes, disks, hangs, kills, silent, tiers, values
from drills.runs import Outcome


class Drill(NamedTuple):
    """drill(folder, count, random) -> Outcome. Drills in folders beside each other share baselines and compiled programs."""

    function: Callable[[Path, int, random.Random], Outcome]
    full: int
    short: int


DRILLS = {
    1: Drill(kills.sigkill, 100, 1), 2: Drill(kills.in_a_save, 110, 1), 3: Drill(disks.damaged, 40, 1), 4: Drill(disks.full, 12, 1),
    5: Drill(kills.preempt, 6, 1), 6: Drill(values.poisoned, 20, 2), 7: Drill(values.spikes, 4, 1), 8: Drill(silent.corrupt, 9, 1),
    9: Drill(hangs.worker, 8, 1), 10: Drill(hangs.killed, 9, 1), 11: Drill(hangs.stopped, 6, 1), 12: Drill(changes.elastic, 4, 1),
    13: Drill(changes.changed, 24, 2), 14: Drill(silent.flipped, 8, 1), 15: Drill(hangs.straggler, 6, 1), 16: Drill(tiers.tiers, 12, 1),
    17: Drill(changes.crowded, 10, 1), 0: Drill(changes.clock, 6, 1),
}
