"""The checkpoints of a run on this host's disks, in all tiers: the folders of each step and their
faults, for `maxstack checkpoint`."""

import contextlib
import glob
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxstack.checkpoint import manifest, owner
from maxstack.config.compose import plain, read_file
from maxstack.errors import ConfigError, shortened

Held = dict[int, list[Path]]
"""Step -> the folders that hold it, or the parts of it that are on this host."""


def find_steps(run: Path) -> Held:
    """Find the finished steps of a run on this host, newest last. ConfigError where there is no
    such run, or nothing saved."""
    if not run.is_dir():
        problem = "is a file" if run.exists() else "no such folder"
        raise ConfigError(f"{escape(run)}: {problem}; give a run's folder, as runs/quickstart")
    # The path is that of a step.
    if (run / manifest.NAME).exists() and run.name.isdecimal():
        return {int(run.name): [run]}
    held: Held = {}
    folders = tier_folders(run)
    for tier in folders[2:]:
        if not tier.is_dir():
            print(
                f"{escape(tier)}: this tier cannot be seen from here; its steps are left out",
                file=sys.stderr,
            )
    for folder in folders:
        for step in manifest.steps(folder):
            held.setdefault(step, []).append(folder / f"{step}")
        # pathlib's glob raises where a folder is deleted meanwhile.
        for name in glob.glob(f"host_*/*/of_*/{manifest.NAME}", root_dir=folder):
            part = (folder / name).parent
            if part.parent.name.isdecimal():
                held.setdefault(int(part.parent.name), []).append(part)
    if not held:
        raise ConfigError(f"{run}: holds no finished checkpoint, nor do its tiers on this host")
    return dict(sorted(held.items()))


def tier_folders(run: Path) -> list[Path]:
    """List the folders that may hold steps: the run's, that of a copy, and the tiers that the run's
    config.yml names."""
    path = run / "config.yml"
    config = plain(read_file(path)) if path.exists() else {}
    tiers = [
        Path(tier["path"]).expanduser() / config["run"]["name"]
        for tier in config.get("checkpoint", {}).get("tiers") or ()
    ]
    # A folder of this name may be another run's.
    own = [tier for tier in tiers if owner.read(tier) in (None, run.resolve())]
    return [run / "checkpoints", run, *own]


def step_of(run: Path, held: Held, step: int | None) -> tuple[int, list[Path]]:
    """Return the step (None: the newest) and its folders. ConfigError where there is none."""
    step = max(held) if step is None else step
    if step not in held:
        raise ConfigError(f"{run}: holds no step {step}; it holds {', '.join(map(str, held))}")
    return step, held[step]


def find_unfinished(folders: Sequence[Path], step: int | None) -> Iterator[str]:
    """Yield a line for each step without a manifest, of all or of one step. Those that are marked
    as unfinished are printed instead, since they are not damaged."""
    parts = [(path.name, path) for folder in folders for path in folder.glob("[0-9]*")]
    for folder in folders:
        of_hosts = [folder / name for name in glob.glob("host_*/*/of_*", root_dir=folder)]
        parts += [(path.parent.name, path) for path in of_hosts]
    for name, path in parts:
        if not name.isdecimal() or step not in (None, int(name)):
            continue
        if not path.is_dir() or (path / manifest.NAME).exists():
            continue
        if manifest.mark(path).exists():
            print(
                f"unfinished: {escape(path)}: is being written or deleted, or was when its "
                "process was killed"
            )
        else:
            yield (
                f"{path / manifest.NAME}: is missing, so this step does not count: it is being "
                "written, was never finished, or lost this file"
            )


def find_unlisted(path: Path) -> Iterator[str]:
    """Yield a line for each file of a step that its save did not write."""
    with contextlib.suppress(manifest.Damage):  # verify reports it with the step's files
        for name in sorted({*manifest.files(path)} - manifest.read(path)[1].keys()):
            yield (
                f"{path / name}: is not in {manifest.NAME}, so the save did not write it; "
                "move it elsewhere"
            )


def find_stray(folder: Path) -> list[Path]:
    """Find files beside the steps of a run's own folder that no save writes."""
    beside = folder.iterdir() if folder.is_dir() else ()
    marks = re.compile(rf"[0-9]+{re.escape(manifest.UNFINISHED)}")
    return sorted(path for path in beside if path.is_file() and not marks.fullmatch(path.name))


def find_mixed(held: Held) -> Iterator[str]:
    """Yield a line for each step of which this host sees shards of different saves."""
    for step, paths in held.items():
        saves: dict[str, Path] = {}
        for path in paths:
            with contextlib.suppress(manifest.Damage):  # verify reports it with the step's files
                if save := manifest.read(path)[0].get("save"):
                    saves.setdefault(save, path)
        if len(saves) > 1:
            yield (
                f"step {step}: shards of different saves, of which only one counts: "
                f"{', '.join(map(str, saves.values()))}"
            )


def size(path: Path) -> int:
    """Return the bytes of a step's files by its manifest; 0 where that is damaged."""
    try:
        return sum(entry["bytes"] for entry in manifest.read(path)[1].values())
    except manifest.Damage:
        return 0


def escape(text: object) -> str:
    """Escape the characters of a path or a line that are not printable."""
    return shortened(line := str(text), len(line))
