"""Decides whether to trust the config.yml of a run, which may name code.

Whoever trained the run wrote the file. Its code is accepted if this user wrote it, or with
--trust-code. Training notes its own files, by path and content, in a folder outside of the run's.
The file's owner proves nothing: an unpacked archive belongs to whoever unpacked it."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

from maxstack.config import storage
from maxstack.errors import ConfigError

log = logging.getLogger(__name__)
VARIABLE = "MAXSTACK_TRUST_CODE"
"""Environment variable that hands --trust-code to the processes of a command."""
LEFT = "checkpoints", "versions.json", "metrics.jsonl"
"""Files and folders that tell a run's folder from another one with a config.yml."""
REFUSED = f"{__name__}:refused"
"""Placeholder in a configuration for a function that is not trusted."""
ADVICE = (
    "code that is run is not taken from the record of a run: give it on the command line or in a "
    "YAML file of your own, or add --trust-code if you trust whoever wrote the run"
)


def is_record(file: str) -> bool:
    """Whether a file is the config.yml that a run wrote into its folder."""
    folder, name = os.path.split(file)
    beside = (os.path.join(folder, each) for each in LEFT)
    return name == "config.yml" and any(map(storage.kind, beside))


def is_trusted(file: str) -> bool:
    """Whether this user's own training wrote a record, at this path and with this content; always
    with --trust-code."""
    if os.environ.get(VARIABLE):
        return True
    try:
        note, digest = _note(Path(file))
        # The note's name is of the path and its text of the content: neither a copy elsewhere nor a
        # changed file is trusted. A folder that others may write to proves nothing.
        return note.read_text(encoding="utf-8") == digest and bool(private(note.parent))
    except (OSError, ConfigError):
        return False


def vouch(file: Path) -> None:
    """Note that this user wrote a record, from trusted code alone; log where that fails."""
    try:
        note, digest = _note(file)
        private(note.parent).joinpath(note.name).write_text(digest, encoding="utf-8")
    except (OSError, ConfigError) as error:
        # Training does not stop for it: the note matters only when the run is opened later.
        log.warning("%s: will not be known as yours: %s", file, error)


def private(folder: Path) -> Path:
    """Make a folder that this user alone may read and write, if needed. ConfigError where it
    belongs to another user, or others may write to it; OSError where it cannot be made."""
    # An existing folder is checked, not taken over: somebody else may have made it first.
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
    """Raise ConfigError in place of a function that a run's record names."""
    raise ConfigError(ADVICE)


def _note(file: Path) -> tuple[Path, str]:
    """The path of the note about a record, from its path, and the text of the note, from its
    content. OSError where it cannot be read."""
    named, content = os.fsencode(file.resolve()), file.read_bytes()
    name, digest = (hashlib.sha256(each).hexdigest() for each in (named, content))
    return storage.state_folder() / "runs" / name, digest
