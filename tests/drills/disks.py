"""Drills of disks: damage, no room, a tier lost."""

import itertools
import random
import shutil
import signal
import subprocess
from pathlib import Path

from drills.runs import (
    Outcome,
    Started,
    across,
    baseline,
    maxstack,
    newest,
    outcome,
    settings,
    unlike,
)
from maxstack.checkpoint import manifest, owner

EVERY = 4
OWNER = shutil.ignore_patterns(owner.NAME)
DAMAGE = ("bit", "cut", "deleted")


def damaged(folder: Path, count: int, dice: random.Random) -> Outcome:
    """3: in any file of the newest steps of a run that was killed, at any byte; in the folder that
    all see, of one process and of two, and on a host's own disk."""
    found, disk = outcome(folder), folder / "disk"
    own = {"every": 1000, "tiers": [{"path": str(disk), "every": EVERY, "keep": 3, "replicate": 0}]}
    seen, kinds = {"every": EVERY, "keep": 3}, itertools.cycle(dice.sample(DAMAGE, len(DAMAGE)))
    for place, checkpoint, share in (
        ("seen", seen, count - count // 5 - count * 2 // 5),
        ("two", seen, count // 5),
        ("own", own, count * 2 // 5),
    ):
        processes = 2 if place == "two" else 1
        config = (across if processes > 1 else settings)(folder, checkpoint=checkpoint)
        if share:
            _killed_after(config, place, 3 * EVERY, processes)
        for number in range(share):
            name = f"{place}-{number}"
            _copied(folder, disk, place, name)
            steps = disk / name / "host_0" if place == "own" else folder / name / "checkpoints"
            found.add(_harmed(config, name, steps, next(kinds), dice, processes))
    return found


def _killed_after(config: Path, name: str, step: int, processes: int) -> None:
    with Started(config, name, count=processes) as started:
        assert started.until(lambda: newest(started.folder, config.parent / "disk") >= step), (
            started.output()
        )
        for i in range(processes):
            started.send(signal.SIGKILL, i)
        started.wait()


def _copied(folder: Path, disk: Path, name: str, to: str) -> None:
    shutil.copytree(folder / name, folder / to)
    if (disk / name).exists():
        shutil.copytree(disk / name, disk / to, ignore=OWNER)


def _harmed(
    config: Path, name: str, steps: Path, kind: str, dice: random.Random, processes: int
) -> list[str]:
    """Damage a file of one or two of the newest steps, go on to the end -> what was wrong."""
    depth = "*/" * (steps.name == "host_0")
    there = sorted(
        {
            int(path.relative_to(steps).parts[0])
            for path in steps.glob(f"[0-9]*/{depth}{manifest.NAME}")
        },
        reverse=True,
    )
    bad = there[: dice.choice((1, 1, 2))]
    victims = [
        _harm(dice, kind, [path for path in (steps / f"{step}").rglob("*") if path.is_file()])
        for step in bad
    ]
    verified, said = (
        maxstack("checkpoint", "verify", str(config.parent / name))
        if steps.name == "checkpoints"
        else (1, f"{victims}")
    )
    with Started(config, name, count=processes) as started:
        codes, output = started.wait(), started.output()
    wrong = [] if codes == [0] * processes else [f"exit {codes}: {output[-1500:]}"]
    wrong += [f"the run does not name {path}" for path in victims if str(path) not in output]
    wrong += [
        f"verify says {verified} and does not name {path}"
        for path in victims
        if verified != 1 or str(path) not in said
    ]
    wrong += [f"not resumed from step {there[len(bad)]}"] * (
        f"resumed from step {there[len(bad)]} of" not in output
    )
    wrong += unlike(config.parent / name, baseline(config, count=processes))
    return [f"{name}: {kind} of {', '.join(map(str, victims))}: {text}" for text in wrong]


def _harm(dice: random.Random, kind: str, files: list[Path]) -> Path:
    path = dice.choice(sorted(path for path in files if path.stat().st_size))
    data = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: dice.randrange(len(data))])
    else:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    return path


def can_mount() -> bool:
    """True where this user may mount a file system."""
    return (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
        == 0
    )


def full(folder: Path, count: int, dice: random.Random) -> Outcome:
    """4: a file system of a few MB of its own, filled up but for a part of a checkpoint: in turn
    that of a tier and that of the whole run, where the run goes on and where it stops."""
    found = outcome(folder)
    turns = itertools.cycle(itertools.product(("tier", "run"), ("continue", "stop")))
    for number in range(count):
        place, policy = next(turns)
        name, room = f"{place}-{policy}-{number}", folder / f"room-{number}"
        room.mkdir()
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"mount -t tmpfs -o size=6m none '{room}' && echo && exec sleep 3600",
        ]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout and holder.stdout.readline() == "\n", "no file system of one's own"
            checkpoint = (
                {"every": 1000, "tiers": [{"path": str(room), "every": 2, "keep": 2}]}
                if place == "tier"
                else {"every": 8, "keep": 2}
            )
            config = settings(folder, checkpoint=checkpoint | {"on_failure": policy})
            seen = Path(f"/proc/{holder.pid}/root{room}")
            within = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", f"--wd={Path.cwd()}", "--"]
            found.add(
                [
                    f"{name}: {text}"
                    for text in _filled(config, name, room, seen, within, policy, dice)
                ]
            )
        finally:
            holder.kill()
            holder.wait()
    return found


def _filled(
    config: Path,
    name: str,
    room: Path,
    seen: Path,
    within: list[str],
    policy: str,
    dice: random.Random,
) -> list[str]:
    """Errors of a run whose disk was full for a while; `seen`: `room` as it looks from
    outside."""
    whole = name.startswith("run")
    overrides = [f"run.output_dir={room}"] if whole else []
    run = seen / name if whole else config.parent / name
    saves, ballast, wrong = (
        seen / name / "checkpoints" if whole else seen / name,
        seen / "ballast",
        [],
    )
    with Started(config, name, *overrides, within=within) as started:
        started.folder = run
        assert started.until(lambda: manifest.steps(saves)), started.output()
        started.send(signal.SIGSTOP)
        held, one = (
            manifest.steps(saves),
            sum(
                path.stat().st_size
                for path in (saves / f"{manifest.steps(saves)[-1]}").rglob("*")
                if path.is_file()
            ),
        )
        _fill(ballast, dice.choice((0, dice.randrange(one))))
        started.send(signal.SIGCONT)
        if not started.until(lambda: "was not saved to" in started.output()):
            wrong.append("no failure was told")
        after = manifest.steps(saves)
        if not {*after} >= {held[-1]} or any(
            list(manifest.damages(saves / f"{step}")) for step in after
        ):
            wrong.append(f"before it was full there were {held}, then {after}, damages among them")
        if policy == "continue":
            ballast.unlink()
            if not started.until(lambda: (manifest.steps(saves) or [0])[-1] > after[-1]):
                wrong.append("no later save worked")
        codes, output = started.wait(), started.output()
    if codes != [0 if policy == "continue" else 1] or (
        policy == "stop" and "error: checkpoint of step" not in output
    ):
        wrong.append(f"exit {codes}: {output[-2500:]}")
    ballast.unlink(missing_ok=True)
    with Started(config, name, *overrides, within=within) as again:
        if again.wait() != [0]:
            wrong.append(f"run again: {again.output()[-1500:]}")
    return [*wrong, *unlike(run, baseline(config))]


def _fill(path: Path, free: int) -> None:
    """Take all room but so many bytes."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(max(0, file.tell() - free))
