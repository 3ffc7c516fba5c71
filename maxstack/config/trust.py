"""Whose word a file is. The config.yml of a run was written by whoever trained it. What it names
that runs code counts where that was this user, as a note outside of the run's folder says (an
archive that they unpack is theirs too, whoever packed it), or where they say --trust-code."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

from maxstack.config import storage
from maxstack.errors import ConfigError

log = logging.getLogger(__name__)
VARIABLE = "MAXSTACK_TRUST_CODE"
"""Environment variable by which --trust-code reaches the processes of a command."""
LEFT = "checkpoints", "versions.json", "metrics.jsonl"
"""Files and folders that tell a run's folder from another with a config.yml."""
REFUSED = f"{__name__}:refused"
"""Stands in a configuration for a function that is not trusted."""
ADVICE = (
    "code that is run is not taken from the record of a run: give it on the command line or in a "
    "YAML file of your own, or add --trust-code if you trust whoever wrote the run"
)


def is_record(file: str) -> bool:
    """True for the config.yml that a run has written into its folder."""
    folder, name = os.path.split(file)
    beside = (os.path.join(folder, each) for each in LEFT)
    return name == "config.yml" and any(map(storage.kind, beside))


def is_trusted(file: str) -> bool:
    """True for a record that this user's own training wrote, at this path and with this content,
    and for any with --trust-code."""
    if os.environ.get(VARIABLE):
        return True
    try:
        note, digest = _note(Path(file))
        return note.read_text(encoding="utf-8") == digest and bool(private(note.parent))
    except (OSError, ConfigError):
        return False


def vouch(file: Path) -> None:
    """Note that this user wrote a record, from trusted code alone; the log says where that cannot
    be noted."""
    try:
        note, digest = _note(file)
        private(note.parent).joinpath(note.name).write_text(digest, encoding="utf-8")
    except (OSError, ConfigError) as error:
        log.warning("%s: will not be known as yours: %s", file, error)


def private(folder: Path) -> Path:
    """The folder, made if needed, which this user alone may read and write. ConfigError where it
    belongs to another user, or others may write to it; OSError where it cannot be made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: belongs to another user, or others may write to it, and what lies there "
            "would be run; delete it, or name a folder of your own"
        )
    folder.chmod(0o700)
    return folder


def refused(*_: Any, **__: Any) -> NoReturn:
    """In place of a function that a run's record names: ConfigError."""
    raise ConfigError(ADVICE)


def _note(file: Path) -> tuple[Path, str]:
    """Where a record is noted, by its path, and what its note says, by its content. OSError where
    it cannot be read."""
    named, content = os.fsencode(file.resolve()), file.read_bytes()
    name, digest = (hashlib.sha256(each).hexdigest() for each in (named, content))
    return storage.state_folder() / "runs" / name, digest
