"""The configuration of a run from a YAML file, a preset's name or a mapping.

The file is composed with what it extends and with overrides into a tree that knows where each value
came from. Code that an untrusted record names is taken out of the tree, before anything validates
or runs it. Then the tree is completed by what the weights' folder says (architecture, tokenizer,
image preprocessing) unless the same file or the command line says otherwise; last it is validated
and checked against the rules between sections. What came from where decides throughout.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter

import maxstack
from maxstack import config
from maxstack.config import Fault, own_kinds, storage, trust
from maxstack.config.annotations import listed
from maxstack.config.compose import plain, presets_dir, supply
from maxstack.config.reader import Node
from maxstack.config.spelling import did_you_mean
from maxstack.data import hub
from maxstack.errors import ConfigError, shortened
from maxstack.schema import rules
from maxstack.schema.config import Config, Model, RunConfig
from maxstack.schema.data import DataConfig, SentencePieceTokenizer, holds_text
from maxstack.schema.stack import StackConfig

log = logging.getLogger(__name__)
WEIGHTS = ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5"
"""Endings of files that hold or list weights."""
GIVEN = "override", "arguments", "default"
"""Origins that are not files."""
USUAL = RunConfig.model_fields["compilation_cache"].default
INSTEAD: dict[str, Any] = {
    "call": trust.REFUSED,
    "executable": None,
    "compilation_cache": USUAL,
    "flags": {},
}
"""Keys that name code (XLA's flags among them, which can name tools to start and files of
programs), with the values that replace them where they are not trusted."""


def load(path: config.Source, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of a run from a file, a preset's name or a mapping, with `a.b.c=value`
    overrides. ConfigError names the place of every problem, and code named by the record of a
    run."""
    return _load_trusted(path, overrides)


def load_alone(path: config.Source, overrides: Sequence[str] = ()) -> Config:
    """The same without the rules between sections, for callers that use one section."""
    return _load_trusted(path, overrides, faults=lambda _: [])


def load_record(own: Path, overrides: Sequence[str] = (), runs_code: bool = False) -> Config:
    """Load the configuration that a run left in its folder. Untrusted code in it is a ConfigError
    where the caller runs it (`runs_code`); else it is replaced by the default, or by a function
    that fails, with a line in the log."""
    return _load_trusted(own / "config.yml", overrides, record=True, refuses=runs_code)


def load_tree(
    path: config.Source,
    overrides: Sequence[str] = (),
    faults: Callable[[Config], Sequence[Fault]] = rules.faults,
    sift: Callable[[Node], Node] = lambda tree: tree,
) -> tuple[Config, Node]:
    """The configuration, and the merged tree that knows where each value came from; `sift`
    removes from the tree what must not be used."""
    cfg, tree = config.load_tree(
        Config,
        path,
        overrides,
        readers={"model": model_of_folder, "teacher": model_of_folder},
        completed=lambda tree: _complete(own_kinds.import_kinds(sift(tree))),
        faults=faults,
    )
    cfg = _place_in_run(cfg, tree)
    if own_kinds.joined(own_kinds.Kind) or cfg.run.kinds:
        kinds = own_kinds.own_kinds(config.plain_data(cfg))
        cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"kinds": kinds})})
    return cfg, tree


@functools.cache
def _warn(line: str) -> None:
    """Log a line once, however often a configuration is read."""
    log.warning("left out: %s", line)


def _load_trusted(
    path: config.Source,
    overrides: Sequence[str],
    *,
    faults: Callable[[Config], Sequence[Fault]] = rules.faults,
    record: bool = False,
    refuses: bool = True,
) -> Config:
    """The configuration without untrusted code of records; `record`: the file is one, with all that
    it extends."""
    found = list[str]()

    def is_suspect(where: str) -> bool:
        file = _file(where)
        # What the user types, and what comes with maxstack, needs no trust.
        if file in GIVEN or Path(file).resolve().is_relative_to(presets_dir()):
            return False
        return (record or trust.is_record(file)) and not trust.is_trusted(file)

    def sift(node: Node, *path: str) -> Node:
        entries = node.mapping or {}
        if isinstance(node.value, list):
            entries = {f"{index}": item for index, item in enumerate(node.value)}
        if not path or path[-1] not in INSTEAD:
            inside = {key: sift(item, *path, key) for key, item in entries.items()}
            # A scalar has no entries and stays what it is, as an empty mapping does.
            value = [*inside.values()] if isinstance(node.value, list) else inside or node.value
            # Nothing could stand in its place.
            names_code = path[-1:] == ("kind",) or path[:-1] == ("run", "trackers")
            if names_code and own_kinds.is_own(value) and is_suspect(node.where):
                raise ConfigError(f"{node.where}: {'.'.join(path)}: {trust.ADVICE}")
            return dataclasses.replace(node, value=value)
        # A trusted file may hold the mapping and a record one entry of it.
        places = node.where, *(each.where for each in entries.values())
        # The defaults, which every record holds, name nobody's code.
        if node.value in (None, {}, USUAL) or not any(map(is_suspect, places)):
            return node
        found.append(f"{node.where}: {'.'.join(path)}: {trust.ADVICE}")
        return Node(INSTEAD[path[-1]], node.where)

    cfg, _ = load_tree(path, overrides, faults, sift)
    if found and refuses:
        raise ConfigError("\n".join(found))
    for line in found:
        _warn(line)
    return cfg


def _place_in_run(cfg: Config, tree: Node) -> Config:
    """The configuration with the run's folder in place of {run} in tokenizer paths. A tokenizer
    that the run has learned lies beside its config.yml, wherever that is read from."""
    said = tree.at("data", "tokenizer", "path")
    file = Path(_file(said.where)) if said else Path()
    # The run's folder may have been moved or copied since: what lies beside its config.yml counts,
    # not where its configuration says that it was.
    own = file.parent if file.name == "config.yml" else None

    def placed(data: DataConfig | None) -> DataConfig | None:
        if not data or not isinstance(data.tokenizer, SentencePieceTokenizer):
            return data
        path = data.tokenizer.path.replace("{run}", f"{cfg.run.output_dir}/{cfg.run.name}")
        if data.tokenizer.learn and own:
            path = find_learned_tokenizer(own, path)
        tokenizer = data.tokenizer.model_copy(update={"path": path})
        return data.model_copy(update={"tokenizer": tokenizer})

    data, evaluation = placed(cfg.data), placed(cfg.eval.data)
    if data is not cfg.data:
        cfg = cfg.model_copy(update={"data": data})
    if evaluation is not cfg.eval.data:
        update = {"eval": cfg.eval.model_copy(update={"data": evaluation})}
        cfg = cfg.model_copy(update=update)
    return cfg


def find_learned_tokenizer(own: Path, path: str) -> str:
    """Path of the tokenizer that the run with the folder `own` has learned and has at `path` in its
    configuration: in its folder, if it is there."""
    beside = own / Path(path).name
    return str(beside) if beside.is_file() else path


def run_folder(path: str) -> Path | None:
    """The folder of the run that `path` is, or is a checkpoint of; None for others."""
    # Runs lie on file systems alone.
    if storage.is_url(path) or storage.kind(path) != "directory":
        return None
    folder = Path(path)
    inside = folder.parent if folder.name.isdigit() else folder
    own = inside.parent if inside.name == "checkpoints" else folder
    return own if (own / "config.yml").is_file() else None


def check_no_run_beside(path: str) -> None:
    """For a path that does not exist: ConfigError if runs lie in the same folder."""
    beside = Path(path).parent
    if runs := sorted(file.parent.name for file in beside.glob("*/config.yml")):
        raise ConfigError(
            f"{shortened(path, 200)}: no such run; {beside} has {listed(runs)}"
            f"{did_you_mean(Path(path).name, runs)}"
        )


def model_of_folder(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """The folder at `path`, or the model of the hub called `name`, pinned to a commit; and the
    model section for it: the architecture in its config.json, with its weights, computed in float32
    if its weights are float32, else in bfloat16; or the section of a run, or of one of its
    checkpoints."""
    from maxstack.hf.contents import Contents, open_contents
    from maxstack.hf.preprocessor import pictures

    if own := run_folder(path):
        model = config.plain_data(load_record(own).model)
        return path, model | {"weights": path}
    is_path = storage.kind(path) is not None
    # A folder that is there takes precedence over a model of the hub.
    of_hub = hub.is_model_name(name) and not is_path
    if not of_hub and not is_path:
        raise ConfigError(f"{shortened(path, 200)}: {hub.NOWHERE}")
    if of_hub:
        check_no_run_beside(path)
    # The commit stands in the run's config.yml, so a resume and another machine read the same
    # weights.
    folder = hub.pin_commit(name) if of_hub else path
    if runs := sorted(file.parent.name for file in Path(folder).glob("*/config.yml")):
        raise ConfigError(f"{shortened(path, 200)}: is a folder of runs; give one: {listed(runs)}")
    # config.json alone is enough to show a configuration; whoever reads weights asks for them.
    names = os.listdir(folder) if os.path.isdir(folder) else []
    alone = bool(names) and not any(name.endswith(WEIGHTS) for name in names)
    contents = Contents(folder, weights=False) if of_hub or alone else open_contents(folder)
    dtype = "float32" if contents.dtype == "float32" else "bfloat16"
    if contents.dtype == "float16":
        _warn(f"{folder}: holds float16; computed in bfloat16 unless model.dtype says otherwise")
    section = contents.mapping | {"weights": folder, "dtype": dtype}
    if contents.model.tokens and (said := pictures(contents.folder)):
        section["image_size"] = said.side
    return folder, section


def parse_model(section: Any) -> StackConfig:
    """Validate a model section by itself; a decoder where it names no kind. Raises pydantic's
    ValidationError."""
    return TypeAdapter[StackConfig](Model).validate_python({"kind": "decoder"} | section)


def _complete(tree: Node) -> Node:
    """The tree with the tokenizer of the folder that the weights come from, unless the same file or
    the command line gives another, also for eval.data. ConfigError where there is text and the
    folder has no readable tokenizer: the token ids of another one would mean nothing to the
    weights."""
    tree = _with_images(_with_tokenizer(_with_head(tree)))
    path = "eval", "data", "tokenizer"
    tokenizer = tree.at("data", "tokenizer")
    # Evaluation texts are cut by the model's tokenizer unless eval.data names its own.
    if tokenizer is None or tokenizer.mapping is None or tree.at(*path):
        return tree
    return supply(tree, path, plain(tokenizer), tokenizer.where)


def _with_images(tree: Node) -> Node:
    """The tree of an image model with its objective, and with rows of one image each."""
    model, kind = tree.at("model"), tree.at("model", "kind")
    if model is None or kind is None or kind.value == "decoder":
        return tree
    try:
        section = parse_model(plain(model))
    except pydantic.ValidationError:  # which is told of the whole configuration
        return tree
    if section.tokens is None:
        return tree
    images: Any = section
    if tree.at("objective") is None:
        tree = supply(tree, ("objective",), {}, model.where)
    if tree.at("objective", "kind") is None:
        tree = supply(tree, ("objective", "kind"), section.OBJECTIVE, model.where)
    for path in (("data",), ("eval", "data")):
        for key, value in {"seq_len": section.tokens, "packing": "none"}.items():
            if tree.at(*path) is not None and tree.at(*path, key) is None:
                tree = supply(tree, (*path, key), value, model.where)
    return _with_pixels(tree, images.image_size)


def _with_pixels(tree: Node, side: int) -> Node:
    """The tree with the image preprocessing of the folder or run that the weights come from, for
    images of this side; data.image takes precedence, with a warning. eval.data copies data."""
    from maxstack.hf.folder import Folder
    from maxstack.hf.preprocessor import KEYS, of_run, pictures

    path = "data", "image"
    origin, data = _origin(tree), tree.at("data")
    known = tree.at(*path, "resize")
    # A run's own record has its preprocessing already, though the folder that it came from may be
    # gone.
    if origin and data and not (known and Path(_file(known.where)).name == "config.yml"):
        own = run_folder(origin.value)
        said = (
            of_run(str(own), load_record(own))
            if own
            else pictures(Folder(origin.value, weights=False))
        )
        if said:
            tree = _with_said(tree, path, said.at(side), said.where)
    image = tree.at(*path)
    if image is None or image.mapping is None or tree.at("eval", "data") is None:
        return tree
    given = {key: plain(node) for key, node in image.mapping.items() if key in KEYS}
    return _with_said(tree, ("eval", *path), given, image.where)


def _with_said(tree: Node, path: tuple[str, ...], values: dict[str, Any], where: str) -> Node:
    """The tree with those values at `path` that are not given; differences to given ones are
    logged."""
    if tree.at(*path) is None:
        tree = supply(tree, path, {}, where)
    for key, value in values.items():
        given = tree.at(*path, key)
        if given is None:
            tree = supply(tree, (*path, key), value, where)
        elif plain(given) != value:
            place = f"{'.'.join(path)}.{key}: that of {given.where}"
            log.warning("%s, in place of %s of %s", place, value, where)
    return tree


def _with_head(tree: Node) -> Node:
    """The tree with the head that the objective needs: a score for a reward model, a value estimate
    for a policy with that baseline."""
    kind, baseline = tree.at("objective", "kind"), tree.at("objective", "advantage", "baseline")
    path, wanted = ("model", "head"), None
    if kind is not None and kind.value == "reward":
        wanted = "scores"
    elif kind is not None and baseline is not None and baseline.value == "value":
        wanted = "value"
    if kind is None or wanted is None:
        return tree
    if tree.at(*path) is None:
        tree = supply(tree, path, {}, kind.where)
    return supply(tree, (*path, wanted), True, kind.where)


def _file(where: str) -> str:
    return where.rsplit(":", 1)[0]


def _origin(tree: Node) -> Any:
    """The node of the folder or run that the weights come from: model.weights, or the folder beside
    the import at checkpoint.restore; None where there is none."""
    folder, restored = tree.at("model", "weights"), tree.at("checkpoint", "restore")
    # `maxstack import` leaves tokenizer and preprocessing in the folder hf/ of the run that it
    # makes.
    if (folder is None or folder.value is None) and restored:
        beside = Path(f"{restored.value}").expanduser() / "hf"
        folder = dataclasses.replace(restored, value=str(beside)) if beside.is_dir() else None
    return folder if folder and isinstance(folder.value, str) else None


def _with_tokenizer(tree: Node) -> Node:
    """The tree with the tokenizer of model.weights, or of the import at checkpoint.restore."""
    folder, given = _origin(tree), tree.at("data", "tokenizer")
    sources = tree.at("data", "sources")
    if folder is None or (given and folder is not tree.at("model", "weights")):
        return tree
    if given:
        origins = {_file(node.where) for node in (given, *(given.mapping or {}).values())}
        # Whoever names tokenizer and weights in one file means the pair. One of another file, such
        # as a preset, was meant for other weights: its token ids would mean nothing to these.
        if "override" in origins or _file(given.where) == _file(folder.where):
            return tree
    from maxstack.hf.tokenizer import tokenizer_of, unread

    if own := run_folder(folder.value):
        data = load_record(own).data
        tree = supply(tree, ("data", "tokenizer"), config.plain_data(data.tokenizer), str(own))
        if data.template and not tree.at("data", "template"):
            tree = supply(tree, ("data", "template"), data.template, str(own))
        return tree
    local = hub.model_folder(folder.value, weights=False)
    if tokenizer := tokenizer_of(local):
        # The name, not the path in this machine's cache: the record is read on other machines too.
        named = hub.is_model_name(folder.value) or hub.is_gguf(folder.value)
        if named or storage.is_url(folder.value):
            tokenizer["path"] = f"{folder.value}/{Path(tokenizer['path']).name}"
        if given:
            log.warning(
                "data.tokenizer: that of %s, in place of the one at %s", folder.value, given.where
            )
        return supply(tree, ("data", "tokenizer"), tokenizer, folder.value)
    listed = sources.value if sources and isinstance(sources.value, list) else []
    # Without text there is nothing to cut: token shards have the ids already.
    if any(holds_text(plain(source)) for source in listed if source.mapping):
        raise ConfigError(f"{folder.where}: {unread(local)}")
    return tree


def _load(config: config.Source, *overrides: str) -> Config:
    """Return the configuration of a run from a file, a preset's name or a mapping, with overrides
    such as "train.steps=10". ConfigError names the place of every problem."""
    return load(config, overrides)


maxstack._call(__name__, _load)
