"""Folders of packages, told from those of runs. Imports only the standard library."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = b"maxstack.package/"
# `serve` asks this of every folder, so it must not read a manifest of a large model whole.
HEAD = 1 << 20
"""Bytes of a manifest in which its format is looked for."""


def is_served(folder: Path) -> bool:
    """Return True for a package and for a folder of versions of one. Checkpoints have numbers and
    manifests too, of another format."""
    if not folder.is_dir():
        return False
    paths = [folder] + [path for _, path in versions_of(folder)]
    return any(_says_package(path / MANIFEST) for path in paths)


def versions_of(folder: Path) -> list[tuple[int, Path]]:
    """Return the sub-folders that are named by a number and have a manifest."""
    try:
        return [
            (int(path.name), path)
            for path in folder.iterdir()
            # ASCII digits alone, because `int` takes those of other scripts too; and no leading
            # zeros, or two folders would be one version.
            if path.name.isascii() and path.name.isdecimal() and len(path.name) < 20
            if str(int(path.name)) == path.name and (path / MANIFEST).is_file()
        ]
    except OSError as error:
        log.warning("%s: cannot be read: %s", folder, error)
        return []


def _says_package(manifest: Path) -> bool:
    try:
        with manifest.open("rb") as file:
            return FORMAT in file.read(HEAD)
    except OSError:
        return False
