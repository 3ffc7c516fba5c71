"""The folder of a run: its lock, and the files that describe the run."""

import contextlib
import fcntl
import json
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import maxstack
from maxstack import config, strict_json
from maxstack.cluster.peers import Peers
from maxstack.config import trust
from maxstack.errors import ConfigError, DataError

if TYPE_CHECKING:
    from maxstack.schema.config import Config


SEEN = 30.0
"""Seconds until other hosts must see a file."""
OWNER = ".owner"
_tokens: dict[Path, Any] = {}
"""Folder -> token of this process's claim."""
GIT = 10.0
"""Seconds in which git must name the commit."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def folder_of(cfg: "Config") -> Path:
    """Return the folder of a run."""
    return Path(cfg.run.output_dir) / cfg.run.name


def claim(cfg: "Config", first: bool, ending: contextlib.ExitStack) -> Path:
    """Create the run's folder if needed, and lock it until `ending` is closed; ConfigError if
    another process, or another run of this process, holds it."""
    folder = folder_of(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            # A lock of the kernel goes with its process, however that ends, so a killed run leaves
            # no lock. The file itself stays: deleting it would let two processes lock two files.
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
            ending.callback(os.close, lock)
            # Without waiting: a second start is a mistake to report, not a queue.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _own(folder)
    except BlockingIOError as error:
        raise ConfigError(
            f"run.name: {folder} is in use by another process; wait for it, stop it, or "
            "choose another run.name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: cannot write to {folder}: {error.strerror}; choose another "
            "run.output_dir"
        ) from error
    _check_seen_by_all(folder)
    return folder


def _own(folder: Path) -> None:
    """Write this process's claim into the folder, since hosts that mount it may not see each
    other's locks."""
    note = {"token": secrets.token_hex(8), "host": platform.node(), "pid": os.getpid()}
    _tokens[folder.absolute()] = note["token"]
    (folder / OWNER).write_text(json.dumps(note), encoding="utf-8")


def check_owner(folder: Path) -> None:
    """ConfigError if another process has claimed the folder since; the later one continues."""
    mine = _tokens.get(folder.absolute())
    try:
        note = strict_json.read_object(folder / OWNER)
    except DataError:  # there is no claim
        return
    if mine and note.get("token") != mine:
        raise ConfigError(
            f"run.name: process {note.get('pid')} on {note.get('host')} has started writing to "
            f"{folder} "
            "too, because it does not see this process's lock; this process ends without saving. "
            "Give "
            "each run its own run.name"
        )


def _check_seen_by_all(folder: Path) -> None:
    """ConfigError in a process that cannot read a file that process 0 wrote to the folder and
    closed; a mounted bucket shows files once they are closed."""
    if (peers := Peers()).count == 1:
        return
    # A new token for each start: the file of an earlier start says nothing about this mount.
    token, file = peers.exchange("folder", secrets.token_hex(8))[0], folder / ".seen"
    if peers.number == 0:
        file.write_text(token)
    peers.barrier("folder")
    deadline = time.monotonic() + SEEN
    # Polled, because network file systems show a new file late.
    while not (file.exists() and file.read_text() == token):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.output_dir: process {peers.number} on {platform.node()} does not see the "
                "files that "
                f"process 0 writes to {folder}; with several hosts, use a shared folder"
            )
        time.sleep(0.2)


def write_records(cfg: "Config", kernels: Iterable[object], folder: Path) -> None:
    """Write the resolved config.yml, with the chosen kernels as comments, and versions.json."""
    comments = "".join(f"# kernel: {choice}\n" for choice in kernels)
    (folder / "config.yml").write_text(comments + config.dump(cfg))
    trust.vouch(folder / "config.yml")
    versions: dict[str, Any] = {
        "maxstack": version("maxstack"),
        "git": _git_revision(),
        "python": platform.python_version(),
    }
    versions |= {name: version(name) for name in PACKAGES}
    versions["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def _git_revision() -> str | None:
    """Return the commit of the checkout that maxstack runs from; None for an installed package."""
    root = Path(maxstack.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    # --dirty: figures of a changed checkout must not be taken for the commit's.
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=GIT)
    # A start once waited for `git describe` without a limit.
    except subprocess.TimeoutExpired:  # a slow disk, or a git hook
        return None
    return done.stdout.strip() or None
