"""16: tiers that are lost."""

import functools
import itertools
import random
import shutil
import signal
from pathlib import Path

from drills.disks import OWNER
from drills.runs import Outcome, Started, across, baseline, outcome, unlike, whole
from maxstack.checkpoint import manifest

LOST = ("local", "peer", "both", "durable", "all")
"""One process's own disk; that which holds the copy of its shards; both; the folders that all see;
everything."""


def tiers(folder: Path, count: int, dice: random.Random) -> Outcome:
    """16: of 2, 4 and 8 processes that were all killed, each loss on a copy of what they left."""
    found = outcome(folder)
    kinds = dice.sample(LOST, len(LOST))
    plan = list(
        itertools.islice(
            itertools.cycle((many, kind) for many in (2, 4, 8) for kind in kinds), count
        )
    )
    for many in sorted({many for many, _ in plan}):
        disk, far, name = folder / "disk", folder / "far", f"of-{many}"
        checkpoint = {
            "every": 6,
            "tiers": [
                {"path": str(disk), "every": 2, "keep": 2, "replicate": 1},
                {"path": str(far), "every": 4},
            ],
        }
        config = across(folder, checkpoint=checkpoint)
        with Started(config, name, count=many) as started:
            assert started.until(functools.partial(_reached, disk / name, many, 8)), (
                started.output()
            )
            for i in range(many):
                started.send(signal.SIGKILL, i)
            started.wait()
        for number, (_, kind) in enumerate(one for one in plan if one[0] == many):
            again = f"{name}-{kind}-{number}"
            for top in (folder, disk, far):
                shutil.copytree(top / name, top / again, ignore=OWNER)
            found.add([f"{again}: {text}" for text in _without(config, again, kind, many, dice)])
    return found


def _reached(disk: Path, many: int, step: int) -> bool:
    return max(whole(disk, many), default=0) >= step


def _without(config: Path, name: str, kind: str, many: int, dice: random.Random) -> list[str]:
    """Lose one kind, go on -> what was wrong."""
    folder = config.parent
    run, disk, far = folder / name, folder / "disk", folder / "far"
    who = dice.randrange(many)
    hosts = {
        "local": [who],
        "peer": [(who + 1) % many],
        "both": [who, (who + 1) % many],
        "all": [*range(many)],
    }.get(kind, [])
    for host in hosts:
        shutil.rmtree(disk / name / f"host_{host}")
    if kind in ("durable", "all"):
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(far / name)
    seen = max(manifest.steps(run / "checkpoints") + manifest.steps(far / name), default=0)
    near = max(whole(disk / name, many), default=0)
    best = max(near, seen)
    with Started(config, name, count=many) as started:
        codes, output = started.wait(), started.output()
    if kind == "all":
        good = (
            codes == [1] * many
            and "no tier holds a checkpoint" in output
            and "Traceback" not in output
        )
        return [] if good else [f"exit {codes}: {output[-1500:]}"]
    place = (
        disk / name
        if near == best
        else far / name
        if best not in (near, *manifest.steps(run / "checkpoints"))
        else run / "checkpoints"
    )
    wrong = [] if codes == [0] * many else [f"exit {codes}: {output[-2500:]}"]
    if f"resumed from step {best} of" not in output:
        wrong.append(
            f"not resumed from step {best} of {place}: "
            + "".join(line for line in output.splitlines() if "resumed" in line)
        )
    return [*wrong, *unlike(run, baseline(config, count=many))]
