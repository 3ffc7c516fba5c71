"""The promise that each drill tests, in the words of docs/RELIABILITY.md."""

from typing import NamedTuple


class Promise(NamedTuple):
    """A row of the table of drills."""

    number: int
    """0: beside the numbered ones."""
    fault: str
    promise: str


PROMISES = (
    Promise(
        1,
        "SIGKILL at a random step, many times",
        "resume; every later loss and the final state are bit-identical to the baseline",
    ),
    Promise(
        2,
        "SIGKILL inside each phase of a save",
        "the previous step restores; leftovers are cleaned up",
    ),
    Promise(
        3,
        "truncate, delete or flip one bit in a finalised checkpoint file",
        "detected by checksum, the file is named, the run falls back to the newest "
        "intact step; never a silent wrong value",
    ),
    Promise(
        4,
        "disk full (ENOSPC) in the middle of a background save",
        "training goes on or exits by policy; the unwritten step is never advertised as "
        "latest; a later retry works",
    ),
    Promise(
        5,
        "SIGTERM to one of N processes",
        "all agree on one step, save it, exit with the documented retryable code; "
        "restart continues there",
    ),
    Promise(
        6,
        "NaN gradients in warm-up, later, in gradient only",
        "no non-finite value ever reaches params or optimizer state; spike statistics "
        "exclude it; at most that one update is skipped; bounded "
        "count, then abort with a clear error",
    ),
    Promise(
        7,
        "a loss spike, then a repeated one",
        "skip the update; if it persists, rewind to a checkpoint before the spike and "
        "skip exactly the offending batches (PaLM section 5.1), all "
        "of it logged and reproducible",
    ),
    Promise(
        8,
        "a corrupt record in a data shard",
        "fail or quarantine by policy; the record's id is logged; the order of the "
        "others does not change",
    ),
    Promise(
        9, "a hung data worker", "a watchdog prints all stacks and exits non-zero within its limit"
    ),
    Promise(
        10,
        "kill one of N processes",
        "peers exit within 10 s instead of hanging; the launcher restarts; training resumes",
    ),
    Promise(
        11,
        "SIGSTOP one of N processes",
        "an independent watchdog ends the run within its limit (heartbeats alone do not "
        "notice: measured 780 s and more)",
    ),
    Promise(
        12,
        "restart on 4, then 2, then 8 devices",
        "same global batch order, no sample lost or repeated; loss within 1e-5 of the baseline",
    ),
    Promise(
        13,
        "resume with a changed config",
        "safe keys go through; architecture or data changes are refused with a diff",
    ),
    Promise(
        14,
        "flip a gradient bit on one replica (silent data corruption)",
        "a cheap periodic replica hash finds it and names the process; recompute says "
        "transient or persistent",
    ),
    Promise(15, "one straggling process", "named within K steps in the log"),
    Promise(
        16,
        "lose the local, the peer and the durable checkpoint tier, one at a time",
        "the right tier restores; with all lost, a clear error",
    ),
    Promise(
        17,
        "processes that take the processors from eight virtual devices",
        "every step is taken; no collective waits for another for ever",
    ),
    Promise(
        18,
        "SIGKILL in the middle of a rollout, of rewards, of an update from samples, of a hand-over "
        "of weights to the engine; a reward worker killed",
        "resume; every later figure and the final state are bit-identical to the baseline; a "
        "reward whose process was killed is computed again",
    ),
    Promise(
        19,
        "SIGTERM, SIGINT or SIGHUP while a run waits: for data, an evaluation, a compiler, a save "
        "that does not end",
        "the last whole step is saved where there is one, and every process has left with 42 "
        "within `faults.grace`",
    ),
    Promise(0, "a clock skewed by a day", "changes nothing but log timestamps"),
)
