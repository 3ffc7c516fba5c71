"""Reads YAML with the scalars of YAML 1.2's core schema, without tags or duplicate keys.

PyYAML's parser gives events; `_Builder` makes nodes of them, each with its line, and bounds their
depth and their number with aliases written out. `scalar` gives plain scalars their types and
refuses those that YAML versions read differently."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from maxstack.config import secrets
from maxstack.errors import ConfigError, quoted, shortened

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 64

Scalar = str | int | float | bool | None
# libyaml where PyYAML has it; scalars are resolved below in both cases.
_PARSER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: Mapping[str, Scalar] = {
    spelling: value
    for word, value in {"null": None, "true": True, "false": False}.items()
    for spelling in (word, word.title(), word.upper())
} | {"": None, "~": None, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
# 1e-4 is a number here; YAML 1.1, as PyYAML reads it, takes it for text.
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
_PADDED = re.compile(r"[-+]?0_?[0-9].*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
# YAML 1.1 reads these as switches, YAML 1.2 as text. People mean either, so they are refused.
_OLD_BOOL = re.compile(r"on|off|yes|no", re.IGNORECASE)


def no_configuration(where: str) -> ConfigError:
    """The error about a file of another program. It quotes no key, which could be a secret."""
    name, _, line = where.rpartition(":")
    return ConfigError(
        f"{name}: is not a maxstack configuration: its line {line} is not `section: ...`"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A value of the configuration and its origin: `file:line`, or `override`."""

    value: "dict[str, Node] | list[Node] | Scalar"
    where: str
    replaces: bool = False
    """Whether it replaces a mapping below it instead of merging with it."""

    @property
    def mapping(self) -> "dict[str, Node] | None":
        """The entries, if this is a mapping."""
        return self.value if isinstance(self.value, dict) else None

    def at(self, *path: str | int) -> "Node | None":
        """The node at a path below this one; None if there is none."""
        node: Node | None = self
        for key in path:
            inside = node.value if node else None
            if isinstance(inside, list):
                inside = {f"{index}": item for index, item in enumerate(inside)}
            node = inside.get(f"{key}") if isinstance(inside, dict) else None
        return node


def read_yaml(text: str, name: str, *, lines: bool = True, sections: bool = False) -> Node:
    """Parse the single document in `text`; origins are `name:line`, or `name` if not `lines`.
    ConfigError for anything but plain YAML, and, with `sections`, for a top-level key that is no
    identifier, without quoting it."""
    # Events, not yaml.load: each value keeps its line, aliases are counted before they are
    # expanded, and no tag is ever constructed.
    builder = _Builder(yaml.parse(text, Loader=_PARSER), name, lines, sections)
    try:
        return builder.document()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{builder.where(error.problem_mark or error.context_mark)}: {_problem(error, text)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = f":{_line_of(text, error)}" if lines else ""
        raise ConfigError(
            f"{name}{line}: a character that YAML does not allow ({error.reason}); "
            "remove it or write it as an escape in double quotes"
        ) from None
    except UnicodeError:
        raise ConfigError(f"{name}: not valid UTF-8 text") from None


def scalar(text: str) -> Scalar:
    """The value of an unquoted scalar: null, a bool, a number or text. ValueError if it is
    ambiguous."""
    if text in _WORDS:
        return _WORDS[text]
    if _OLD_BOOL.fullmatch(text):
        raise ValueError(
            f"unquoted {text} could be text or a switch; write true or false, or quote "
            f"it ('{text}') if text is meant"
        )
    # nan is not equal to itself, so a configuration with it would differ from its own copy.
    if text.lower() in (".nan", "+.nan", "-.nan"):
        raise ValueError(f"{text} is not a number, so it is no setting")
    if _BASED.fullmatch(text):
        return _bounded(int(text, 0), text)
    # 010 is eight in YAML 1.1 and ten in YAML 1.2.
    if _PADDED.fullmatch(text) and _FLOAT.fullmatch(text):
        raise ValueError(
            f"number {shortened(text)} starts with 0, which YAML versions read "
            f"differently; drop the 0, or quote it ({quoted(text)}) if text is meant"
        )
    if _INTEGER.fullmatch(text):
        # Before int(), which takes quadratic time for long texts.
        if len(text) > 40:
            raise ValueError(f"number {shortened(text, 40)} is too large")
        return _bounded(int(text.replace("_", "")), text)
    if _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
        if math.isinf(number):
            raise ValueError(
                f"number {shortened(text, 40)} is too large for a float; write .inf for infinity"
            )
        return number
    return text


def _bounded(number: int, text: str) -> int:
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"number {shortened(text, 40)} does not fit in 64 bits")
    return number


def _problem(error: yaml.MarkedYAMLError, text: str) -> str:
    said = shortened(" ".join(part for part in (error.context, error.problem) if part))
    line = text.splitlines()[error.problem_mark.line :][:1] if error.problem_mark else []
    if "\\t" in said or (line and line[0][: len(line[0]) - len(line[0].lstrip())].count("\t")):
        return "a tab where YAML wants spaces; indent with spaces"
    if "nesting depth" in said:
        return f"nested more than {MAX_DEPTH} deep"
    if "alias" in said or "anchor" in said:
        return f"not valid YAML: {said}; text that begins with * or & must be quoted"
    return f"not valid YAML: {said}; text with special characters must be quoted"


def _line_of(text: str, error: yaml.reader.ReaderError) -> int:
    bad = error.character if isinstance(error.character, str) else chr(error.character)
    at = text.find(bad)
    return text.count("\n", 0, at if at >= 0 else error.position) + 1


class _Builder:
    """Builds nodes from parser events; an alias counts as many nodes as its anchor, which bounds
    alias bombs."""

    def __init__(self, events: Iterator[yaml.Event], name: str, lines: bool, sections: bool):
        self._events, self._name = events, name
        self._lines, self._sections = lines, sections
        self._anchors: dict[str | None, tuple[Node, int]] = {}
        self._nodes = 0

    def where(self, mark: Any) -> str:
        return f"{self._name}:{mark.line + 1}" if self._lines and mark else self._name

    def document(self) -> Node:
        """The only document."""
        root: Node | None = None
        for event in self._events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if root is not None:
                raise ConfigError(
                    f"{self.where(event.start_mark)}: a second document begins here; a "
                    "configuration is one document, so remove this ---"
                )
            root = self._node(next(self._events), 0)
        if root is None:
            raise ConfigError(
                f"{self._name}: is empty; a configuration is a mapping of keys to values"
            )
        return root

    def _node(self, event: Any, depth: int, key: str = "") -> Node:
        """The value that begins with an event, inside `depth` mappings and lists."""
        where, before = self._checked(event), self._nodes
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ConfigError(
                    f"{where}: *{shortened(str(event.anchor))} refers to no anchor that ends "
                    "before it; text that begins with * must be quoted"
                )
            # Counted as if it were written out: ten levels of ten aliases are 10**10 values.
            node, count = self._anchors[event.anchor]
            node = dataclasses.replace(node, where=where)
            self._nodes += count
        else:
            node = Node(self._value(event, where, depth, key), where)
            self._nodes += 1
            # Only after it has ended, so an alias cannot be inside its own anchor.
            self._anchors[event.anchor] = node, self._nodes - before
        if self._nodes > MAX_NODES:
            raise ConfigError(
                f"{where}: more than {MAX_NODES} values when aliases are written out; this is no "
                "configuration"
            )
        return node

    def _checked(self, event: yaml.Event) -> str:
        """The place of an event, which must have no tag."""
        where = self.where(event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None:
            raise ConfigError(
                f"{where}: tag {shortened(tag)} is refused: a configuration holds plain values "
                "only; quote text that begins with !"
            )
        if isinstance(event, yaml.ScalarEvent):
            # Here, before any error message can quote the value.
            secrets.check(event.value, where if self._lines else "override")
        return where

    def _value(self, event: yaml.Event, where: str, depth: int, key: str) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            try:
                # implicit[0] is true for plain scalars alone: what is quoted is text.
                return scalar(event.value) if event.implicit[0] else event.value
            except ValueError as error:
                subject = f"{shortened(key)}: " if key else ""
                raise ConfigError(f"{where}: {subject}{error}") from None
        if depth >= MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._node(item, depth + 1) for item in self._inside()]
        entries: dict[str, Node] = {}
        for name in self._inside():
            key_where = self._checked(name)
            key = self._key(name, key_where, entries, depth)
            node = self._node(next(self._events), depth + 1, key)
            # A mapping's value gets the line of its key, where a person looks for it.
            entries[key] = dataclasses.replace(node, where=key_where)
        return entries

    def _inside(self) -> Iterator[yaml.Event]:
        """Events up to the end of the mapping or list that has begun."""
        while not isinstance(event := next(self._events), yaml.CollectionEndEvent):
            yield event

    def _key(self, event: yaml.Event, where: str, entries: dict[str, Node], depth: int) -> str:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}: a key must be text; an alias (*) cannot be one")
        if not isinstance(event, yaml.ScalarEvent):
            raise ConfigError(
                f"{where}: a key must be text, not a list or a mapping; quote text that begins "
                "with [ or {"
            )
        key = event.value
        if key == "<<" and event.implicit[0]:
            raise ConfigError(
                f"{where}: merge keys (<<) are refused; use extends:, preset: or like:"
            )
        if key == "":
            raise ConfigError(f"{where}: a key is missing before the colon")
        if self._sections and depth == 0 and not _NAME.fullmatch(key):
            raise no_configuration(where)
        if key in entries:
            raise ConfigError(
                f"{where}: key {shortened(key)} comes twice in one mapping (first at "
                f"{entries[key].where}); keep one"
            )
        return key
