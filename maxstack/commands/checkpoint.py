"""`maxstack checkpoint`: what a run has saved and where, whether it is intact, copies of it, and
room made."""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tqdm
import yaml

from maxstack.checkpoint import manifest, owner
from maxstack.checkpoint.manifest import Damage
from maxstack.config import ConfigError, atomic, shortened

Held = dict[int, list[Path]]
"""Step -> the folders that hold it, or the parts of it that are on this host."""


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say; 1 where a checkpoint is damaged or has files that are not its
    own."""
    parser = argparse.ArgumentParser(
        prog="maxstack checkpoint",
        description="The checkpoints of a run, in all its tiers that this host sees.",
        epilog="example: maxstack checkpoint verify runs/quickstart",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in (
        ("list", "every step: its place, size and time"),
        (
            "verify",
            "hold every file against its checksum; exit code 1 for damage, or files that "
            "no manifest lists",
        ),
        ("show", "what one step holds"),
        ("copy", "a step to another folder, checked there"),
        ("prune", "delete all but the newest steps of the run's own folder"),
    ):
        command = commands.add_parser(
            name, help=words, description=f"{words[0].upper()}{words[1:]}."
        )
        command.add_argument(
            "run", metavar="RUN", type=Path, help="a run's folder, or where a step was copied to"
        )
        if name in ("verify", "show", "copy"):
            command.add_argument(
                "--step",
                type=int,
                metavar="N",
                help=f"this one (default: {'all' if name == 'verify' else 'the newest'})",
            )
    commands.choices["copy"].add_argument(
        "to", metavar="FOLDER", type=Path, help="gets a folder of the step's number"
    )
    commands.choices["prune"].add_argument(
        "--keep",
        type=int,
        required=True,
        metavar="N",
        help="how many of the newest stay, 1 or more",
    )
    commands.choices["prune"].add_argument(
        "--dry-run", action="store_true", help="only say what would go"
    )
    args = parser.parse_args(argv)
    args.folders = _folders(args.run)
    held = found(args.run, args.folders)
    return {"list": _list, "verify": _verify, "show": _show, "copy": _copy, "prune": _prune}[
        args.command
    ](args, held)


def found(run: Path, folders: Sequence[Path]) -> Held:
    """The finished steps of a run on this host, in its folders, newest last. ConfigError where
    there is no such run, or nothing saved."""
    if not run.is_dir():
        what = "is a file" if run.exists() else "no such folder"
        raise ConfigError(f"{_plain(run)}: {what}; give a run's folder, as runs/quickstart")
    if (run / manifest.NAME).exists() and run.name.isdigit():
        return {int(run.name): [run]}
    held: Held = {}
    for folder in (folder for folder in folders[2:] if not folder.is_dir()):
        print(
            f"{_plain(folder)}: a tier that is not seen from here; its steps are left out",
            file=sys.stderr,
        )
    for folder in folders:
        for step in manifest.steps(folder):
            held.setdefault(step, []).append(folder / f"{step}")
        for part in folder.glob(f"host_*/*/of_*/{manifest.NAME}"):
            held.setdefault(int(part.parent.parent.name), []).append(part.parent)
    if not held:
        raise ConfigError(f"{run}: holds no finished checkpoint, nor do its tiers on this host")
    return dict(sorted(held.items()))


def _folders(run: Path) -> list[Path]:
    """Where a run's steps lie, or a copy's: also in the other tiers that the run's config.yml
    names."""
    path = run / "config.yml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    tiers = [
        Path(tier["path"]).expanduser() / config["run"]["name"]
        for tier in config.get("checkpoint", {}).get("tiers") or ()
    ]
    return [
        run / "checkpoints",
        run,
        *(path for path in tiers if owner.of(path) in (None, run.resolve())),
    ]


def _unsealed(folders: Sequence[Path], step: int | None) -> list[str]:
    """What is wrong with steps that have no manifest: of one, or of all for None. Those that are
    marked as unfinished are only told."""
    parts = [(path.name, path) for folder in folders for path in folder.glob("[0-9]*")]
    parts += [
        (path.parent.name, path) for folder in folders for path in folder.glob("host_*/*/of_*")
    ]
    found = [
        path
        for name, path in parts
        if name.isdecimal()
        and step in (None, int(name))
        and path.is_dir()
        and not (path / manifest.NAME).exists()
    ]
    marked = [path for path in found if manifest.mark(path).exists()]
    for path in marked:
        print(
            f"unfinished: {_plain(path)}: is being written or deleted, or was when its "
            "process was killed"
        )
    return [
        f"{path / manifest.NAME}: is missing, so this step does not count: it is being "
        "written, was never finished, or lost this file"
        for path in found
        if path not in marked
    ]


def _unlisted(path: Path) -> list[str]:
    """Files of a step that its save did not write."""
    with contextlib.suppress(Damage):  # told where its files are
        odd = sorted({*manifest.files(path)} - manifest.read(path)[1].keys())
        return [
            f"{path / name}: is not in {manifest.NAME}, so the save did not write it; "
            "move it elsewhere"
            for name in odd
        ]
    return []


def _stray(folder: Path) -> list[Path]:
    """Files beside the steps of a run's own folder that no save writes."""
    beside = folder.iterdir() if folder.is_dir() else ()
    marks = re.compile(rf"[0-9]+{re.escape(manifest.UNFINISHED)}")
    return sorted(path for path in beside if path.is_file() and not marks.fullmatch(path.name))


def _mixed(held: Held) -> Iterator[str]:
    """Steps of which this host sees shards of different saves."""
    for step, paths in held.items():
        saves: dict[str, Path] = {}
        for path in paths:
            with contextlib.suppress(Damage):  # told where its files are
                if save := manifest.read(path)[0].get("save"):
                    saves.setdefault(save, path)
        if len(saves) > 1:
            yield (
                f"step {step}: shards of different saves, of which only one counts: "
                f"{', '.join(map(str, saves.values()))}"
            )


def _chosen(args: argparse.Namespace, held: Held) -> tuple[int, list[Path]]:
    step = max(held) if args.step is None else args.step
    if step not in held:
        raise ConfigError(f"{args.run}: holds no step {step}; it holds {', '.join(map(str, held))}")
    return step, held[step]


def _list(args: argparse.Namespace, held: Held) -> int:
    print(f"{'step':>10}  {'size':>10}  {'eval loss':>9}  {'saved':19}  where")
    for step, paths in held.items():
        for path in paths:
            try:
                facts, files = manifest.read(path)
            except Damage as error:
                print(f"{step:>10}  DAMAGED: {_plain(error)}")
                continue
            loss = "" if facts.get("eval_loss") is None else f"{facts['eval_loss']:.4f}"
            saved = time.strftime(
                "%Y-%m-%d %H:%M:%S", time.localtime((path / manifest.NAME).stat().st_mtime)
            )
            print(
                f"{step:>10}  "
                f"{_size(sum(entry['bytes'] for entry in files.values())):>10}  "
                f"{loss:>9}  {saved}  {_plain(path)}"
            )
    return 0


def _verify(args: argparse.Namespace, held: Held) -> int:
    chosen = held if args.step is None else dict([_chosen(args, held)])
    paths = [path for paths in chosen.values() for path in paths]
    wrong = [*_unsealed(args.folders, args.step), *_mixed(chosen)]
    more = [line for path in paths for line in _unlisted(path)]
    with tqdm.tqdm(
        total=sum(_bytes(path) for path in paths),
        unit="B",
        unit_scale=True,
        desc="verifying",
        disable=None,
    ) as bar:
        for path in paths:
            wrong += manifest.damages(path, done=bar.update)
    for word, lines in (("DAMAGED", wrong), ("UNLISTED", more)):
        print("".join(f"{word}: {_plain(line)}\n" for line in lines), end="")
    for path in _stray(args.folders[0]) if args.step is None else ():
        print(f"stray: {_plain(path)}: is of no step")
    said = _many(len(wrong), "damaged file") if wrong else "all intact"
    unlisted = f", {_many(len(more), 'file')} that no manifest lists" if more else ""
    print(f"{_many(len(paths), 'place')} of {_many(len(chosen), 'step')}: {said}{unlisted}")
    return 1 if wrong or more else 0


def _show(args: argparse.Namespace, held: Held) -> int:
    step, paths = _chosen(args, held)
    whole = next((path for path in paths if (path / "_CHECKPOINT_METADATA").exists()), None)
    if whole is None:
        raise ConfigError(
            f"{args.run}: step {step} is only on hosts' own disks here ({paths[0]}), "
            "which hold shards; its files: "
            "maxstack checkpoint list"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from orbax.checkpoint import v1 as ocp

    whole = whole.absolute()
    held_there = ocp.checkpointables_metadata(whole).metadata
    arrays: dict[str, Any] = held_there["state"]
    count = sum(
        math.prod(leaf.shape) for name, leaf in arrays.items() if name.startswith("params/")
    )
    print(
        f"step {step} of {args.run}: {len(arrays)} arrays, {count:,} parameters, "
        f"{_size(_bytes(whole))} in {whole}"
    )
    if "meta" in held_there:
        meta = json.loads(ocp.load_checkpointables(whole, {"meta": None})["meta"]["json"])
        passed = meta["notes"].get("skipped") if meta.get("notes") else None
        print(
            "\n".join(f"batches {first} to {last} were passed over" for first, last in passed or [])
        )
    width = max(map(len, arrays))
    for name, leaf in arrays.items():
        print(f"  {name:<{width}}  {leaf.dtype}{list(leaf.shape)}")
    return 0


def _copy(args: argparse.Namespace, held: Held) -> int:
    step, paths = _chosen(args, held)
    source = next((path for path in paths if path.name == f"{step}"), None)
    if source is None:
        raise ConfigError(
            f"{args.run}: step {step} is only on hosts' own disks, which hold shards; "
            "copy a step of the run's own folder"
        )
    if wrong := list(manifest.damages(source)):
        raise ConfigError(
            "\n".join([f"{source} is damaged, and was not copied:", *map(_plain, wrong)])
        )
    to = args.to / f"{step}"
    if within := [
        folder for folder in args.folders if args.to.resolve().is_relative_to(folder.resolve())
    ]:
        raise ConfigError(
            f"{args.to}: is in {within[-1]}, where the run's own steps lie; give a folder elsewhere"
        )
    if to.exists():
        raise ConfigError(f"{to}: is there already; give another folder, or delete it")
    try:
        with atomic.writing(to) as unfinished:
            shutil.copytree(source, unfinished)
            if wrong := list(manifest.damages(unfinished)):
                raise ConfigError(
                    "\n".join([f"{to}: the copy is not what was read:", *map(_plain, wrong)])
                )
    except OSError as error:
        raise ConfigError(f"{args.to}: cannot be written: {error}") from error
    print(f"{_plain(to)}: step {step}, checked; checkpoint.restore={_plain(to)} starts from it")
    return 0


def _prune(args: argparse.Namespace, held: Held) -> int:
    if args.keep < 1:
        raise ConfigError(
            f"--keep {args.keep}: must be 1 or more; to delete all of a run, delete its folder"
        )
    own = args.run / "checkpoints"
    gone = manifest.steps(own)[: -args.keep]
    freed = sum(_bytes(own / f"{step}") for step in gone)
    for step in gone if not args.dry_run else []:
        manifest.delete(own / f"{step}")
    print(
        f"{_plain(own)}: {'would delete' if args.dry_run else 'deleted'} "
        f"{_many(len(gone), 'step')}, {_size(freed)}"
        f"{': ' + ', '.join(map(str, gone)) if gone else ''}"
    )
    return 0


def _plain(text: object) -> str:
    """A path or a line, whole, with escapes for what is not printable."""
    return shortened(line := str(text), len(line))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _bytes(path: Path) -> int:
    try:
        return sum(entry["bytes"] for entry in manifest.read(path)[1].values())
    except Damage:
        return 0


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.1f} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1024
    return f"{number:,.1f} TiB"
