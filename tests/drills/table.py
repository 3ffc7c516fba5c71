"""All drills: the fault and the promise of each, in the words of docs/RELIABILITY.md, and how often
the fault is injected."""

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
    fault: str
    promise: str
    full: int
    """By `make drills`."""
    kinds: int
    """By `make test-release`: every kind of the fault once."""
    once: int = 1
    """By `make test-all`; 0: left to `make test-release`."""


DRILLS = {
    1: Drill(
        kills.sigkill,
        "SIGKILL at a random step, many times",
        "resume; every later loss and the final state are bit-identical to the baseline",
        full=100,
        kinds=2,
    ),
    2: Drill(
        kills.in_a_save,
        "SIGKILL inside each phase of a save",
        "the previous step restores; leftovers are cleaned up",
        full=110,
        kinds=11,
    ),
    3: Drill(
        disks.damaged,
        "truncate, delete or flip one bit in a finalized checkpoint file",
        "detected by checksum, the file is named, the run falls back to the newest intact "
        "step; never a silent wrong value",
        full=40,
        kinds=5,
    ),
    4: Drill(
        disks.full,
        "disk full (ENOSPC) in the middle of a background save",
        "training goes on or exits by policy; the unwritten step is never advertised as "
        "latest; a later retry works",
        full=12,
        kinds=4,
        once=0,
    ),
    5: Drill(
        kills.preempt,
        "SIGTERM to one of N processes",
        "all agree on one step, save it, exit with the documented retryable code; restart "
        "continues there",
        full=6,
        kinds=1,
    ),
    6: Drill(
        values.poisoned,
        "NaN gradients in warm-up, later, in gradient only",
        "no non-finite value ever reaches params or optimizer state; spike statistics "
        "exclude it; at most that one update is skipped; bounded count, then abort with a "
        "clear error",
        full=20,
        kinds=7,
        once=2,
    ),
    7: Drill(
        values.spikes,
        "a loss spike, then a repeated one",
        "skip the update; if it persists, rewind to a checkpoint before the spike and skip "
        "exactly the offending batches (PaLM section 5.1), all of it logged and "
        "reproducible",
        full=4,
        kinds=1,
        once=0,
    ),
    8: Drill(
        silent.corrupt,
        "a corrupt record in a data shard",
        "fail or quarantine by policy; the record's id is logged; the order of the others "
        "does not change",
        full=9,
        kinds=3,
    ),
    9: Drill(
        hangs.worker,
        "a hung data worker",
        "a watchdog prints all stacks and exits non-zero within its limit",
        full=8,
        kinds=2,
        once=0,
    ),
    10: Drill(
        hangs.killed,
        "kill one of N processes",
        "peers exit within 10 s instead of hanging; the launcher restarts; training resumes",
        full=9,
        kinds=1,
        once=0,
    ),
    11: Drill(
        hangs.stopped,
        "SIGSTOP one of N processes",
        "an independent watchdog ends the run within its limit (heartbeats alone do not "
        "notice: measured 780 s and more)",
        full=6,
        kinds=1,
        once=0,
    ),
    12: Drill(
        changes.elastic,
        "restart on 4, then 2, then 8 devices",
        "same global batch order, no sample lost or repeated; loss within 1e-5 of the baseline",
        full=4,
        kinds=1,
        once=0,
    ),
    13: Drill(
        changes.changed,
        "resume with a changed config",
        "safe keys go through; architecture or data changes are refused with a diff",
        full=24,
        kinds=12,
        once=2,
    ),
    14: Drill(
        silent.flipped,
        "flip a gradient bit on one replica (silent data corruption)",
        "a cheap periodic replica hash finds it and names the process; recompute says "
        "transient or persistent",
        full=8,
        kinds=3,
        once=0,
    ),
    15: Drill(
        hangs.straggler,
        "one straggling process",
        "named within K steps in the log",
        full=6,
        kinds=2,
        once=0,
    ),
    16: Drill(
        tiers.tiers,
        "lose the local, the peer and the durable checkpoint tier, one at a time",
        "the right tier restores; with all lost, a clear error",
        full=12,
        kinds=5,
    ),
    17: Drill(
        changes.crowded,
        "other processes that compete for the CPUs of eight virtual devices",
        "every step completes; no collective waits for another forever",
        full=10,
        kinds=1,
        once=0,
    ),
    18: Drill(
        learning.samples,
        "SIGKILL in the middle of a rollout, of rewards, of an update from samples, of a "
        "handover of weights to the engine; a reward worker killed",
        "resume; every later metric and the final state are bit-identical to the baseline; "
        "a reward whose process was killed is computed again",
        full=60,
        kinds=6,
    ),
    19: Drill(
        leaving.asked,
        "SIGTERM, SIGINT or SIGHUP while a run waits: for data, an evaluation, compilation, "
        "a save that does not end",
        "the last completed step is saved if there is one, and every process exits with "
        "42 within `faults.grace`",
        full=12,
        kinds=12,
        once=2,
    ),
    0: Drill(
        changes.clock,
        "a clock skewed by a day",
        "changes nothing but log timestamps",
        full=6,
        kinds=2,
    ),
}
