"""Token shards: ArrayRecord files of token ids, and the manifest beside them."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.documents import Tokens
from maxstack.data.files import File, refuse_absent
from maxstack.errors import DataError, quoted
from maxstack.schema.data import Files
from maxstack.schema.data import Tokenizer as TokenizerConfig

MANIFEST = "manifest.json"
_SIZED = 0x10


def pack(tokens: Tokens) -> bytes:
    """Return a record of little-endian integers.

    A byte with the width of an id (2 or 4 bytes), then the ids. Where sizes are known, _SIZED is
    added to that byte, and after it stand K in 4 bytes and the sizes, 4 bytes each.
    """
    ids, sizes = tokens
    width = 2 if not len(ids) or int(ids.max()) < 1 << 16 else 4
    begin = bytes([width])
    if sizes is not None:
        begin = (
            bytes([width | _SIZED]) + np.append(len(sizes), sizes.ravel()).astype("<u4").tobytes()
        )
    return begin + ids.astype(f"<u{width}").tobytes()


def unpack(record: bytes, where: str) -> Tokens:
    """Return the tokens of a record. DataError, naming `where`, if it is no record of tokens."""
    kind = record[0] if record else 0
    width = kind & ~_SIZED
    at = 1
    sizes = None
    if kind & _SIZED and len(record) >= 5:
        at = 5 + 8 * int.from_bytes(record[1:5], "little")
        sizes = np.frombuffer(record[5:at], np.uint8)
    intact = width in (2, 4) and (sizes is not None) == bool(kind & _SIZED)
    if not intact or len(record) < at or (len(record) - at) % width:
        raise DataError(
            f"{where}: not a record of tokens as `maxstack data prepare` writes them; "
            "set `content: text` if these are texts"
        )
    ids = np.frombuffer(record, f"<u{width}", offset=at).astype(np.int32)
    return Tokens(ids, None if sizes is None else sizes.view("<u4").reshape(-1, 2).astype(np.int64))


def check_size(path: str) -> None:
    """DataError if a shard's size is not the one in the manifest beside it, or it is not in it."""
    if read_manifest(os.path.dirname(path)) is None:
        return
    listed = _find_entry(path)
    if listed is None:
        raise DataError(
            f"{path}: not listed in the {MANIFEST} beside it; it belongs to other data: "
            "remove it or narrow `files`"
        )
    size = storage.stamp(path)[0]
    if listed["size"] != size:
        raise DataError(
            f"{path}: {size} bytes, but {MANIFEST} says {listed['size']}; copy it again, "
            "or run `maxstack data prepare` again"
        )


def check_whole(cfg: Files, files: Sequence[File]) -> None:
    """DataError if a folder of shards has no manifest, or lists some of a source that are not
    there."""
    beside = {os.path.dirname(file.path): file for file in files}
    held = {file.path for file in files}
    for folder, file in beside.items():
        manifest, path = read_manifest(folder), storage.join(folder, MANIFEST)
        if manifest is None and not cfg.partial:
            raise DataError(
                f"{path}: no such file, so it is not known whether all shards are there: "
                "`maxstack data prepare` writes it last, and goes on by the same command; copy it "
                "with the shards, or set `partial: true` for this source (`content: text` if these "
                "are texts)"
            )
        listed = [storage.join(folder, name) for name in (manifest or {"shards": ()})["shards"]]
        refuse_absent(cfg, file, [each for each in listed if each not in held], path)


def refuse_as_text(path: str) -> None:
    """DataError if the manifest beside a file says that it holds tokens."""
    if _find_entry(path) is not None:
        raise DataError(
            f"{path}: tokens that `maxstack data prepare` wrote, read as text; set "
            "`content: tokens` for this source"
        )


def refuse_held_out(paths: list[str]) -> None:
    """DataError if training would read a shard that holds held-out documents."""
    for path in paths:
        if (_find_entry(path) or {}).get("split") == "eval":
            raise DataError(
                f"{path}: held-out documents among those to train on; narrow `files` to "
                "*-train-*.array_record, and give *-eval-*.array_record to eval.data"
            )


def check_tokenizer(paths: list[str], cfg: TokenizerConfig) -> None:
    """DataError if the manifest beside a shard names another tokenizer than the configured one."""
    from maxstack.data.tokenizers import open_tokenizer

    for folder in sorted({os.path.dirname(path) for path in paths}):
        manifest, tokenizer = read_manifest(folder), open_tokenizer(cfg)
        if manifest is not None and manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            made = manifest["tokenizer"]
            raise DataError(
                f"{folder}: these shards were made by tokenizer {made['name']} "
                f"({made['fingerprint']}), data.tokenizer is {tokenizer.name} "
                f"({tokenizer.fingerprint}); configure the tokenizer that they were made by, with "
                "the same bos and eos"
            )


def _find_entry(path: str) -> dict[str, Any] | None:
    """Return a shard's entry in the manifest beside it."""
    manifest = read_manifest(os.path.dirname(path))
    return manifest["shards"].get(os.path.basename(path)) if manifest else None


def read_manifest(folder: str) -> dict[str, Any] | None:
    """Return what `maxstack data prepare` wrote of a folder's shards; None if it wrote nothing."""
    path = storage.join(folder, MANIFEST)
    try:
        return _parse_manifest(path, storage.stamp(path))
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=16)
def _parse_manifest(path: str, stamp: tuple[int, int | str]) -> dict[str, Any]:
    try:
        manifest = strict_json.parse_object(storage.read_whole(path), path)
        if not isinstance(manifest["shards"], dict) or not isinstance(
            manifest["tokenizer"]["fingerprint"], str
        ):
            raise ValueError("no shards and tokenizer")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(
            f"{path}: not a manifest of `maxstack data prepare` ({quoted(error)}); move "
            "it away or make the shards again"
        ) from error
    return manifest
