"""Folders of packages, told from those of runs. Imports only the standard library."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = b"maxstack.package/"
HEAD = 1 << 20
"""Bytes of a manifest in which its format is looked for."""


def is_served(folder: Path) -> bool:
    """True for a package, and for a folder of versions of one. Checkpoints have numbers and
    manifests too, of another format."""
    return folder.is_dir() and any(
        _says_package(path / MANIFEST)
        for path in [folder, *(path for _, path in versions_of(folder))]
    )


def versions_of(folder: Path) -> list[tuple[int, Path]]:
    """The sub-folders that have a number for their name, and a manifest."""
    try:
        return [
            (int(path.name), path)
            for path in folder.iterdir()
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
