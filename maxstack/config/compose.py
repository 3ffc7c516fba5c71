"""Composes a configuration from files: `extends`, presets, `like`, overrides.

Files become trees of nodes, each with its origin. A file is merged over what it extends, key by
key; a section's preset or `from` is read first and the section's keys are merged over it. Overrides
come next, shorter keys before longer ones and `kind`, `preset` and `from` before their neighbours.
`like` is resolved last, so that it copies overridden values. The file knows no field names."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxstack.config import storage, trust
from maxstack.config.reader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    Node,
    no_configuration,
    read_yaml,
)
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError, quoted, shortened

Presets = Mapping[str, Sequence[str]]
"""Top-level key -> folders that hold its presets, inside the presets folder; "" stands for whole
files."""
Readers = Mapping[str, Callable[[str, str], tuple[str, Mapping[str, Any]]]]
"""Top-level key -> reader of its `from: name`: takes the name as a path and as written, returns the
source's name and the section's content; ConfigError if it cannot be read."""

SectionKeys = Mapping[str, Collection[str]]
"""Keys of each section; "" stands for the whole file."""
LONGEST = 200
"""Characters of the longest name that advice is given for."""
DATA = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrayrecord": "array_record",
    ".bagz": "bagz",
}
"""File extensions of data, and the kind of their source."""
_WORDS = ("extends", "preset", "from", "kind")
# Quotes hold a key with dots or an equals sign, as patterns of weights have: `optimizer."a.b"=..`.
_SEGMENT = re.compile(r'"([^"]*)"|([^."=]+)')


def presets_dir() -> Path:
    """The folder of shipped presets: configs/ inside the package when installed, beside it in a
    checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def merged_tree(
    presets: Presets,
    path: str | Path | Mapping[str, Any] | Node,
    overrides: Sequence[str] = (),
    defaults: Any = None,
    readers: Readers | None = None,
    section_keys: SectionKeys | None = None,
) -> Node:
    """The merged tree of a file, a preset's name, a file's content or a merged tree, with
    `a.b.c=value` overrides; each node knows its origin. `defaults` is plain data with the lists
    that overrides may index where the file gives none. `section_keys` has the keys of each section,
    "" for the whole file: another file with none of them is refused without quoting its keys."""
    readers = readers or {}
    parsed = []
    for text in overrides:
        keys, node = _override(text)
        # `model.preset=x` means `model=x`: it replaces what is below it.
        if keys[1:] == ["preset"] and keys[0] in presets:
            keys = keys[:1]
        if keys[1:] == ["from"] and keys[0] in readers:
            keys, node = keys[:1], Node({"from": node}, "override")
        parsed.append((keys, node, text))
    # A section that an override replaces is not read: what it names may be missing on this machine.
    replaced = {keys[0] for keys, node, _ in parsed if len(keys) == 1 and _is_named(node)}
    composer = _Composer(presets, readers, section_keys or {}, replaced)
    if isinstance(path, Node):
        tree = path
    elif isinstance(path, Mapping):
        tree = composer.own(_with_origin(path, "arguments"), "")
    else:
        tree = composer.file(composer.find(str(path), "", ""), "")
    # Shorter keys first, so `model=x model.embed=64` sets embed in x, in whatever order they are
    # typed.
    for keys, node, text in sorted(
        parsed, key=lambda o: (len(o[0]), o[0][-1] not in ("kind", "preset", "from"))
    ):
        if len(keys) == 1:
            # "": a path on the command line is relative to the working folder, not to the file.
            node = composer.expand(Node({keys[0]: node}, "override"), "").at(keys[0]) or node
        tree = _assign(tree, keys, node, text, 0, defaults)
    # Last, so that `like` copies what overrides have set.
    return _resolve_likes(tree, "", {})


def plain(node: Node) -> Any:
    """Dicts, lists and scalars without their origins."""
    count = itertools.count(1)

    def convert(node: Node) -> Any:
        # Nodes are shared until here; a chain of `like` doubles at each step when it is written
        # out.
        if next(count) > 2 * MAX_NODES:
            raise ConfigError(
                f"{node.where}: like: and aliases expand to more than {2 * MAX_NODES} "
                "values; this is not a configuration"
            )
        if isinstance(node.value, dict):
            return {key: convert(item) for key, item in node.value.items()}
        if isinstance(node.value, list):
            return [convert(item) for item in node.value]
        return node.value

    return convert(node)


def merge(below: Node | None, above: Node) -> Node:
    """`above` over `below`: mappings merge key by key; anything else, another `kind`, and null
    replace."""
    if below is None or above.replaces:
        return above
    under, over = below.mapping, above.mapping
    if under is None or over is None or _kind_changes(under, over):
        # Remembered, because this result may itself be merged over another file, which it must
        # replace too.
        return dataclasses.replace(above, replaces=True)
    merged = under | {key: merge(under.get(key), item) for key, item in over.items()}
    return Node(merged, above.where, below.replaces)


def underlay(tree: Node, path: Sequence[str], below: Mapping[str, Any]) -> Node:
    """The tree with a default mapping merged below the mapping at `path`, unless that gives its own
    `kind`, which makes it complete."""
    above = tree.at(*path)
    if above is None or above.mapping is None or ("kind" in above.mapping and "kind" in below):
        return tree
    above = dataclasses.replace(above, replaces=False)
    return _put(tree, path, merge(_with_origin(below, "default"), above))


def supply(tree: Node, path: Sequence[str], value: Any, where: str) -> Node:
    """The tree with a value added at `path`, if the mapping around it exists."""
    above = tree.at(*path[:-1])
    is_inside = above is not None and above.mapping is not None
    return _put(tree, path, _with_origin(value, where)) if is_inside else tree


def _put(tree: Node | None, path: Sequence[str], node: Node) -> Node:
    if not path:
        return node
    assert tree is not None and tree.mapping is not None
    inside = _put(tree.mapping.get(path[0]), path[1:], node)
    return dataclasses.replace(tree, value=tree.mapping | {path[0]: inside})


def _is_named(section: Node) -> bool:
    """Whether a section is a preset or a folder, which replaces everything below it."""
    return isinstance(section.value, str) or bool({"preset", "from"} & {*(section.mapping or {})})


def _kind_changes(under: dict[str, Node], over: dict[str, Node]) -> bool:
    # A mapping of another kind has other keys; those of the old one would be refused in it.
    return "kind" in under and "kind" in over and under["kind"].value != over["kind"].value


class _Composer:
    """Reads files, each once, and merges them over what they extend."""

    def __init__(
        self,
        presets: Presets,
        readers: Readers,
        section_keys: Mapping[str, Collection[str]],
        replaced: Collection[str],
    ):
        self._presets, self._readers = presets, readers
        self._keys, self._replaced = section_keys, replaced
        self._shipped = presets_dir()
        self._trees: dict[tuple[str, str], Node] = {}
        # The files that are being read, outermost first: for circles, and for who names whom.
        self._open: list[str] = []

    def file(self, path: str, section: str) -> Node:
        """The file's tree, merged over everything that it extends."""
        real = _real(path)
        # The trust in a record is bound to its path; through a link one path would stand for
        # another file.
        if os.path.islink(path) and trust.is_record(path):
            raise ConfigError(f"{shown(path)}: is a link, where a run writes a file; name that")
        # Presets that are shipped are trusted; other files that a record of others extends may name
        # code.
        if self._open and not Path(real).is_relative_to(self._shipped):
            outer = self._open[-1]
            if trust.is_record(outer) and not trust.is_trusted(outer):
                raise ConfigError(
                    f"{shown(outer)}: names {shown(path)}, which may name code, and {trust.ADVICE}"
                )
        if real in self._open:
            circle = [*self._open[self._open.index(real) :], real]
            raise ConfigError(
                f"{shown(path)}: extends itself in a circle: {' -> '.join(map(shown, circle))}"
            )
        if len(self._open) > MAX_DEPTH:
            raise ConfigError(
                f"{shown(path)}: more than {MAX_DEPTH} files extend one another in a row"
            )
        # Read once: files that extend two others at every level would otherwise double with each
        # level.
        if (real, section) not in self._trees:
            node = read_file(path)
            entries, keys = node.mapping or {}, self._keys.get(section)
            is_named = self._open or section
            # Refused without quoting a key: the file may belong to another program and hold
            # secrets.
            if is_named and keys and entries and not entries.keys() & {*keys, *_WORDS}:
                raise no_configuration(next(iter(entries.values())).where)
            self._open.append(real)
            self._trees[real, section] = self._extend(node, os.path.dirname(path), section)
            self._open.pop()
        return self._trees[real, section]

    def find(self, name: str, section: str, folder: str, where: str = "") -> str:
        """The file that `name` stands for: a URL, a path relative to `folder`, or a preset's name.
        `where` begins the message of the ConfigError if there is none."""
        is_path = "/" in name or name.endswith((".yml", ".yaml"))
        path = storage.join(folder, name)
        folders = [self._shipped / inside for inside in self._presets.get(section, ())]
        # The working folder comes before what is shipped.
        candidates = [path] if is_path else [str(inside / f"{name}.yml") for inside in folders]
        if is_path and not section:
            candidates.append(str(self._shipped / name.removeprefix("configs/")))
        for candidate in candidates:
            if storage.kind(candidate) == "file":
                return candidate
        name_shown = shortened(name)
        if any(storage.kind(candidate) == "other" for candidate in candidates):
            raise ConfigError(
                f"{where}{name_shown} is a pipe, a socket or a device, and only files are read"
            )
        if not section and len(name) < LONGEST and (advice := self._advice(name, path)):
            raise ConfigError(f"{where}{name_shown} {advice}")
        presets = sorted({file.stem for inside in folders for file in inside.glob("*.yml")})
        is_run = storage.kind(f"{path}/config.yml") == "file"
        if storage.kind(path) == "directory" and (is_path or is_run):
            instead = did_you_mean(Path(name).name, presets)
            if is_run and section:
                instead = f", a run's; {section}.from={name} starts from it"
            elif is_run:
                instead = f"; give {name.rstrip('/')}/config.yml"
            raise ConfigError(f"{where}{name_shown} is a folder, not a YAML file{instead}")
        hint = did_you_mean(re.sub(r"\.ya?ml$", "", Path(name).name), presets)
        if not hint and not is_path:
            hint = "; give one of these, or a path that ends in .yml"
        more = ", ..." if len(presets) > 20 else ""
        listed = f"; the presets are {', '.join(presets[:20])}{more}" if presets else ""
        what = f"{section} ".lstrip() if where else "configuration "
        raise ConfigError(
            f"{where}no {what}{'file' if is_path else 'preset'} {name_shown}{listed}{hint}"
        )

    def _advice(self, name: str, path: str) -> str:
        """Say what to write instead of a name that is not a configuration: data, a model, or a
        section's preset; "" if not known."""
        kind = DATA.get(Path(name).suffix)
        if kind and storage.kind(path) == "file":
            source = f"[{{kind: {kind}, files: [{name}]}}]"
            return (
                f"is data, not a configuration: maxstack train quickstart 'data.sources={source}'"
            )
        folder = storage.kind(path) == "directory"
        if folder and storage.kind(f"{path}/config.json") == "file":
            return f"is the folder of a model: maxstack train quickstart model.from={name}"
        if folder and storage.kind(f"{path}/config.yml") != "file":
            source = f"[{{kind: text, files: ['{name.rstrip('/')}/**/*']}}]"
            return (
                "is a folder, not a YAML file; to train on its texts: maxstack train quickstart "
                f"'data.sources={source}'"
            )
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((".yml", ".yaml")):
            return f"is no file; a model of the hub: maxstack train quickstart model.from={name}"
        for key, inside in self._presets.items():
            if key and any((self._shipped / each / f"{name}.yml").is_file() for each in inside):
                return (
                    f"is a preset of {key}, not a whole configuration: maxstack train quickstart "
                    f"{key}={name}"
                )
        return ""

    def own(self, node: Node, folder: str) -> Node:
        """The tree of a file with its sections expanded, except those that overrides replace: what
        these name need not exist."""
        entries = dict(node.mapping or {})
        # Put back unread, for `_assign` to replace.
        left = {key: entries.pop(key) for key in self._replaced if key in entries}
        node = self.expand(dataclasses.replace(node, value=entries), folder)
        return dataclasses.replace(node, value=(node.mapping or {}) | left)

    def expand(self, node: Node, folder: str) -> Node:
        """The tree with the presets that top-level keys name in their place."""
        entries = dict(node.mapping or {})
        for key in self._presets:
            if key in entries:
                entries[key] = self._preset(entries[key], key, folder)
        return dataclasses.replace(node, value=entries)

    def _extend(self, node: Node, folder: str, section: str) -> Node:
        entries = dict(node.mapping or {})
        extends = entries.pop("extends", Node([], ""))
        below: Node | None = None
        for name in extends.value if isinstance(extends.value, list) else [extends]:
            text = _text(name, "extends", "a preset's name, a path, or a list of them")
            # A preset may extend a sibling by its name alone, but not itself: a user's llama.yml
            # may extend the shipped one.
            path = storage.join(folder, f"{text}.yml")
            if not (section and storage.kind(path) and _real(path) != self._open[-1]):
                path = self.find(text, section, folder, f"{name.where}: ")
            below = merge(below, self.file(path, section))
        own = dataclasses.replace(node, value=entries)
        return merge(below, own if section else self.own(own, folder))

    def _preset(self, node: Node, section: str, folder: str) -> Node:
        entries = node.mapping or {}
        if isinstance(node.value, str):
            entries = {"preset": node}
        if "extends" in entries:
            raise ConfigError(
                f"{entries['extends'].where}: {section}.extends: inside a section the "
                "key is preset; extends is for whole files"
            )
        if "from" in entries and section in self._readers:
            base, word = self._read_from(entries, section, folder), "from"
        elif "preset" in entries:
            name, word = entries["preset"], "preset"
            text = _text(name, f"{section}.preset", "a preset's name or a path")
            base = self.file(self.find(text, section, folder, f"{name.where}: "), section)
        else:
            return node
        # A preset is complete: it replaces what an extended file says of the section, and only keys
        # beside it are merged over it.
        rest = Node({key: item for key, item in entries.items() if key != word}, node.where)
        return dataclasses.replace(merge(base, rest), where=node.where, replaces=True)

    def _read_from(self, entries: dict[str, Node], section: str, folder: str) -> Node:
        name = entries["from"]
        text = _text(name, f"{section}.from", "a path, or a name")
        if "preset" in entries:
            raise ConfigError(
                f"{name.where}: {section}.from: preset and from both say what the "
                f"{section} is; give one"
            )
        path = text if os.path.isabs(text) else shown(storage.join(folder, text))
        try:
            source, content = self._readers[section](path, text)
        except ConfigError as error:
            raise ConfigError(f"{name.where}: {section}.from: {error}") from error
        return Node(
            {
                # A value that is the source's own name was written at `from`, so errors about it
                # point there.
                key: _with_origin(value, name.where if value == source else source)
                for key, value in content.items()
            },
            source,
        )


def _text(node: Node, key: str, allowed: str) -> str:
    if not isinstance(node.value, str):
        raise ConfigError(f"{node.where}: {key}: got {quoted(node.value)}; allowed: {allowed}")
    return node.value


def _real(path: str) -> str:
    """Return one name for all paths of a file."""
    # realpath, so that a circle through links is one.
    return path if storage.is_url(path) else os.path.realpath(path)


def read_file(path: str | Path) -> Node:
    """The mapping in one file, before any merging."""
    name = shown(f"{path}")
    try:
        # One byte more than allowed shows that a file is too large without reading all of it.
        raw = storage.read(f"{path}", MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{name}: is larger than {MAX_BYTES // 1024} KiB; this is not a configuration"
        )
    try:
        # Editors on Windows begin a file with a byte order mark.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    node = read_yaml(text, name, sections=True)
    if node.mapping is None:
        words = {list: "a list", str: "text", type(None): "nothing"}
        raise ConfigError(
            f"{node.where}: holds {words.get(type(node.value), 'a number or a switch')}; a "
            "configuration is a mapping of keys to values"
        )
    return node


def shown(path: str) -> str:
    """The path as a person would write it: relative if it is inside the working folder."""
    # Errors name files as a person would type them.
    relative = path if storage.is_url(path) else os.path.relpath(path)
    return os.path.realpath(path) if relative.startswith("..") else relative


def _override(text: str) -> tuple[list[str], Node]:
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
    # `a.b=` sets null, as an empty value in a file does.
    value = text[at + 1 :] if text[at + 1 :].strip() else "null"
    node = read_yaml(value, f"override {shortened(text)}", lines=False)
    # Aliases in an override are expanded here, within the same bounds.
    return keys, _with_origin(plain(node), "override")


def _with_origin(value: Any, where: str) -> Node:
    """Plain data as a tree whose nodes all have one origin."""
    if isinstance(value, Mapping):
        return Node({key: _with_origin(item, where) for key, item in value.items()}, where)
    if isinstance(value, list | tuple):
        return Node([_with_origin(item, where) for item in value], where)
    return Node(value, where)


def _assign(
    tree: Node | None, keys: list[str], node: Node, text: str, depth: int, default: Any
) -> Node:
    if depth == len(keys):
        return merge(tree, node)
    # `data.sources.0.weight=2` reaches into a list that the file leaves to its default.
    if tree is None and isinstance(default, list | tuple):
        tree = _with_origin(default, "default")
    tree = tree or Node(None, "override")
    key, inside = keys[depth], tree.value
    problem = f"override {quoted(text)}: {shortened('.'.join(keys[:depth]))} is"
    if isinstance(inside, list):
        if not re.fullmatch(r"[0-9]{1,6}", key) or int(key) >= len(inside):
            allowed = f"0 to {len(inside) - 1}" if inside else "nothing, as it is empty"
            raise ConfigError(
                f"{problem} a list; after it came {shortened(key)}; allowed: {allowed}"
            )
        items = list(inside)
        items[int(key)] = _assign(items[int(key)], keys, node, text, depth + 1, None)
        return dataclasses.replace(tree, value=items)
    if inside is not None and not isinstance(inside, dict):
        raise ConfigError(f"{problem} {quoted(inside)}, which has no {shortened(key)}")
    entries = inside or {}
    # `a.kind=x` drops the other keys of `a`, which belong to the kind before.
    if depth + 1 == len(keys) and _kind_changes(entries, {key: node}):
        return Node({key: node}, "override", replaces=True)
    below = default.get(key) if isinstance(default, dict) else None
    child = _assign(entries.get(key), keys, node, text, depth + 1, below)
    return dataclasses.replace(tree, value=entries | {key: child})


def _resolve_likes(node: Node, path: str, done: dict[int, tuple[Node, Node]]) -> Node:
    """Replace every `like: name` by the sibling of that name, merged below the entry's other keys.
    `done` keeps each node with its replacement, so that a node in many places is processed once."""
    if not isinstance(node.value, dict | list):
        return node
    if id(node) not in done:
        value: dict[str, Node] | list[Node]
        if isinstance(node.value, list):
            value = [_resolve_likes(item, f"{path}{i}.", done) for i, item in enumerate(node.value)]
        else:
            value = {
                key: _resolve_likes(_resolve_like(key, node.value, (), path), f"{path}{key}.", done)
                for key in node.value
            }
        # The node is kept beside its replacement, or another node could get its id.
        done[id(node)] = node, dataclasses.replace(node, value=value)
    return done[id(node)][1]


def _resolve_like(name: str, siblings: dict[str, Node], seen: tuple[str, ...], path: str) -> Node:
    node = siblings[name]
    entries = node.mapping or {}
    if "like" not in entries:
        return node
    like = entries["like"]
    others = [other for other in siblings if other not in (name, *seen)]
    if like.value not in others:
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
    return merge(_resolve_like(f"{like.value}", siblings, (*seen, name), path), own)
