"""`maxstack checkpoint`: list, verify, show, copy and prune the checkpoints of a run."""

import contextlib
import math
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.command import argument, command, group, local_folder
from maxstack.errors import ConfigError
from maxstack.report.table import bytes_text, table

if TYPE_CHECKING:
    from maxstack.checkpoint.survey import Held

RUN = argument(
    "run", metavar="RUN", type=local_folder, help="run folder, or folder that a step was copied to"
)
HEADINGS = "step", "size", "eval loss", "saved", "where"
STEP = argument("--step", type=int, metavar="N", help="step (default: the newest)")


@command(
    "checkpoint list",
    "List all steps with size, eval loss, time and folder.",
    "checkpoint list runs/quickstart",
    RUN,
)
def show_list(args: Namespace) -> None:
    """Print a table with a row for each folder of each step."""
    from maxstack.checkpoint import survey

    rows = [cells for _, cells in cells_of(survey.find_steps(args.run))]
    print(table("rrrll", rows, HEADINGS))


def cells_of(held: "Held") -> list[tuple[int, tuple[str, ...]]]:
    """Return (step, cells below HEADINGS) for each folder of each step."""
    from maxstack.checkpoint import manifest, survey

    rows: list[tuple[int, tuple[str, ...]]] = []
    for step, paths in held.items():
        for path in paths:
            try:
                saved = time.localtime((path / manifest.NAME).stat().st_mtime)
                facts, files = manifest.read(path)
            except (FileNotFoundError, manifest.Damage) as error:
                if not manifest.is_whole(path):
                    continue  # it has been deleted meanwhile
                damage = f"DAMAGED: {survey.escape(error)}"
                rows.append((step, (f"{step}", "", "", "", damage)))
                continue
            loss = "" if facts.get("eval_loss") is None else f"{facts['eval_loss']:.4f}"
            size = bytes_text(sum(entry["bytes"] for entry in files.values()))
            date = time.strftime("%Y-%m-%d %H:%M:%S", saved)
            rows.append((step, (f"{step}", size, loss, date, survey.escape(path))))
    return rows


@command(
    "checkpoint verify",
    "Verify the checksum of every file. Exits with 1 if a file is damaged or not listed in any "
    "manifest.",
    "checkpoint verify runs/quickstart",
    RUN,
    argument("--step", type=int, metavar="N", help="step (default: all)"),
)
def verify(args: Namespace) -> int:
    """Print a line for each damaged file; return 1 if there are any."""
    import tqdm

    from maxstack.checkpoint import manifest, survey

    folders = survey.tier_folders(args.run)
    held = survey.find_steps(args.run)
    if args.step is not None:
        held = dict([survey.step_of(args.run, held, args.step)])
    paths = [path for paths in held.values() for path in paths]
    damaged = [*survey.find_unfinished(folders, args.step), *survey.find_mixed(held)]
    unlisted = list[str]()
    gone = list[Path]()
    total = sum(map(survey.size, paths))
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar:
        for path in paths:
            lines = [*manifest.damages(path, done=bar.update)]
            with contextlib.suppress(FileNotFoundError):  # it was deleted
                unlisted += survey.find_unlisted(path)
            if manifest.is_whole(path):
                damaged += lines
            else:
                gone.append(path)
    if gone == paths:
        raise manifest.deleted_error(gone[0])
    for word, lines in (("DAMAGED", damaged), ("UNLISTED", unlisted)):
        for line in lines:
            print(f"{word}: {survey.escape(line)}")
    for path in gone:
        print(f"deleted during verification: {survey.escape(path)}")
    for path in survey.find_stray(folders[0]) if args.step is None else ():
        print(f"stray: {survey.escape(path)}: belongs to no step")
    state = _count(damaged, "damaged file") if damaged else "all intact"
    more = f", {_count(unlisted, 'file')} that no manifest lists" if unlisted else ""
    places = _count(paths[len(gone) :], "place")
    print(f"{places} of {_count(held, 'step')}: {state}{more}")
    return 1 if damaged or unlisted else 0


@command(
    "checkpoint show",
    "Show the arrays of a step.",
    "checkpoint show runs/quickstart --step 400",
    RUN,
    STEP,
    on_cpu=True,
)
def show(args: Namespace) -> None:
    """Print the name, dtype and shape of each array, and the batches that were skipped."""
    _on_step(args, lambda folder: _show(args.run, folder.absolute()))


def _show(run: Path, folder: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    from maxstack.checkpoint import survey

    metadata = ocp.checkpointables_metadata(folder).metadata
    arrays: dict[str, Any] = metadata["state"]
    parameters = sum(
        math.prod(leaf.shape) for name, leaf in arrays.items() if name.startswith("params/")
    )
    print(
        f"step {folder.name} of {run}: {len(arrays)} arrays, {parameters:,} parameters, "
        f"{bytes_text(survey.size(folder))} in {folder}"
    )
    if "meta" in metadata:
        meta = strict_json.parse_object(
            ocp.load_checkpointables(folder, {"meta": None})["meta"]["json"], str(folder)
        )
        for first, last in (meta.get("notes") or {}).get("skipped") or ():
            print(f"batches {first} to {last} were skipped")
    print(table("ll", ((name, f"{leaf.dtype}{list(leaf.shape)}") for name, leaf in arrays.items())))


@command(
    "checkpoint copy",
    "Copy a step to another folder, and verify the copy.",
    "checkpoint copy runs/quickstart /backup/quickstart --step 400",
    RUN,
    argument(
        "to", metavar="FOLDER", type=local_folder, help="target folder; the copy is FOLDER/STEP"
    ),
    STEP,
)
def copy(args: Namespace) -> None:
    """Copy the step; ConfigError if the source or the copy is damaged."""
    _on_step(args, lambda source: _copy(args.run, source, args.to))


def _copy(run: Path, source: Path, target: Path) -> None:
    from maxstack.checkpoint import survey
    from maxstack.config import atomic

    _check_intact(source, f"{source}: is damaged and was not copied:")
    for folder in survey.tier_folders(run):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{target}: is inside {folder}, which holds the run's own steps; give another "
                "folder"
            )
    to = target / source.name
    if to.exists():
        raise ConfigError(f"{to}: exists already; give another folder, or delete it")
    try:
        with atomic.writing(to) as unfinished:
            shutil.copytree(source, unfinished)
            _check_intact(unfinished, f"{to}: the copy differs from the source:")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}") from error
    shown = survey.escape(to)
    print(f"{shown}: step {source.name}, verified; start from it with checkpoint.restore={shown}")


@command(
    "checkpoint prune",
    "Delete all but the newest steps in the run's own folder.",
    "checkpoint prune runs/quickstart --keep 3 --dry-run",
    RUN,
    argument("--keep", type=int, required=True, metavar="N", help="number of newest steps to keep"),
    argument("--dry-run", action="store_true", help="only print what would be deleted"),
)
def prune(args: Namespace) -> None:
    """Delete the steps, and print how many bytes that freed."""
    from maxstack.checkpoint import manifest, survey

    survey.find_steps(args.run)
    if args.keep < 1:
        raise ConfigError(
            f"--keep {args.keep}: must be 1 or more; to delete a whole run, delete its folder"
        )
    own = args.run / "checkpoints"
    other = own.resolve().parent
    if other != args.run.resolve() and (other / "config.yml").exists():
        raise ConfigError(f"{own}: links to another run, {other}; prune that one")
    steps = manifest.steps(own)[: -args.keep]
    freed = sum(survey.size(own / f"{step}") for step in steps)
    if not args.dry_run:
        for step in steps:
            manifest.delete(own / f"{step}")
    done = "would delete" if args.dry_run else "deleted"
    listed = f": {', '.join(map(str, steps))}" if steps else ""
    print(f"{survey.escape(own)}: {done} {_count(steps, 'step')}, {bytes_text(freed)}{listed}")


main = group(
    "checkpoint",
    "Work with a run's checkpoints, in all tiers that this host can access.",
    "checkpoint verify runs/quickstart",
    show_list,
    verify,
    show,
    copy,
    prune,
)


def _on_step(args: Namespace, work: Callable[[Path], None]) -> None:
    from maxstack.checkpoint import manifest

    manifest.retry_if_deleted(lambda: _whole_step(args), work)


def _whole_step(args: Namespace) -> Path:
    """Return the folder that holds the whole step. ConfigError where there is none."""
    from maxstack.checkpoint import survey

    step, paths = survey.step_of(args.run, survey.find_steps(args.run), args.step)
    for path in paths:
        if path.name == f"{step}":
            return path
    raise ConfigError(
        f"{args.run}: of step {step}, this host sees only the shards on hosts' own disks "
        f"({paths[0]}); give a step of the run's own folder, from maxstack checkpoint list"
    )


def _check_intact(folder: Path, problem: str) -> None:
    """ConfigError with the problem and a line for each damaged file of a step."""
    from maxstack.checkpoint import manifest, survey

    if damaged := [*manifest.damages(folder)]:
        raise ConfigError("\n".join([problem, *map(survey.escape, damaged)]))


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
