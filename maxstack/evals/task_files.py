"""Files of tasks: reading them with their documents, and writing them for lm-evaluation-harness."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxstack import config
from maxstack.config import storage
from maxstack.config.compose import merged_tree
from maxstack.data import json_files
from maxstack.errors import ConfigError, DataError, installing
from maxstack.evals.task import Document, Task
from maxstack.schema.tasks import GENERATED, OTHERWISE, GroupConfig, TaskConfig

DEEPEST = 8
"""Groups inside groups at most."""


def open_tasks(names: Sequence[str], folder: str = "") -> list[Task | GroupConfig]:
    """Tasks by the names of shipped ones or by files, found from `folder` too; each group comes
    after its tasks. ConfigError for a file that cannot be used, DataError for its documents."""
    opened: dict[str, Task | GroupConfig] = {}
    for name in names:
        for part in _opened(name, folder, 0):
            twin = opened.get(part.name, part)
            if isinstance(part, Task) and part.cfg != getattr(twin, "cfg", None):
                raise ConfigError(
                    f"task {part.name}: two files have this name; give one of them another"
                )
            opened[part.name] = part
    return [*opened.values()]


def _opened(name: str, folder: str, depth: int) -> Iterator[Task | GroupConfig]:
    if depth > DEEPEST:
        raise ConfigError(f"group {name}: more than {DEEPEST} groups inside one another")
    if ("/" in name or name.endswith((".yml", ".yaml"))) and storage.kind(name) != "file":
        name = storage.join(folder, name)
    try:
        tree = merged_tree(TaskConfig.PRESETS, name)
    except ConfigError as error:
        if "no configuration preset" not in str(error):
            raise
        raise ConfigError(
            f"{error}; those of lm-evaluation-harness, such as mmlu: --lm-eval "
            f"({installing('eval')})"
        ) from None
    if "group" not in (tree.mapping or {}):
        yield _task(config.load(TaskConfig, name), os.path.dirname(name))
        return
    group = config.load(GroupConfig, name)
    members = [
        part for each in group.task for part in _opened(each, os.path.dirname(name), depth + 1)
    ]
    yield from members
    yield group.model_copy(update={"task": tuple(part.name for part in members)})


def _task(cfg: TaskConfig, folder: str) -> Task:
    splits, files = _splits(cfg, folder)

    def split(name: str, key: str) -> Sequence[Document]:
        if name not in splits:
            raise ConfigError(
                f"task {cfg.task}: {key}: no split {name}; its data has {', '.join(splits)}"
            )
        return splits[name]

    documents = split(cfg.split, "test_split" if cfg.test_split else "validation_split")
    if not documents:
        raise DataError(f"task {cfg.task}: {', '.join(files[cfg.split])}: no document in it")
    examples: Sequence[Document] = cfg.fewshot_config.samples or ()
    if cfg.num_fewshot and cfg.examples and cfg.examples != "samples":
        examples = split(cfg.examples, "fewshot_split")
    return Task(cfg, documents, examples, files)


def _splits(cfg: TaskConfig, folder: str) -> tuple[dict[str, list[Document]], dict[str, list[str]]]:
    """Documents by split, and the files that they lie in by split."""
    given = dict(cfg.dataset_kwargs)
    if cfg.dataset_path == GENERATED:
        from maxstack.evals import minimal_pairs

        try:
            made = minimal_pairs.documents(cfg.dataset_name or "", **given)
        except TypeError as error:
            raise ConfigError(
                f"task {cfg.task}: dataset_kwargs: {', '.join(given)}; maxstack's documents take "
                "count and seed"
            ) from error
        return {cfg.split: [*made]}, {}
    named = given.pop("data_files", None)
    if named is None or given:
        more = f" {', '.join(given)} is not read;" if given else ""
        raise ConfigError(
            f"task {cfg.task}: dataset_kwargs:{more} give data_files, a path or several, or a "
            f"mapping of splits to them; {OTHERWISE}"
        )
    by_split = named if isinstance(named, dict) else {"train": named}
    files = {
        split: [
            _found(cfg, str(path), folder)
            for path in ([given] if isinstance(given, str) else given)
        ]
        for split, given in by_split.items()
    }
    documents = {
        split: [document for path in paths for document in _read(cfg, path)]
        for split, paths in files.items()
    }
    return documents, files


def _found(cfg: TaskConfig, path: str, folder: str) -> str:
    for candidate in (path, storage.join(folder, path)):
        if storage.kind(candidate) == "file":
            return candidate
    raise ConfigError(
        f"task {cfg.task}: dataset_kwargs.data_files: {path}: no such file, neither from the "
        f"current folder nor beside the task's file in {folder or '.'}"
    )


def _read(cfg: TaskConfig, path: str) -> list[Document]:
    """The objects of a JSON list or of JSON lines."""
    text = storage.read(path)
    if text.lstrip()[:1] == b"[":
        rows = json_files.parse(text, path)
    else:
        lines = enumerate(text.splitlines(), 1)
        rows = [
            json_files.parse(line, f"{path}:{number}") for number, line in lines if line.strip()
        ]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"task {cfg.task}: {path}: document {number} is no JSON object")
    return rows


def _absolute(path: str) -> str:
    return path if storage.is_url(path) else os.path.abspath(path)


def exported(parts: Sequence[Task | GroupConfig], folder: Path) -> None:
    """Write tasks and groups as files NAME.yaml that lm-evaluation-harness reads from any folder,
    and documents that maxstack makes as JSON lines beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        name, cfg = part.name, part if isinstance(part, GroupConfig) else part.cfg
        fields = cfg.model_dump(mode="json", exclude_unset=True)
        if isinstance(part, Task):
            files = {split: [*map(_absolute, paths)] for split, paths in part.files.items()}
            if part.cfg.dataset_path == GENERATED:
                rows = folder / f"{name}.jsonl"
                rows.write_text("".join(json.dumps(each) + "\n" for each in part.documents))
                files = {part.cfg.split: [str(rows)]}
                fields["dataset_path"] = "json"
                del fields["dataset_name"]
            fields["dataset_kwargs"] = {"data_files": files}
        (folder / f"{name}.yaml").write_text(config.dump(fields))
