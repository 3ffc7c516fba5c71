"""The folder that a GGUF file stands for: its metadata as files of a Hugging Face folder, in the
cache, and a link to it."""

import functools
import json
import os
from pathlib import Path
from typing import Any

from maxstack.config import atomic, storage
from maxstack.data.files import digest
from maxstack.data.gguf.config import config_of
from maxstack.data.gguf.file import FLOATS, GgufFile
from maxstack.data.gguf.tokenizer import tokenizer_files
from maxstack.errors import ConfigError

LINK = "model.gguf"
UNREAD = "tokenizer.unread"
"""Holds the reason why there is no tokenizer."""
ENDING = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Return True for a path that names a GGUF file."""
    return str(path).lower().endswith(ENDING) and not os.path.isdir(path)


def folder_of(path: str) -> Path:
    """Return the folder of the GGUF file at a path, made where the cache does not have it.
    ConfigError for a file that is not supported, DataError for a damaged one."""
    file = Path(path).expanduser().absolute()
    try:
        state = file.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    identity = f"{file}\0{state.st_size}\0{state.st_mtime_ns}\0{_version()}"
    folder = storage.cache_folder() / "gguf" / digest(identity.encode()) / file.stem
    if (folder / LINK).exists():
        return folder
    made = _files(GgufFile(file))
    try:
        with atomic.writing(folder, shared=True) as unfinished:
            unfinished.mkdir()
            for name, content in made.items():
                text = content if isinstance(content, str) else json.dumps(content)
                (unfinished / name).write_text(text, encoding="utf-8")
            (unfinished / LINK).symlink_to(file)
    except OSError as error:
        # Another process may have made it meanwhile.
        if not (folder / LINK).exists():
            raise ConfigError(
                f"{folder}: cannot be written: {error.strerror or error}; set MAXSTACK_CACHE to a "
                "folder with room"
            ) from error
    return folder


@functools.cache
def _version() -> str:
    """Return a hash of the sources of this package, so that a folder is not what an older version
    made of its file."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return digest(b"".join(each.read_bytes() for each in sources))


def _files(file: GgufFile) -> dict[str, Any]:
    config = config_of(file)
    try:
        made = tokenizer_files(file)
    # The weights are of use without it, where tokens are given.
    except ConfigError as error:
        made = {UNREAD: str(error)}
    ids = made.get("generation_config.json", {})
    config |= {key: ids[key] for key in ("bos_token_id", "eos_token_id") if key in ids}
    kinds = [FLOATS[entry.kind].name for entry in file.entries.values() if entry.kind in FLOATS]
    whole = len(kinds) == len(file.entries)
    config["dtype"] = next((kind for kind in kinds if whole and kind != "float32"), "float32")
    return {"config.json": config, **made}
