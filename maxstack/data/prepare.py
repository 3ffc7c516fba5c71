"""Turning any source into token shards, in parallel; what is finished survives a crash."""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from maxstack.config import ConfigError, atomic
from maxstack.config.errors import DataError
from maxstack.data.documents import Documents, Split, Tokens
from maxstack.data.shards import MANIFEST, pack
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import Tokenizer, bytes_of, open_tokenizer, sized_tokens_of
from maxstack.data.workers import settle
from maxstack.schema.data import DataConfig

_LARGEST_SHARD = 10_000
_FINISHED = ".finished"
_FORMAT = 2
_ELSEWHERE = {"name", "weight", "holdout", "files", "exclude"}
"""Keys of a source that the documents' identity and the names of the shards answer for."""


@dataclass(frozen=True)
class Shard:
    """Documents start..stop of a source's split, as one file."""

    name: str
    source: str
    split: str
    start: int
    stop: int


def prepare(cfg: DataConfig, out: str, *, workers: int = 1, shard_size: int | None = None) -> None:
    """Write every document of `cfg` as tokens into `out`: files
    <source>-<split>-<n>-of-<count>.array_record and manifest.json.

    The split eval holds what a source's `holdout` keeps from training. Shards that an earlier,
    stopped call finished are kept. ConfigError if `out` holds the shards of other data.
    """
    folder = Path(out)
    tokenizer, splits = open_tokenizer(cfg.tokenizer), _splits(cfg)
    shards = [
        shard
        for name, split, documents in splits
        for shard in _shards(name, split, len(documents), shard_size)
    ]
    plan = _plan(cfg, tokenizer, splits, shards)
    if _complete(folder, plan, shards):
        print(f"{out}: already complete")
        return
    (folder / _FINISHED).mkdir(parents=True, exist_ok=True)
    made = {shard.name: found for shard in shards if (found := _finished(folder, shard, plan))}
    progress = tqdm.tqdm(
        total=sum(shard.stop - shard.start for shard in shards),
        unit=" documents",
        desc=f"to {out}",
        initial=sum(found["documents"] for found in made.values()),
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )
    with progress:
        for shard, written in _write_all(
            cfg,
            splits,
            [shard for shard in shards if shard.name not in made],
            folder,
            plan,
            workers,
        ):
            made[shard.name] = written
            progress.update(written["documents"])
    manifest = _manifest(cfg, tokenizer, plan, shards, made)
    with atomic.writing(folder / MANIFEST, shared=True) as unfinished:
        unfinished.write_text(json.dumps(manifest, indent=1))
    for path in [*(folder / _FINISHED).iterdir(), *folder.glob(f".*{atomic.UNFINISHED}")]:
        path.unlink()
    (folder / _FINISHED).rmdir()
    totals = manifest["totals"]
    print(
        f"{out}: {totals['documents']} documents, {totals['tokens']} tokens, "
        f"{totals['bytes']} bytes of text in {len(shards)} shards"
    )
    print(
        f"train on them: data.sources=[{{kind: array_record, content: tokens, files: "
        f"['{out}/*-train-*.array_record']}}]"
    )


def _splits(cfg: DataConfig) -> list[tuple[str, Split, Documents]]:
    found: list[tuple[str, Split, Documents]] = []
    for place, source in enumerate(cfg.sources):
        name = re.sub(r"[^\w.-]+", "_", source.name or f"{source.kind}-{place}")
        name = f"{name}-{place}" if any(name == other for other, _, _ in found) else name
        found.append((name, "train", open_source(source, place, "train")))
        if source.holdout:
            found.append((name, "eval", open_source(source, place, "eval")))
    return found


def _shards(source: str, split: str, documents: int, size: int | None) -> list[Shard]:
    size = size or max(1, min(_LARGEST_SHARD, math.ceil(documents / 16)))
    count = math.ceil(documents / size)
    return [
        Shard(
            f"{source}-{split}-{n:05d}-of-{count:05d}.array_record",
            source,
            split,
            n * size,
            min(documents, (n + 1) * size),
        )
        for n in range(count)
    ]


def _plan(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    splits: list[tuple[str, Split, Documents]],
    shards: list[Shard],
) -> str:
    """A hash of everything that the shards depend on, the source files' sizes and times
    included."""
    files = [
        (path, os.path.getsize(path), os.stat(path).st_mtime_ns)
        for _, _, documents in splits
        for path in documents.paths()
    ]
    sources = [(name, split, documents.identity()) for name, split, documents in splits]
    read = [source.model_dump(mode="json", exclude=_ELSEWHERE) for source in cfg.sources]
    described = json.dumps(
        [_FORMAT, read, tokenizer.fingerprint, sources, files, [asdict(shard) for shard in shards]]
    )
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _complete(folder: Path, plan: str, shards: list[Shard]) -> bool:
    path = folder / MANIFEST
    if not path.exists():
        return False
    manifest = json.loads(path.read_text())
    if manifest.get("plan") != plan:
        raise ConfigError(
            f"{folder}: holds shards of other data (other documents, tokenizer or shard "
            "size than this config's) "
            "or of an older version; "
            "choose another --out, or delete the folder"
        )
    return all(
        (folder / shard.name).exists()
        and (folder / shard.name).stat().st_size == manifest["shards"][shard.name]["size"]
        for shard in shards
    )


def _finished(folder: Path, shard: Shard, plan: str) -> dict[str, Any] | None:
    note, path = folder / _FINISHED / f"{shard.name}.json", folder / shard.name
    if not note.exists() or not path.exists():
        return None
    found = json.loads(note.read_text())
    return (
        found["shard"]
        if found["plan"] == plan and found["shard"]["size"] == path.stat().st_size
        else None
    )


def _write_all(
    cfg: DataConfig,
    splits: list[tuple[str, Split, Documents]],
    shards: list[Shard],
    folder: Path,
    plan: str,
    workers: int,
) -> Iterator[tuple[Shard, dict[str, Any]]]:
    if not shards:
        return
    sources = {(name, split): documents for name, split, documents in splits}
    with ProcessPoolExecutor(
        min(workers, len(shards)), get_context("spawn"), _Writer.begin, (cfg, sources, folder, plan)
    ) as pool:
        futures: dict[Future[dict[str, Any]], Shard] = {
            pool.submit(_Writer.write, shard): shard for shard in shards
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process died, perhaps for lack of memory; run the same command "
                "again with fewer --workers: "
                "finished shards are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


class _Writer:
    """One worker process."""

    context: tuple[DataConfig, dict[tuple[str, str], Documents], Path, str]

    @classmethod
    def begin(cls, *context: Any) -> None:
        settle()
        cls.context = context  # type: ignore[assignment]

    @classmethod
    def write(cls, shard: Shard) -> dict[str, Any]:
        """Write a shard under a temporary name, rename it, then note that it is finished."""
        from array_record.python.array_record_module import ArrayRecordWriter

        cfg, sources, folder, plan = cls.context
        documents, tokenizer = sources[shard.source, shard.split], open_tokenizer(cfg.tokenizer)
        counts = {"documents": shard.stop - shard.start, "tokens": 0, "bytes": 0}
        try:
            with atomic.writing(folder / shard.name, shared=True) as unfinished:
                writer = ArrayRecordWriter(str(unfinished), "group_size:1")
                for index in range(shard.start, shard.stop):
                    ids, sizes = sized_tokens_of(documents, index, tokenizer)
                    if np.isnan(sizes).any():
                        raise DataError(
                            f"{documents.where(index)}: tokens without the size of their "
                            "text, as older versions kept them; prepare from the text"
                        )
                    counts["tokens"] += len(ids)
                    counts["bytes"] += int(sizes.sum(dtype=np.float64))
                    places = np.flatnonzero(sizes != bytes_of(tokenizer.token_bytes, ids))
                    writer.write(pack(Tokens(ids, np.stack([places, sizes[places]], 1))))
                writer.close()
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"{folder / shard.name} cannot be written: {error}; finished shards are kept"
            ) from error
        with open(folder / shard.name, "rb") as file:
            written = counts | {
                "size": os.path.getsize(file.name),
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
            os.fsync(file.fileno())
        note = folder / _FINISHED / f"{shard.name}.json"
        with atomic.writing(note, shared=True) as unfinished:
            unfinished.write_text(json.dumps({"plan": plan, "shard": written}))
        return written


def _manifest(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    plan: str,
    shards: list[Shard],
    made: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "plan": plan,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "sources": [source.model_dump(mode="json") for source in cfg.sources],
        "totals": {
            key: sum(made[shard.name][key] for shard in shards)
            for key in ("documents", "tokens", "bytes")
        },
        "shards": {
            shard.name: {"source": shard.source, "split": shard.split} | made[shard.name]
            for shard in shards
        },
    }
