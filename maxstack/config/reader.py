"""YAML with the scalars of YAML 1.2's core schema, without tags or duplicate keys, of bounded size,
each node with its line."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from maxstack.errors import ConfigError, quoted, shortened

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 64

Scalar = str | int | float | bool | None
_PARSER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: Mapping[str, Scalar] = {
    spelling: value
    for word, value in {"null": None, "true": True, "false": False}.items()
    for spelling in (word, word.title(), word.upper())
} | {"": None, "~": None, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
_PADDED = re.compile(r"[-+]?0_?[0-9].*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_OLD_BOOL = re.compile(r"on|off|yes|no", re.IGNORECASE)


def no_configuration(where: str) -> ConfigError:
    """The error about a file of another program. It quotes no key, which may be a secret."""
    name, _, line = where.rpartition(":")
    return ConfigError(
        f"{name}: is no configuration of maxstack: its line {line} is not `section: ...`"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A value of the configuration and its origin: `file:line`, or `override`."""

    value: "dict[str, Node] | list[Node] | Scalar"
    where: str
    replaces: bool = False
    """It replaces a mapping below it instead of merging with it."""

    @property
    def mapping(self) -> "dict[str, Node] | None":
        """The entries, if this is a mapping."""
        return self.value if isinstance(self.value, dict) else None

    def at(self, *path: str | int) -> "Node | None":
        """The node at a path below this one, None if nothing gave it."""
        node: Node | None = self
        for key in path:
            inside = node.value if node else None
            if isinstance(inside, dict):
                node = inside.get(str(key))
            elif isinstance(inside, list) and str(key).isdecimal() and int(key) < len(inside):
                node = inside[int(key)]
            else:
                return None
        return node


def read_yaml(text: str, name: str, *, lines: bool = True, sections: bool = False) -> Node:
    """The only document in `text`; origins are `name:line`, or `name` if not `lines`. ConfigError
    for anything but plain YAML, and, with `sections`, for a key at the top that is no identifier,
    which the message does not quote."""
    builder = _Builder(name, lines, sections)
    try:
        for event in yaml.parse(text, Loader=_PARSER):
            builder.take(event)
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
    if builder.root is None:
        raise ConfigError(f"{name}: is empty; a configuration is a mapping of keys to values")
    return builder.root


def scalar(text: str) -> Scalar:
    """The value of an unquoted scalar: null, a bool, a number or text. ValueError if a person could
    mean two things."""
    if text in _WORDS:
        return _WORDS[text]
    if _OLD_BOOL.fullmatch(text):
        raise ValueError(
            f"unquoted {text} could be text or a switch; write true or false, or quote "
            f"it ('{text}') if text is meant"
        )
    if text.lower() in (".nan", "+.nan", "-.nan"):
        raise ValueError(f"{text} is not a number, so it is no setting")
    if _BASED.fullmatch(text):
        return _bounded(int(text, 0), text)
    if _PADDED.fullmatch(text) and _FLOAT.fullmatch(text):
        raise ValueError(
            f"number {shortened(text)} starts with 0, which YAML versions read "
            f"differently; drop the 0, or quote it ({quoted(text)}) if text is meant"
        )
    if _INTEGER.fullmatch(text):
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
    if "alias" in said or "anchor" in said:
        return f"not valid YAML: {said}; text that begins with * or & must be quoted"
    return f"not valid YAML: {said}; text with special characters must be quoted"


def _line_of(text: str, error: yaml.reader.ReaderError) -> int:
    bad = error.character if isinstance(error.character, str) else chr(error.character)
    at = text.find(bad)
    return text.count("\n", 0, at if at >= 0 else error.position) + 1


@dataclasses.dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not come yet."""

    value: "dict[str, Node] | list[Node]"
    where: str
    anchor: str | None
    nodes_before: int
    key: str | None = None
    key_where: str = ""


class _Builder:
    """Nodes from parser events, without recursion; an alias counts as many nodes as its anchor."""

    def __init__(self, name: str, lines: bool, sections: bool):
        self.root: Node | None = None
        self._name, self._lines, self._sections = name, lines, sections
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._nodes = 0
        self._documents = 0

    def where(self, mark: Any) -> str:
        return f"{self._name}:{mark.line + 1}" if self._lines and mark else self._name

    def take(self, event: yaml.Event) -> None:
        where = self.where(event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None:
            raise ConfigError(
                f"{where}: tag {shortened(tag)} is refused: a configuration holds plain "
                "values only; quote text that begins with !"
            )
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise ConfigError(
                    f"{where}: a second document begins here; a configuration is one "
                    "document, so remove this ---"
                )
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, where)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event, where)
        elif isinstance(event, yaml.MappingStartEvent):
            self._start({}, event.anchor, where)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._start([], event.anchor, where)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()

    def _scalar(self, event: yaml.ScalarEvent, where: str) -> None:
        frame = self._stack[-1] if self._stack else None
        if frame and isinstance(frame.value, dict) and frame.key is None:
            self._key(frame, event, where)
            return
        try:
            value = scalar(event.value) if event.implicit[0] else event.value
        except ValueError as error:
            key = f"{shortened(frame.key)}: " if frame and frame.key else ""
            raise ConfigError(f"{where}: {key}{error}") from None
        self._add(Node(value, where), event.anchor, 1)

    def _key(self, frame: _Open, event: yaml.ScalarEvent, where: str) -> None:
        if event.value == "<<" and event.implicit[0]:
            raise ConfigError(
                f"{where}: merge keys (<<) are refused; use extends:, preset: or like:"
            )
        if event.value == "":
            raise ConfigError(f"{where}: a key is missing before the colon")
        assert isinstance(frame.value, dict)
        if self._sections and len(self._stack) == 1 and not _NAME.fullmatch(event.value):
            raise no_configuration(where)
        if event.value in frame.value:
            raise ConfigError(
                f"{where}: key {shortened(event.value)} comes twice in one mapping (first at "
                f"{frame.value[event.value].where}); keep one"
            )
        frame.key, frame.key_where = event.value, where

    def _alias(self, event: yaml.AliasEvent, where: str) -> None:
        if event.anchor not in self._anchors:
            raise ConfigError(
                f"{where}: *{shortened(str(event.anchor))} refers to no anchor that ends "
                "before it; text that begins with * must be quoted"
            )
        node, count = self._anchors[event.anchor]
        self._add(dataclasses.replace(node, where=where), None, count)

    def _start(self, value: "dict[str, Node] | list[Node]", anchor: str | None, where: str) -> None:
        frame = self._stack[-1] if self._stack else None
        if frame and isinstance(frame.value, dict) and frame.key is None:
            raise ConfigError(
                f"{where}: a key must be text, not a list or a mapping; quote text that "
                f"begins with [ or {{"
            )
        if len(self._stack) >= MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {MAX_DEPTH} deep")
        self._stack.append(
            _Open(value, frame.key_where if frame and frame.key else where, anchor, self._nodes)
        )

    def _end(self) -> None:
        frame = self._stack.pop()
        inside = self._nodes - frame.nodes_before
        self._nodes -= inside
        self._add(Node(frame.value, frame.where), frame.anchor, inside + 1)

    def _add(self, node: Node, anchor: str | None, count: int) -> None:
        """A finished node, which with those inside it counts `count`."""
        self._nodes += count
        if self._nodes > MAX_NODES:
            raise ConfigError(
                f"{node.where}: more than {MAX_NODES} values when aliases are written "
                "out; this is no configuration"
            )
        frame = self._stack[-1] if self._stack else None
        if frame is None:
            self.root = node
        elif isinstance(frame.value, list):
            frame.value.append(node)
        elif frame.key is None:
            raise ConfigError(f"{node.where}: a key must be text; an alias (*) cannot be one")
        else:
            frame.value[frame.key] = dataclasses.replace(node, where=frame.key_where)
            frame.key = None
        if anchor:
            self._anchors[anchor] = (node, count)
