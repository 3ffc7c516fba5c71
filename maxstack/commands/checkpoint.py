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
from maxstack.report.table import table

if TYPE_CHECKING:
    from maxstack.checkpoint.survey import Held

RUN = argument(
    "run", metavar="RUN", type=local_folder, help="a run's folder, or where a step was copied to"
)
HEADINGS = "step", "size", "eval loss", "saved", "where"
STEP = argument("--step", type=int, metavar="N", help="this step (default: the newest)")


@command(
    "checkpoint list",
    "Every step: its size, eval loss, time and folder.",
    "checkpoint list runs/quickstart",
    RUN,
)
def show_list(args: Namespace) -> None:
    """Print a table with a row for each folder of each step."""
    from maxstack.checkpoint import survey

    rows = [cells for _, cells in cells_of(survey.held_by(args.run))]
    print(table("rrrll", rows, HEADINGS))


def cells_of(held: "Held") -> list[tuple[int, tuple[str, ...]]]:
    """(step, cells below HEADINGS) for each folder of each step."""
    from maxstack.checkpoint import deletion, manifest, survey

    rows: list[tuple[int, tuple[str, ...]]] = []
    for step, paths in held.items():
        for path in paths:
            try:
                saved = time.localtime((path / manifest.NAME).stat().st_mtime)
                facts, files = manifest.read(path)
            except (FileNotFoundError, manifest.Damage) as error:
                if not deletion.is_whole(path):
                    continue  # a moment later it would not have been found
                damage = f"DAMAGED: {survey.escaped(error)}"
                rows.append((step, (f"{step}", "", "", "", damage)))
                continue
            loss = "" if facts.get("eval_loss") is None else f"{facts['eval_loss']:.4f}"
            size = _size(sum(entry["bytes"] for entry in files.values()))
            date = time.strftime("%Y-%m-%d %H:%M:%S", saved)
            rows.append((step, (f"{step}", size, loss, date, survey.escaped(path))))
    return rows


@command(
    "checkpoint verify",
    "Compare every file with its checksum; exit code 1 for damage, or files that no manifest "
    "lists.",
    "checkpoint verify runs/quickstart",
    RUN,
    argument("--step", type=int, metavar="N", help="this step (default: all)"),
)
def verify(args: Namespace) -> int:
    """Print a line for each damaged file; 1 where there are any."""
    import tqdm

    from maxstack.checkpoint import deletion, manifest, survey

    folders, held = survey.folders_of(args.run), survey.held_by(args.run)
    if args.step is not None:
        held = dict([survey.step_of(args.run, held, args.step)])
    paths = [path for paths in held.values() for path in paths]
    damaged = [*survey.unsealed(folders, args.step), *survey.mixed(held)]
    unlisted, gone = list[str](), list[Path]()
    total = sum(map(survey.size, paths))
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar:
        for path in paths:
            lines = [*manifest.damages(path, done=bar.update)]
            with contextlib.suppress(FileNotFoundError):  # it was deleted
                unlisted += survey.unlisted(path)
            if deletion.is_whole(path):
                damaged += lines
            else:
                gone.append(path)
    if gone == paths:
        raise deletion.deleted(gone[0])
    for word, lines in (("DAMAGED", damaged), ("UNLISTED", unlisted)):
        for line in lines:
            print(f"{word}: {survey.escaped(line)}")
    for path in gone:
        print(f"deleted meanwhile: {survey.escaped(path)}")
    for path in survey.stray(folders[0]) if args.step is None else ():
        print(f"stray: {survey.escaped(path)}: is of no step")
    state = _count(damaged, "damaged file") if damaged else "all intact"
    more = f", {_count(unlisted, 'file')} that no manifest lists" if unlisted else ""
    places = _count(paths[len(gone) :], "place")
    print(f"{places} of {_count(held, 'step')}: {state}{more}")
    return 1 if damaged or unlisted else 0


@command(
    "checkpoint show",
    "The arrays of a step.",
    "checkpoint show runs/quickstart --step 400",
    RUN,
    STEP,
    on_cpu=True,
)
def show(args: Namespace) -> None:
    """Print the name, type and shape of each array, and the batches that were passed over."""
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
        f"{_size(survey.size(folder))} in {folder}"
    )
    if "meta" in metadata:
        meta = strict_json.parse_object(
            ocp.load_checkpointables(folder, {"meta": None})["meta"]["json"], str(folder)
        )
        for first, last in (meta.get("notes") or {}).get("skipped") or ():
            print(f"batches {first} to {last} were passed over")
    print(table("ll", ((name, f"{leaf.dtype}{list(leaf.shape)}") for name, leaf in arrays.items())))


@command(
    "checkpoint copy",
    "Copy a step to another folder, and verify the copy.",
    "checkpoint copy runs/quickstart /backup/quickstart --step 400",
    RUN,
    argument("to", metavar="FOLDER", type=local_folder, help="gets a folder of the step's number"),
    STEP,
)
def copy(args: Namespace) -> None:
    """Copy the step; ConfigError where source or copy are damaged."""
    _on_step(args, lambda source: _copy(args.run, source, args.to))


def _copy(run: Path, source: Path, target: Path) -> None:
    from maxstack.checkpoint import survey
    from maxstack.config import atomic

    _check_intact(source, f"{source} is damaged, and was not copied:")
    for folder in survey.folders_of(run):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{target}: is in {folder}, where the run's own steps lie; give a folder elsewhere"
            )
    to = target / source.name
    if to.exists():
        raise ConfigError(f"{to}: is there already; give another folder, or delete it")
    try:
        with atomic.writing(to) as unfinished:
            shutil.copytree(source, unfinished)
            _check_intact(unfinished, f"{to}: the copy is not what was read:")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}") from error
    shown = survey.escaped(to)
    print(f"{shown}: step {source.name}, checked; checkpoint.restore={shown} starts from it")


@command(
    "checkpoint prune",
    "Delete all but the newest steps of the run's own folder.",
    "checkpoint prune runs/quickstart --keep 3 --dry-run",
    RUN,
    argument(
        "--keep",
        type=int,
        required=True,
        metavar="N",
        help="how many of the newest stay, 1 or more",
    ),
    argument("--dry-run", action="store_true", help="only say what would go"),
)
def prune(args: Namespace) -> None:
    """Delete the steps and print how much room that made."""
    from maxstack.checkpoint import manifest, survey

    survey.held_by(args.run)
    if args.keep < 1:
        raise ConfigError(
            f"--keep {args.keep}: must be 1 or more; to delete all of a run, delete its folder"
        )
    own = args.run / "checkpoints"
    other = own.resolve().parent
    if other != args.run.resolve() and (other / "config.yml").exists():
        raise ConfigError(f"{own}: leads into another run, {other}; prune that")
    steps = manifest.steps(own)[: -args.keep]
    freed = sum(survey.size(own / f"{step}") for step in steps)
    if not args.dry_run:
        for step in steps:
            manifest.delete(own / f"{step}")
    print(
        f"{survey.escaped(own)}: {'would delete' if args.dry_run else 'deleted'} "
        f"{_count(steps, 'step')}, {_size(freed)}{': ' if steps else ''}"
        f"{', '.join(map(str, steps))}"
    )


main = group(
    "checkpoint",
    "The checkpoints of a run, in all its tiers that this host sees.",
    "checkpoint verify runs/quickstart",
    show_list,
    verify,
    show,
    copy,
    prune,
)


def _on_step(args: Namespace, work: Callable[[Path], None]) -> None:
    from maxstack.checkpoint import deletion

    deletion.on_found(lambda: _whole_step(args), work)


def _whole_step(args: Namespace) -> Path:
    """The folder that holds all of the step of the arguments. ConfigError where there is none."""
    from maxstack.checkpoint import survey

    step, paths = survey.step_of(args.run, survey.held_by(args.run), args.step)
    for path in paths:
        if path.name == f"{step}":
            return path
    raise ConfigError(
        f"{args.run}: step {step} is only on hosts' own disks here ({paths[0]}), which hold "
        "shards; give a step of the run's own folder; its files: maxstack checkpoint list"
    )


def _check_intact(folder: Path, problem: str) -> None:
    """ConfigError with the problem and a line for each damaged file of a step."""
    from maxstack.checkpoint import manifest, survey

    if damaged := [*manifest.damages(folder)]:
        raise ConfigError("\n".join([problem, *map(survey.escaped, damaged)]))


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.1f} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1024
    return f"{number:,.1f} TiB"
