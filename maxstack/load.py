"""A run's configuration as it is given: a YAML file, a preset's name or a mapping, composed,
completed, validated and held against the rules between its sections."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxstack import config
from maxstack.config import ConfigError, Node, plain, shortened, supply
from maxstack.data import hub
from maxstack.schema import rules
from maxstack.schema.config import Config
from maxstack.schema.data import holds_text

log = logging.getLogger(__name__)


def load(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run in a file, a preset's name or a mapping, with `a.b.c=value`
    overrides. ConfigError names every problem's place."""
    return load_tree(path, overrides)[0]


def load_tree(
    path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[Config, Node]:
    """As `load`, with the merged tree that knows where each value came from."""
    return config.load_tree(
        Config,
        path,
        overrides,
        readers={"model": model_of_folder},
        completed=_completed,
        check=rules.check,
    )


def model_of_folder(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """What `model: {from: name}` means, and the folder at `path`, or else the model of the hub,
    pinned, that it names: the architecture that its config.json says, computed in float32 if its
    weights are that and in bfloat16 if not, and its weights to start from."""
    from maxstack.hf.contents import Contents, opened

    of_hub = hub.NAME.fullmatch(name) is not None and not os.path.exists(path)
    if not of_hub and not os.path.exists(path):
        raise ConfigError(f"{shortened(path, 200)}: {hub.NOWHERE}")
    where = hub.pinned(name) if of_hub else path
    contents = Contents(where, weights=False) if of_hub else opened(where)
    return where, contents.mapping | {
        "weights": where,
        "dtype": "float32" if contents.dtype == "float32" else "bfloat16",
    }


def _completed(tree: Node) -> Node:
    """With the tokenizer of the folder that the weights come from, unless the same file or the
    command line gives another, and with that for eval.data too. ConfigError where the folder
    has none to be read and there is text: tokens of another would spoil the weights."""
    tree = _with_tokenizer(tree)
    tokenizer, evaluated = tree.at("data", "tokenizer"), tree.at("eval", "data")
    if (
        tokenizer is None
        or tokenizer.mapping is None
        or evaluated is None
        or evaluated.at("tokenizer")
    ):
        return tree
    return supply(tree, ("eval", "data", "tokenizer"), plain(tokenizer), tokenizer.where)


def _file(where: str) -> str:
    return where.rsplit(":", 1)[0]


def _with_tokenizer(tree: Node) -> Node:
    """With the tokenizer of model.weights, or of the import that checkpoint.restore names."""
    folder, given = tree.at("model", "weights"), tree.at("data", "tokenizer")
    restored, sources = tree.at("checkpoint", "restore"), tree.at("data", "sources")
    if (folder is None or folder.value is None) and restored and not given:
        beside = Path(f"{restored.value}").expanduser() / "hf"
        folder = dataclasses.replace(restored, value=str(beside)) if beside.is_dir() else None
    own = ("override", _file(folder.where)) if folder else ()
    if not folder or not isinstance(folder.value, str) or (given and _file(given.where) in own):
        return tree
    from maxstack.hf.tokenizer import tokenizer_of, unread

    of_hub = hub.named(folder.value)
    place = hub.snapshot(folder.value, weights=False) if of_hub else Path(folder.value)
    if found := tokenizer_of(place):
        if of_hub:
            found["path"] = f"{folder.value}/{Path(found['path']).name}"
        if given:
            log.warning(
                "data.tokenizer: that of %s, in place of the one at %s", folder.value, given.where
            )
        return supply(tree, ("data", "tokenizer"), found, folder.value)
    listed = sources.value if sources and isinstance(sources.value, list) else []
    if any(holds_text(plain(source)) for source in listed if source.mapping):
        raise ConfigError(f"{folder.where}: {unread(place)}")
    return tree
