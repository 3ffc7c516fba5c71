"""Files of tasks: reading them with their documents, and writing them for lm-evaluation-harness.

A name leads to files: a path, a shipped task, or the tasks, groups and tags that the files of a
folder name. A file may include others, whose keys it overrides; a group lists members, each a name
or a mapping whose keys override those of its file. Nothing in a file is run: `!function` is
refused.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxstack import config, strict_json
from maxstack.config import storage
from maxstack.config.compose import merged_tree, presets_dir
from maxstack.config.reader import Node
from maxstack.errors import ConfigError, DataError, installing, shortened
from maxstack.evals.task import Document, Task
from maxstack.evals.task_names import files_of
from maxstack.schema.tasks import GENERATED, OTHERWISE, GroupConfig, TaskConfig

DEEPEST = 8
"""Groups inside groups, and files that include others, at most."""
LIBRARY = "published ones, such as mmlu: --tasks-path FOLDER, as of lm-evaluation-harness's tasks"


def open_tasks(
    names: Sequence[str], folder: str = "", library: str = ""
) -> list[Task | GroupConfig]:
    """Open tasks by the names of shipped ones, by files, also relative to `folder`, or by the names
    of tasks, groups and tags in the folder `library`; each group comes after its tasks. ConfigError
    for a file that cannot be used, DataError for its documents."""
    opened: dict[str, Task | GroupConfig] = {}
    for name in names:
        for part in _open(Node(name, ""), folder, library, 0):
            twin = opened.get(part.name, part)
            # One task may come by several groups and is asked once; two different ones cannot share
            # a name.
            if isinstance(part, Task) and part.cfg != getattr(twin, "cfg", None):
                raise ConfigError(
                    f"task {part.name}: two files have this name; give one of them another"
                )
            opened[part.name] = part
    return [*opened.values()]


def texts_of(name: str) -> list[str]:
    """Return the questions of a task or group, each with each of its answers, without examples:
    what training data must not hold. ConfigError or DataError as in `open_tasks`."""
    texts: list[str] = []
    for part in open_tasks([name]):
        if isinstance(part, Task):
            # Examples come from training splits and may be in training data.
            cfg = part.cfg.model_copy(update={"num_fewshot": 0, "description": ""})
            for question in dataclasses.replace(part, cfg=cfg).questions:
                pairs = [before + after for before, after in question.pairs]
                answers = [f"{question.text} {answer}" for answer in question.right]
                texts += pairs or (answers if question.text else []) or [question.text]
    return texts


def _open(member: Node, folder: str, library: str, depth: int) -> Iterator[Task | GroupConfig]:
    """Open a name, a mapping with a name and keys that override its file's, or a whole group."""
    keys = member.mapping or {}
    if {"group", "task"} <= keys.keys():
        yield from _open_tree(member, folder, library, depth)
        return
    name = str(keys.get("task", keys.get("group", member)).value)
    if depth > DEEPEST:
        raise ConfigError(f"group {name}: more than {DEEPEST} groups inside one another")
    for file in _files(name, folder, library):
        tree = _tree(file, library)
        # Keys of a group's member replace whole keys of its file, as in lm-evaluation-harness;
        # nothing is merged.
        whole = dataclasses.replace(tree, value=(tree.mapping or {}) | keys)
        yield from _open_tree(whole, os.path.dirname(file), library, depth)


def _files(name: str, folder: str, library: str) -> list[str]:
    """Return the files of a name, several for a tag; the name itself for a shipped task."""
    if "/" in name or name.endswith((".yml", ".yaml")):
        return [name if storage.kind(name) == "file" else storage.join(folder, name)]
    found = files_of(library, True).get(name) if library else None
    # A shipped task comes before files of the current folder, a name of --tasks-path before both.
    if not found and not (presets_dir() / "tasks" / f"{name}.yml").is_file():
        found = files_of(folder or ".", False).get(name)
    return found or [name]


def _tree(name: str, library: str, depth: int = 0) -> Node:
    """Read a file over the files that it includes, overriding top-level keys as
    lm-evaluation-harness does."""
    try:
        tree = merged_tree(TaskConfig.PRESETS, name)
    except ConfigError as error:
        # The reader's own words are about YAML; here the cause is known.
        if "tag !function" in (said := str(error)):
            said = f"{said.partition(' is refused')[0]}: is code, and none is run; {OTHERWISE}"
        elif "no configuration preset" in said:
            where = f"{library} names no such task, group or tag" if library else LIBRARY
            said = f"{said}; {where}; or --lm-eval ({installing('eval')})"
        raise ConfigError(said) from None
    entries = dict(tree.mapping or {})
    includes = entries.pop("include", Node([], ""))
    if depth > DEEPEST:
        raise ConfigError(f"{tree.where}: more than {DEEPEST} files include one another in a row")
    below: dict[str, Node] = {}
    for each in includes.value if isinstance(includes.value, list) else [includes]:
        path = os.path.abspath(storage.join(os.path.dirname(name), str(each.value)))
        below |= _tree(path, library, depth + 1).mapping or {}
    return dataclasses.replace(tree, value=below | entries)


def _open_tree(tree: Node, folder: str, library: str, depth: int) -> Iterator[Task | GroupConfig]:
    entries = tree.mapping or {}
    try:
        cfg = config.load(GroupConfig if "group" in entries else TaskConfig, tree)
    except ConfigError as error:
        raise ConfigError(f"{error}; {OTHERWISE}") from None
    if isinstance(cfg, TaskConfig):
        yield _task(cfg, folder)
        return
    listed = entries["task"].value
    assert isinstance(listed, list) and isinstance(cfg, GroupConfig)
    members = [part for each in listed for part in _open(each, folder, library, depth + 1)]
    yield from members
    # A group counts each task once, also one that two of its members name.
    names = dict.fromkeys(part.name for part in members if isinstance(part, Task))
    yield cfg.model_copy(update={"task": (*names,)})


def _task(cfg: TaskConfig, folder: str) -> Task:
    splits, files = _read_splits(cfg, folder)

    def split(name: str, key: str) -> list[Document]:
        if name not in splits:
            raise ConfigError(
                f"task {cfg.task}: {key}: no split {name}; its data has {', '.join(splits)}"
            )
        return [*splits[name]]

    documents = split(cfg.split, "test_split" if cfg.test_split else "validation_split")
    if not documents:
        raise DataError(
            f"task {cfg.task}: {', '.join(files.get(cfg.split, ()))}: no document in it"
        )
    examples: Sequence[Document] = cfg.fewshot_config.samples or ()
    if cfg.num_fewshot and cfg.examples != "samples":
        examples = split(cfg.examples, "fewshot_split")
    return Task(cfg, documents, examples, files)


def _read_splits(
    cfg: TaskConfig, folder: str
) -> tuple[Mapping[str, Iterable[Document]], dict[str, list[str]]]:
    """Return documents by split, and the files that they come from by split."""
    given = dict(cfg.dataset_kwargs or {})
    if cfg.dataset_path == GENERATED:
        from maxstack.evals import minimal_pairs

        try:
            return {cfg.split: minimal_pairs.documents(cfg.dataset_name or "", **given)}, {}
        except TypeError as error:
            raise ConfigError(
                f"task {cfg.task}: dataset_kwargs: {', '.join(given)}; maxstack's documents take "
                "count and seed"
            ) from error
    if cfg.dataset_path != "json":
        return _load_dataset(cfg, given), {}
    named = given.pop("data_files", None)
    if named is None or given:
        more = f" {', '.join(given)} is not read;" if given else ""
        raise ConfigError(
            f"task {cfg.task}: dataset_kwargs:{more} give data_files, a path or several, or a "
            f"mapping of splits to them; {OTHERWISE}"
        )
    files: dict[str, list[str]] = {}
    documents: dict[str, list[Document]] = {}
    for split, paths in (named if isinstance(named, dict) else {"train": named}).items():
        each = [paths] if isinstance(paths, str) else paths
        files[split] = [_find(cfg, str(path), folder) for path in each]
        rows = [row for path in files[split] for row in _read(cfg, path)]
        # As in a table, a field that only other documents have is null.
        fields = {key: None for row in rows for key in row}
        documents[split] = [fields | row for row in rows]
    return documents, files


def _load_dataset(cfg: TaskConfig, given: dict[str, Any]) -> Mapping[str, Iterable[Document]]:
    """Load a data set by Hugging Face's library, as lm-evaluation-harness does."""
    name = f"task {cfg.task}: dataset_path: {cfg.dataset_path} {cfg.dataset_name or ''}".rstrip()
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: is read by Hugging Face's library: pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    # Published files ask for it; no code of a data set is run here.
    given.pop("trust_remote_code", None)
    try:
        return datasets.load_dataset(cfg.dataset_path, cfg.dataset_name, **given)
    except Exception as error:  # of the library, a file or the network
        what = shortened(f"{type(error).__name__}: {error}", 300)
        raise ConfigError(
            f"{name}: cannot be had: {what}; without a network it must lie in a folder of this "
            "name below the current one, or in the library's cache (HF_HOME) from an earlier run"
        ) from error


def _find(cfg: TaskConfig, path: str, folder: str) -> str:
    for candidate in (path, storage.join(folder, path)):
        if storage.kind(candidate) == "file":
            return candidate
    raise ConfigError(
        f"task {cfg.task}: dataset_kwargs.data_files: {path}: no such file, neither from the "
        f"current folder nor beside the task's file in {folder or '.'}"
    )


def _read(cfg: TaskConfig, path: str) -> list[dict[str, Any]]:
    """Read the objects of a JSON list or of JSON lines."""
    text = storage.read_whole(path, storage.LARGE)
    # By content: files of both kinds are called .json.
    if text.lstrip()[:1] == b"[":
        rows = strict_json.parse(text, path)
    else:
        lines = enumerate(text.splitlines(), 1)
        rows = [
            strict_json.parse(line, f"{path}:{number}") for number, line in lines if line.strip()
        ]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"task {cfg.task}: {path}: document {number} is no JSON object")
    return rows


def write_for_harness(parts: Sequence[Task | GroupConfig], folder: Path) -> None:
    """Write tasks and groups as files NAME.yaml that lm-evaluation-harness reads from any folder,
    and the documents that maxstack makes as JSON lines beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        name, cfg = part.name, part if isinstance(part, GroupConfig) else part.cfg
        # What is unset stays out, so that the harness's own defaults hold.
        fields = cfg.model_dump(mode="json", exclude_unset=True)
        if isinstance(part, Task):
            files = {split: [*map(_absolute, paths)] for split, paths in part.files.items()}
            if part.cfg.dataset_path == GENERATED:
                # The harness cannot make these documents; it reads the very ones that maxstack
                # asks.
                rows = folder / f"{name}.jsonl"
                rows.write_text("".join(json.dumps(each) + "\n" for each in part.documents))
                files = {part.cfg.split: [str(rows)]}
                fields["dataset_path"] = "json"
                del fields["dataset_name"]
            if files:
                fields["dataset_kwargs"] = {"data_files": files}
        (folder / f"{name}.yaml").write_text(config.dump(fields))


def _absolute(path: str) -> str:
    return path if storage.is_url(path) else os.path.abspath(path)
