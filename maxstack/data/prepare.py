"""Writing any source as token shards, in parallel; finished shards survive a crash.

Documents of each source and split are divided into shards by their number alone, so files are the
same for any engine and number of workers. A shard is a task: a worker tokenizes its documents into
a file that appears under its name when it is whole, and then leaves a note with its counts. A hash
of all that the shards depend on, the plan, stands in notes and manifest: the same command keeps
shards with its plan and makes the others, and a finished folder of another plan is refused. The
manifest is written last, so a folder without one is unfinished.
"""

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxstack import strict_json
from maxstack.config import atomic, storage
from maxstack.config.writer import inline
from maxstack.data.documents import Documents, Split, Tokens, content_hash
from maxstack.data.engines import Engine, Processes, SharedFiles, check_shared, shared_files
from maxstack.data.files import digest
from maxstack.data.filters import summary
from maxstack.data.filters.pipeline import filter_sources
from maxstack.data.infilling import check_marks
from maxstack.data.quarantine import Quarantine
from maxstack.data.shards import MANIFEST, pack
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import Tokenizer, open_tokenizer, tokenize_with_sizes
from maxstack.errors import ConfigError, DataError, StoreError
from maxstack.report.progress import progress
from maxstack.schema.data import DataConfig, SentencePieceTokenizer

_LARGEST_SHARD = 10_000
_STEP = 1 << 22
"""Bytes of text between reports of progress."""
_FINISHED, _BEGUN = ".finished", "begun"
_FORMAT, _HASHES = 2, "hashes"
_OF_TRAINING = {"name", "weight", "epochs", "fill_in_the_middle"}
_ELSEWHERE = _OF_TRAINING | {"holdout", "holdout_by", "files", "exclude", "partial"}
"""Keys of a source that the documents' identity and the names of the shards contain, or that are of
training alone."""


Sources = dict[tuple[str, Split], Documents]
"""The documents of each source, by its name and split."""


class Progress(NamedTuple):
    """Progress of a shard since the last report."""

    documents: int
    bytes: int
    """Of text."""
    counts: dict[str, Any] | None
    """At the end of a shard: its size, its hash and what it holds."""


@dataclass(frozen=True)
class Shard:
    """Documents start..stop of a source's split, as one file."""

    name: str
    source: str
    split: Split
    start: int
    stop: int


def prepare(
    cfg: DataConfig,
    out: str,
    engine: Engine | None = None,
    *,
    shard_size: int | None = None,
    task_texts: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write every document of `cfg` as tokens into `out`: files
    <source>-<split>-<n>-of-<count>.array_record and manifest.json.

    data.steps are applied before; `task_texts` are those of evaluation tasks that they name.
    `engine`: None: one process of this machine. The split eval holds what a source's `holdout`
    keeps from training. Shards that an earlier, stopped call finished are kept. ConfigError if
    `out` holds the shards of other data.
    """
    _check_folder(out)
    check_marks(cfg)
    tokenizer = open_tokenizer(cfg.tokenizer)
    splits = _open_splits(cfg)
    steps = None
    engine = engine or Processes(1)
    if cfg.steps:
        splits, steps = filter_sources(cfg, splits, out, engine, task_texts or {})
    shards = [
        shard
        for (name, split), documents in splits.items()
        for shard in _plan_shards(name, split, len(documents), shard_size)
    ]
    plan = _hash_inputs(cfg, tokenizer, splits, shards)
    if _is_complete(out, plan, shards):
        print(f"{out}: already complete")
        return
    # What an earlier, stopped call finished under the same plan.
    made = {
        shard.name: counts
        for shard in shards
        if (counts := _read_finished(out, shard, plan)) is not None
    }
    read = (path for documents in splits.values() for path in documents.paths())
    files = shared_files(read, storage.join(out, f"{_FINISHED}/{_BEGUN}"))
    context = cfg, splits, out, plan, files
    missing = [shard for shard in shards if shard.name not in made]
    documents = sum(shard.stop - shard.start for shard in shards)
    done, size = sum(counts["documents"] for counts in made.values()), 0
    with progress(documents, f"to {out}", "documents", done) as bar:
        for shard, written in engine.map(_write, context, missing):
            size += written.bytes
            speed = size / 1e6 / max(1e-9, bar.format_dict["elapsed"])
            bar.set_postfix_str(f"{speed:.1f} MB/s", refresh=False)
            bar.update(written.documents)
            if written.counts is not None:
                made[shard.name] = written.counts
    # Over all shards in their order: a worker sees its own alone, and the bound is one of the data.
    quarantine = _quarantine(cfg)
    for reason in (reason for shard in shards for reason in made[shard.name].get("damaged", ())):
        quarantine.add(reason, reason)
        print(f"passed over: {reason}")
    if copies := _count_copies(shards, made):
        print(
            f"{copies} held-out documents stand among those to train on, too, word for word; "
            "holdout_by: content of their source keeps copies together"
        )
    manifest = _manifest(cfg, tokenizer, plan, shards, made)
    manifest["files"] = {}
    for (source, split), own in splits.items():
        if split == "train":
            pins = [[file.path, *file.pin()] for file in own.files]
            manifest["files"][source] = pins
    if steps:
        manifest["steps"] = steps["steps"]
    # In this order: without notes and without a manifest all work would be done again.
    _write_json(storage.join(out, MANIFEST), manifest, indent=1)
    storage.delete(out, _FINISHED, f".*{atomic.UNFINISHED}")
    if steps:
        summary.show(steps, out)
    totals = manifest["totals"]
    print(
        f"{out}: {totals['documents']} documents, {totals['tokens']} tokens, "
        f"{totals['bytes']} bytes of text in {len(shards)} shards"
    )
    for split in dict.fromkeys(shard.split for shard in shards):
        names = [name for name, of in splits if of == split]
        print(f"{split} on them: {_format_overrides(cfg, out, split, names)}")
    if isinstance(cfg.tokenizer, SentencePieceTokenizer) and cfg.tokenizer.learn:
        print(f"their tokenizer, for a run of any name: data.tokenizer.path={cfg.tokenizer.path}")


def _count_copies(shards: Sequence[Shard], made: dict[str, dict[str, Any]]) -> int:
    """Count held-out documents that are also trained on, by hashes of their tokens. Remove the
    hashes, which the manifest does not keep."""
    hashes: dict[Split, list[int]] = {"train": [], "eval": []}
    for shard in shards:
        hashes[shard.split] += made[shard.name].pop(_HASHES, [])
    held, trained = (np.array(hashes[split], np.uint64) for split in ("eval", "train"))
    return int(np.isin(held, trained).sum())


def _format_overrides(cfg: DataConfig, out: str, split: Split, names: Sequence[str]) -> str:
    """Return the overrides by which a run of the same configuration reads the shards of a split,
    written under these names, in place of the texts."""
    whole = [source for source in cfg.sources if split == "train" or source.holdout]
    sources = [
        {"kind": "array_record", "content": "tokens", "files": [f"{out}/{name}-{split}-*"]}
        | source.model_dump(mode="json", include=_OF_TRAINING, exclude_defaults=True)
        for name, source in zip(names, whole, strict=True)
    ]
    if split == "train":
        words = [f"data.sources={inline(sources)}", *(["data.steps=[]"] if cfg.steps else [])]
    else:
        rest = cfg.model_dump(mode="json", exclude={"sources", "steps"}, exclude_defaults=True)
        words = [f"eval.data={inline({'sources': sources} | rest)}"]
    return " ".join(map(shlex.quote, words))


def _check_folder(out: str) -> None:
    """Raise ConfigError for a local path where no folder can be written."""
    if storage.is_url(out):
        return
    there = next(path for path in (Path(out), *Path(out).absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "cannot be written" if there.is_dir() else "is no folder"
        raise ConfigError(f"--out {out}: {there} {what}; choose another folder")


def _open_splits(cfg: DataConfig) -> Sources:
    splits: Sources = {}
    for index, source in enumerate(cfg.sources):
        # A source's name is a part of file names and may hold anything.
        name = re.sub(r"[^\w.-]+", "_", source.name or f"{source.kind}-{index}")
        if (name, "train") in splits:
            name = f"{name}-{index}"
        splits[name, "train"] = open_source(source, index, "train")
        if source.holdout:
            splits[name, "eval"] = open_source(source, index, "eval")
    return splits


def _plan_shards(source: str, split: Split, documents: int, size: int | None) -> list[Shard]:
    # By the documents alone, never by workers, so that any machine continues the same shards.
    size = size or max(1, min(_LARGEST_SHARD, math.ceil(documents / 16)))
    count = math.ceil(documents / size)
    names = [f"{source}-{split}-{n:05d}-of-{count:05d}.array_record" for n in range(count)]
    return [
        Shard(name, source, split, n * size, min(documents, (n + 1) * size))
        for n, name in enumerate(names)
    ]


def _hash_inputs(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    splits: Sources,
    shards: list[Shard],
) -> str:
    """Return a hash of everything that the shards depend on, the source files' sizes and times
    included."""
    # Times of files too: a file that was edited in place may have the same size.
    files = [
        (path, *storage.stamp(path)) for documents in splits.values() for path in documents.paths()
    ]
    sources = [(*split, documents.identity()) for split, documents in splits.items()]
    # Keys of training alone are left out, so that another weight keeps the shards.
    read = [source.model_dump(mode="json", exclude=_ELSEWHERE) for source in cfg.sources]
    text = [tokenizer.fingerprint, cfg.longest]
    if cfg.beyond != "split":  # only then, so that older folders keep their hash
        text.append(cfg.beyond)
    described = json.dumps(
        [_FORMAT, read, *text, sources, files, [asdict(shard) for shard in shards]]
    )
    return digest(described.encode())


def _is_complete(folder: str, plan: str, shards: list[Shard]) -> bool:
    path = storage.join(folder, MANIFEST)
    if storage.kind(path) is None:
        return False
    manifest = strict_json.parse_object(storage.read_whole(path), path)
    if manifest.get("plan") != plan:
        raise ConfigError(
            f"{folder}: holds shards of other data (other documents, tokenizer or shard "
            "size than this config's) or of an older version; choose another --out, or delete the "
            "folder"
        )
    return all(
        _has_size(storage.join(folder, shard.name), manifest["shards"][shard.name]["size"])
        for shard in shards
    )


def _has_size(path: str, size: int) -> bool:
    return storage.kind(path) is not None and storage.stamp(path)[0] == size


def _read_finished(folder: str, shard: Shard, plan: str) -> dict[str, Any] | None:
    note = storage.join(folder, f"{_FINISHED}/{shard.name}.json")
    if storage.kind(note) is None:
        return None
    noted = strict_json.parse_object(storage.read_whole(note), note)
    path = storage.join(folder, shard.name)
    same = noted["plan"] == plan and _has_size(path, noted["shard"]["size"])
    return noted["shard"] if same else None


def _write(
    context: tuple[DataConfig, Sources, str, str, SharedFiles], shard: Shard
) -> Iterator[Progress]:
    """Write a shard, then note that it is finished."""
    cfg, sources, folder, plan, files = context
    # Before anything is written: another machine may mount another folder under this path.
    check_shared(files)
    documents, tokenizer = sources[shard.source, shard.split], open_tokenizer(cfg.tokenizer)
    path = storage.join(folder, shard.name)
    try:
        with storage.replacing(path) as unfinished:
            counts = yield from _write_records(unfinished, shard, documents, tokenizer, cfg)
        # After the shard has its name, since a note says that it is whole.
        note = storage.join(folder, f"{_FINISHED}/{shard.name}.json")
        _write_json(note, {"plan": plan, "shard": counts})
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{path} cannot be written: {error}; finished shards are kept") from error
    yield Progress(0, 0, counts)


def _write_records(
    path: Path,
    shard: Shard,
    documents: Documents,
    tokenizer: Tokenizer,
    cfg: DataConfig,
) -> Generator[Progress, None, dict[str, Any]]:
    """Write the records of a shard and return its counts. A document that cannot be read, if
    data.quarantine allows it, becomes one without tokens, so that the others keep their places."""
    from array_record.python.array_record_module import ArrayRecordWriter

    counts, quarantine = {"documents": 0, "tokens": 0, "bytes": 0}, _quarantine(cfg)
    hashes, held_out = list[int](), any(source.holdout for source in cfg.sources)
    told = dict(counts)
    # One record a group, so that a document is read without its neighbours; zstd's first level
    # gives the size of the third in 45 ms where that takes 60.
    writer = ArrayRecordWriter(str(path), "group_size:1,zstd:1")
    for index in range(shard.start, shard.stop):
        try:
            ids, sizes = tokenize_with_sizes(documents, index, tokenizer, cfg.longest, cfg.beyond)
        except StoreError:
            raise
        except DataError as error:
            # An empty document in its place keeps the numbers of the others, and so every order.
            quarantine.add(f"{index}", str(error))
            ids, sizes = np.zeros(0, np.int32), np.zeros(0, np.float32)
        if np.isnan(sizes).any():
            raise DataError(
                f"{documents.where(index)}: tokens without the size of their "
                "text, as older versions kept them; prepare from the text"
            )
        # Only sizes that differ from the vocabulary's are stored.
        special = np.flatnonzero(sizes != tokenizer.bytes_of(ids))
        writer.write(pack(Tokens(ids, np.stack([special, sizes[special]], 1))))
        if held_out:
            hashes.append(content_hash(ids))
        counts["documents"] += 1
        counts["tokens"] += len(ids)
        # float32 counts exactly only to 2**24.
        counts["bytes"] += int(sizes.sum(dtype=np.float64))
        if counts["bytes"] - told["bytes"] > _STEP or index + 1 == shard.stop:
            step = {key: counts[key] - told[key] for key in counts}
            yield Progress(step["documents"], step["bytes"], None)
            told = dict(counts)
    writer.close()
    with open(path, "rb") as file:
        # Before the rename: after a power failure a name must not stand for an empty file.
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        damaged = [*quarantine.news().damaged.values()]
        more: dict[str, Any] = {"damaged": damaged} if damaged else {}
        if held_out:
            more[_HASHES] = hashes
        return counts | {"size": os.path.getsize(path), "sha256": sha256} | more


def _quarantine(cfg: DataConfig) -> Quarantine:
    return Quarantine(cfg.quarantine, "data.quarantine")


def _manifest(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    plan: str,
    shards: list[Shard],
    made: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    counts = [made[shard.name] for shard in shards]
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
            "documents": sum(each["documents"] for each in counts),
            "tokens": sum(each["tokens"] for each in counts),
            "bytes": sum(each["bytes"] for each in counts),
        },
        "shards": {
            shard.name: {"source": shard.source, "split": shard.split} | made[shard.name]
            for shard in shards
        },
    }


def _write_json(path: str, value: Any, indent: int | None = None) -> None:
    with storage.replacing(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=indent))
