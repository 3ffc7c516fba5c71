"""Facts that must be the same in all processes of a run, for the roll call: hosts that see
different files under the same path would otherwise train on different data.

Each process digests maxstack's code, jax's settings, and every file, folder or module that a value
of the configuration names; the roll call compares the digests and names the key where two differ.
Corpora are too large to be read whole, so a digest holds every name and size, and the content of at
most SAMPLED files, of large ones three pieces: a file that differs elsewhere alone is missed.
"""

import glob
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from maxstack.config.own_kinds import is_own
from maxstack.data.files import match_files
from maxstack.errors import DataError
from maxstack.schema.data import Files

if TYPE_CHECKING:
    from maxstack.schema.config import Config

PLACES = {"run", "distributed", "checkpoint"}
"""Sections whose paths a run writes to, so that hosts may differ in them."""
SAMPLED = 128
"""Files of a set whose bytes are hashed; of the others names and sizes."""
WHOLE, PIECE = 1 << 20, 1 << 16
"""Bytes of the largest file that is hashed whole, and of each of the three pieces (beginning,
middle, end) that are hashed of a larger one."""
FREE = re.compile(
    "cache|debug|dump|log|pprint|profil|traceback|visible_devices|cross_host|timeout|num_cpu_devices"
)
"""Settings of jax that change no value, or belong to each process."""
OWN_FLAGS = re.compile("dump|log|host_platform_device_count")


def facts(cfg: "Config") -> dict[str, Any]:
    """Plain data: digests of maxstack's code, of modules and files that the configuration names,
    and jax's settings."""
    import jax

    # Not their order, nor those that belong to each process, such as where it writes dumps.
    flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    settings = {
        name: str(value) for name, value in jax.config.values.items() if not FREE.search(name)
    }
    return {
        "code": {"maxstack": _digest(Path(__file__).parent, "**/*.py", 10_000)},
        "jax": settings,
        "XLA_FLAGS": " ".join(sorted(flag for flag in flags if not OWN_FLAGS.search(flag))),
        "content": dict(_content(cfg.model_dump(mode="json", exclude=PLACES), cfg)),
    }


def _content(value: Any, section: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Key of the configuration -> digest of what its value names."""
    if isinstance(section, Files):
        try:
            files = [
                (file.key, Path(file.path)) for file in match_files(section) if not file.version
            ]
            yield f"{key}.files", _digest_of(files)
        except (DataError, OSError) as error:  # told once all are there
            yield f"{key}.files", str(error)
    if isinstance(value, dict):
        for name, inner in value.items():
            below = section.get(name) if isinstance(section, dict) else getattr(section, name, None)
            yield from _content(inner, below, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for number, (inner, below) in enumerate(zip(value, section or value, strict=False)):
            yield from _content(inner, below, f"{key}.{number}")
    # The patterns of a source were digested above, by the files that they match.
    elif isinstance(value, str) and not key.rpartition(".")[0].endswith(".files"):
        yield from ((key, found) for found in _named(key, value))


def _named(key: str, value: str) -> Iterator[str]:
    """The digest of the file, folder or module that a value names; nothing where it names none.
    Finding a module imports the packages around it, so it is done only for `call` and `kind`, which
    must be trusted."""
    # Any text a.b:c looks like a function, and finding the module a.b runs the package a: a
    # source's name in a run's record could run code of the working folder.
    if key.endswith((".call", ".kind")) and is_own(value):
        try:
            found = importlib.util.find_spec(value.partition(":")[0])
        except (ImportError, ValueError):
            found = None
        if found and found.origin and os.path.isfile(found.origin):
            yield _digest_of([(found.name, Path(found.origin))])
    elif os.sep in value and (path := Path(value).expanduser()).exists():
        # A run's manifests hold the checksums of its files already.
        is_run = (path / "checkpoints").is_dir()
        yield _digest(path, "checkpoints/*/manifest.json" if is_run else "*")


def _digest(path: Path, pattern: str, sampled: int = SAMPLED) -> str:
    """The digest of a file, or of the files of a folder that match."""
    if path.is_file():
        return _digest_of([(path.name, path)])
    found = map(Path, glob.glob(f"{glob.escape(f'{path}')}/{pattern}", recursive=True))
    return _digest_of([(f"{p.relative_to(path)}", p) for p in found if p.is_file()], sampled)


def _digest_of(files: Sequence[tuple[str, Path]], sampled: int = SAMPLED) -> str:
    """Number of files, their bytes, and a digest of names, sizes and samples of the content, equal
    for equal files wherever they lie."""
    found, total = xxhash.xxh3_128(), 0
    # By name: a folder's order is the file system's, and paths differ between hosts.
    entries = sorted((name, path, path.stat().st_size) for name, path in files)
    for number, (name, path, size) in enumerate(entries):
        found.update(f"{name}\0{size}\0".encode())
        total += size
        # Evenly spaced by name, so every host reads the same ones.
        if number % -(-len(entries) // sampled) == 0:
            with path.open("rb") as file:
                if size <= WHOLE:
                    found.update(file.read())
                    continue
                for at in (0, size // 2, size - PIECE):
                    file.seek(at)
                    found.update(file.read(PIECE))
    return f"{len(entries)} files of {total:,} bytes, {found.hexdigest()[:16]}"
