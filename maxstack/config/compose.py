"""Composing a configuration from files: extends, presets, like, overrides. Knows no field names,
only the words of composition."""

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxstack.config.errors import ConfigError
from maxstack.config.quoting import quoted, shortened
from maxstack.config.reader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    Node,
    no_configuration,
    read_yaml,
)
from maxstack.config.spelling import did_you_mean

Presets = Mapping[str, Sequence[str]]
"""Top-level key -> folders of the presets folder that hold its presets; "" stands for the whole
file."""
Readers = Mapping[str, Callable[[str, str], tuple[str, Mapping[str, Any]]]]
"""Top-level key -> what its `from: name` means: a function from the path that it is, if it is one,
and the name to what was read, by name, and the section's content; ConfigError if it cannot be
read."""

_WORDS = ("extends", "preset", "from", "kind")
_SEGMENT = re.compile(r'"([^"]*)"|([^."=]+)')


def presets_dir() -> Path:
    """The folder of presets that ships with the package: configs/ inside it when installed, beside
    it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def merged_tree(
    presets: Presets,
    path: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    defaults: Any = None,
    readers: Readers | None = None,
    known: Mapping[str, Collection[str]] | None = None,
) -> Node:
    """The merged tree of a file, a preset's name or what would stand in a file, and `a.b.c=value`
    overrides; each node knows what gave it.

    `defaults` is plain data that overrides with an index find a list in where the file gives none.
    `known` is the keys of each section, "" for the whole file: a file that is extended, or that a
    section names, and has none of them is refused without quoting any of its own.
    """
    composer = _Composer(presets, readers or {}, known or {})
    if isinstance(path, Mapping):
        tree = composer.expanded(_sourced(path, "arguments"), Path.cwd())
    else:
        tree = composer.file(composer.find(str(path), "", Path.cwd(), "configuration"), "")
    for keys, node, text in sorted(
        (_override(text) for text in overrides),
        key=lambda o: (len(o[0]), o[0][-1] not in ("kind", "preset", "from")),
    ):
        if keys[1:] == ["preset"] and keys[0] in presets:
            keys = keys[:1]
        if keys[1:] == ["from"] and keys[0] in (readers or {}):
            keys, node = keys[:1], Node({"from": node}, "override")
        if len(keys) == 1:
            node = (
                composer.expanded(Node({keys[0]: node}, "override"), Path.cwd()).at(keys[0]) or node
            )
        tree = _assign(tree, keys, node, text, 0, defaults)
    return _inherited(tree, "", {})


def plain(node: Node) -> Any:
    """Dicts, lists and scalars without their places."""
    left = [2 * MAX_NODES]

    def convert(node: Node) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ConfigError(
                f"{node.where}: like: and aliases expand to more than {2 * MAX_NODES} "
                "values; this is no configuration"
            )
        if isinstance(node.value, dict):
            return {key: convert(item) for key, item in node.value.items()}
        return (
            [convert(item) for item in node.value] if isinstance(node.value, list) else node.value
        )

    return convert(node)


def merge(below: Node | None, above: Node) -> Node:
    """`above` over `below`: mappings merge key by key; anything else, another `kind`, and null
    replace."""
    if below is None or above.replaces:
        return above
    under, over = below.mapping, above.mapping
    if under is None or over is None or _kind_changes(under, over):
        return dataclasses.replace(above, replaces=True)
    merged = under | {key: merge(under.get(key), item) for key, item in over.items()}
    return Node(merged, above.where, below.replaces)


def underlay(tree: Node, path: Sequence[str], below: Mapping[str, Any]) -> Node:
    """The tree with a default mapping beneath what is given at `path`, unless that is complete
    because it names its own `kind`."""
    given = tree.at(*path)
    if given is None or given.mapping is None or ("kind" in given.mapping and "kind" in below):
        return tree
    return _put(
        tree,
        path,
        merge(_sourced(dict(below), "default"), dataclasses.replace(given, replaces=False)),
    )


def supply(tree: Node, path: Sequence[str], value: Mapping[str, Any], where: str) -> Node:
    """The tree with a mapping at `path`, below a mapping that is there."""
    above = tree.at(*path[:-1])
    if above is None or above.mapping is None:
        return tree
    grown = dataclasses.replace(
        above, value=above.mapping | {path[-1]: _sourced(dict(value), where)}
    )
    return _put(tree, path[:-1], grown)


def _put(tree: Node, path: Sequence[str], node: Node) -> Node:
    if not path:
        return node
    assert tree.mapping is not None
    return dataclasses.replace(
        tree, value=tree.mapping | {path[0]: _put(tree.mapping[path[0]], path[1:], node)}
    )


def _kind_changes(under: dict[str, Node], over: dict[str, Node]) -> bool:
    return "kind" in under and "kind" in over and under["kind"].value != over["kind"].value


class _Composer:
    """Reads files, each once, and puts what they extend beneath them."""

    def __init__(self, presets: Presets, readers: Readers, known: Mapping[str, Collection[str]]):
        self._presets, self._readers, self._known, self._root = (
            presets,
            readers,
            known,
            presets_dir(),
        )
        self._read: dict[tuple[Path, str], Node] = {}
        self._open: list[Path] = []

    def file(self, path: Path, section: str) -> Node:
        """The file's tree with everything it extends."""
        real = path.resolve()
        if real in self._open:
            circle = [*self._open[self._open.index(real) :], real]
            raise ConfigError(
                f"{shown(path)}: extends itself in a circle: "
                f"{' -> '.join(shown(p) for p in circle)}"
            )
        if len(self._open) > MAX_DEPTH:
            raise ConfigError(
                f"{shown(path)}: more than {MAX_DEPTH} files extend one another in a row"
            )
        if (real, section) not in self._read:
            node, known = read_file(path), self._known.get(section)
            if (
                (self._open or section)
                and known
                and node.mapping
                and not node.mapping.keys() & {*known, *_WORDS}
            ):
                raise no_configuration(next(iter(node.mapping.values())).where)
            self._open.append(real)
            self._read[real, section] = self._extended(node, path.parent, section)
            self._open.pop()
        return self._read[real, section]

    def find(self, name: str, section: str, folder: Path, what: str, where: str = "") -> Path:
        """The file that `name` means: a path relative to `folder`, or a preset's name."""
        folders = [self._root / inside for inside in self._presets.get(section, ())]
        as_path = folder / os.path.expanduser(name)
        is_path = "/" in name or os.sep in name or name.endswith((".yml", ".yaml"))
        candidates = [as_path] if is_path else [inside / f"{name}.yml" for inside in folders]
        if is_path and not section:
            candidates.append(self._root / name.removeprefix("configs/"))
        for candidate in candidates:
            if os.path.exists(candidate) and not os.path.isdir(candidate):
                return candidate
        prefix = f"{where}: " if where else ""
        names = sorted({file.stem for inside in folders for file in inside.glob("*.yml")})
        run = os.path.exists(as_path / "config.yml")
        if os.path.isdir(as_path) and (is_path or run):
            instead = (
                f"; give {name.rstrip('/')}/config.yml"
                if run
                else did_you_mean(Path(name).name, names)
            )
            raise ConfigError(f"{prefix}{shortened(name)} is a folder, not a YAML file{instead}")
        typed = re.sub(r"\.ya?ml$", "", Path(name).name)
        hint = did_you_mean(typed, names) or (
            "" if is_path else "; give one of these, or a path that ends in .yml"
        )
        there = (
            f"; the presets are {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
            if names
            else ""
        )
        raise ConfigError(
            f"{prefix}no {f'{what} ' if what else ''}{'file' if is_path else 'preset'} "
            f"{shortened(name)}{there}{hint}"
        )

    def expanded(self, node: Node, folder: Path) -> Node:
        """The tree with preset names at the top-level keys that have presets replaced by what they
        name."""
        entries = dict(node.mapping or {})
        for key in self._presets:
            if key in entries:
                entries[key] = self._preset(entries[key], key, folder)
        return dataclasses.replace(node, value=entries)

    def _extended(self, node: Node, folder: Path, section: str) -> Node:
        entries = dict(node.mapping or {})
        listed = entries.pop("extends", None)
        names = (
            [] if listed is None else listed.value if isinstance(listed.value, list) else [listed]
        )
        below: Node | None = None
        for name in names:
            if not isinstance(name.value, str):
                raise ConfigError(
                    f"{name.where}: extends: got {quoted(name.value)}; allowed: a "
                    "preset's name, a path, or a list of them"
                )
            sibling = folder / f"{name.value}.yml"
            own_folder = section and os.path.exists(sibling) and sibling.resolve() != self._open[-1]
            path = (
                sibling
                if own_folder
                else self.find(name.value, section, folder, section, name.where)
            )
            below = merge(below, self.file(path, section))
        own = dataclasses.replace(node, value=entries)
        return merge(below, own if section else self.expanded(own, folder))

    def _preset(self, node: Node, section: str, folder: Path) -> Node:
        if isinstance(node.value, str):
            base = self.file(self.find(node.value, section, folder, section, node.where), section)
            return dataclasses.replace(base, where=node.where, replaces=True)
        entries = node.mapping or {}
        if "extends" in entries:
            raise ConfigError(
                f"{entries['extends'].where}: {section}.extends: inside a section the "
                "key is preset; extends is for whole files"
            )
        if "from" in entries and section in self._readers:
            return self._read_from(entries, section, folder, node.where)
        if "preset" not in entries:
            return node
        name = entries["preset"]
        if not isinstance(name.value, str):
            raise ConfigError(
                f"{name.where}: {section}.preset: got {quoted(name.value)}; allowed: a "
                "preset's name or a path"
            )
        base = self.file(self.find(name.value, section, folder, section, name.where), section)
        rest = Node({key: item for key, item in entries.items() if key != "preset"}, node.where)
        return dataclasses.replace(merge(base, rest), where=node.where, replaces=True)

    def _read_from(self, entries: dict[str, Node], section: str, folder: Path, where: str) -> Node:
        name = entries["from"]
        if not isinstance(name.value, str):
            raise ConfigError(
                f"{name.where}: {section}.from: got {quoted(name.value)}; allowed: a "
                "path, or a name"
            )
        if "preset" in entries:
            raise ConfigError(
                f"{name.where}: {section}.from: preset and from both say what the "
                f"{section} is; give one"
            )
        path = shown(folder / os.path.expanduser(name.value))
        try:
            source, content = self._readers[section](path, name.value)
        except ConfigError as error:
            raise ConfigError(f"{name.where}: {section}.from: {error}") from error
        base = Node(
            {
                key: dataclasses.replace(
                    _sourced(value, source), where=name.where if value == source else source
                )
                for key, value in content.items()
            },
            source,
        )
        rest = Node({key: item for key, item in entries.items() if key != "from"}, where)
        return dataclasses.replace(merge(base, rest), where=where, replaces=True)


def read_file(path: Path) -> Node:
    """The mapping in one file, nothing merged."""
    name = shown(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{name}: is larger than {MAX_BYTES // 1024} KiB; this is no configuration"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    node = read_yaml(text, name, sections=True)
    if node.mapping is None:
        held = {list: "a list", str: "text", type(None): "nothing"}.get(
            type(node.value), "a number or a switch"
        )
        raise ConfigError(
            f"{node.where}: holds {held}; a configuration is a mapping of keys to values"
        )
    return node


def shown(path: Path) -> str:
    """The path as a person would write it: relative if it is below the working folder."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path.resolve())


def _override(text: str) -> tuple[list[str], Node, str]:
    at, keys = 0, []
    while match := _SEGMENT.match(text, at):
        keys.append(match[1] if match[1] is not None else match[2])
        at = match.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    if not keys or len(keys) > MAX_DEPTH or text[at : at + 1] != "=":
        raise ConfigError(f"override {quoted(text)}: overrides have the form a.b.c=value")
    if keys[0] == "extends":
        raise ConfigError(
            f"override {quoted(text)}: extends: cannot be overridden; name another file instead"
        )
    value = text[at + 1 :]
    node = (
        read_yaml(value, f"override {shortened(text)}", lines=False)
        if value.strip()
        else Node(None, "override")
    )
    return keys, _sourced(plain(node), "override"), text


def _sourced(value: Any, where: str) -> Node:
    """Plain data as a tree that one place gave."""
    if isinstance(value, Mapping):
        return Node({key: _sourced(item, where) for key, item in value.items()}, where)
    return (
        Node([_sourced(item, where) for item in value], where)
        if isinstance(value, list | tuple)
        else Node(value, where)
    )


def _assign(
    tree: Node | None, keys: list[str], node: Node, text: str, depth: int, default: Any
) -> Node:
    if depth == len(keys):
        return merge(tree, node)
    key, done = keys[depth], ".".join(keys[:depth])
    if tree is None and isinstance(default, list | tuple):
        tree = _sourced(default, "default")
    inside = tree.value if tree else None
    if isinstance(inside, list):
        if not re.fullmatch(r"[0-9]{1,6}", key) or int(key) >= len(inside):
            allowed = f"0 to {len(inside) - 1}" if inside else "nothing, as it is empty"
            raise ConfigError(
                f"override {quoted(text)}: {shortened(done)} is a list; after it came "
                f"{shortened(key)}; allowed: {allowed}"
            )
        items = list(inside)
        items[int(key)] = _assign(items[int(key)], keys, node, text, depth + 1, None)
        return Node(items, tree.where if tree else "override", tree.replaces if tree else False)
    if inside is not None and not isinstance(inside, dict):
        raise ConfigError(
            f"override {quoted(text)}: {shortened(done)} is {quoted(inside)}, which has "
            f"no {shortened(key)}"
        )
    entries = inside or {}
    if depth + 1 == len(keys) and _kind_changes(entries, {key: node}):
        return Node({key: node}, "override", replaces=True)
    child = _assign(
        entries.get(key),
        keys,
        node,
        text,
        depth + 1,
        default.get(key) if isinstance(default, dict) else None,
    )
    return Node(
        entries | {key: child}, tree.where if tree else "override", tree.replaces if tree else False
    )


def _inherited(node: Node, path: str, done: dict[int, tuple[Node, Node]]) -> Node:
    """The tree with every `like: name` replaced by the sibling of that name, beneath what is given
    beside it.

    `done` keeps each node with what became of it, so that a node that stands in many places costs
    once.
    """
    if not isinstance(node.value, dict | list):
        return node
    if id(node) not in done:
        value: dict[str, Node] | list[Node]
        if isinstance(node.value, list):
            value = [
                _inherited(item, f"{path}{index}.", done) for index, item in enumerate(node.value)
            ]
        else:
            entries = {key: _liked(key, node.value, (), path) for key in node.value}
            value = {key: _inherited(item, f"{path}{key}.", done) for key, item in entries.items()}
        done[id(node)] = node, dataclasses.replace(node, value=value)
    return done[id(node)][1]


def _liked(name: str, siblings: dict[str, Node], seen: tuple[str, ...], path: str) -> Node:
    node = siblings[name]
    entries = node.mapping or {}
    if "like" not in entries:
        return node
    like = entries["like"]
    if not isinstance(like.value, str) or like.value not in siblings or like.value in (name, *seen):
        others = [other for other in siblings if other not in (name, *seen)]
        raise ConfigError(
            f"{like.where}: {shortened(path + name)}.like: got {quoted(like.value)}; allowed: "
            f"{shortened(', '.join(others)) or 'nothing, as there is no other'}, "
            f"without a circle{did_you_mean(like.value, others)}"
        )
    if len(seen) > MAX_DEPTH:
        raise ConfigError(
            f"{like.where}: {shortened(path + name)}.like: more than {MAX_DEPTH} entries "
            "are like one another in a row"
        )
    own = Node({key: item for key, item in entries.items() if key != "like"}, node.where)
    return merge(_liked(like.value, siblings, (*seen, name), path), own)
