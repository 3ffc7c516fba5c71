"""The dialect of Jinja of chat templates, rendered in this process or in one with limits.

A template comes with a folder, and what it renders with a request, so either may be made to cost
much. The sandbox and the size of the text are limits here. `Guarded` parses and renders in a
process whose processor time and memory are limited too: whatever a template does, in loops or in
one call, ends that process alone, and the next conversation gets another.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

from maxstack import limited
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST = 1 << 25
"""Characters of a rendered conversation; items of a product, and bits of a power, in it."""
SECONDS, MEMORY = 2, 512 << 20
"""Processor time and bytes of a conversation in a process of its own."""
SHORT = 1 << 16
"""Conversations of fewer bytes have a process of their own, so they do not wait for longer ones."""
BEGIN, END = "generation_begins", "generation_ends"
"""Variables of a template that are written before and after what is trained on."""


class Failed(Exception):
    """An error of a template, with its line if that is known."""

    def __init__(self, message: str, lineno: int | None = None):
        super().__init__(message)
        self.lineno = lineno


class Templates:
    """Templates by name, rendered in this process. Any error for those that cannot be parsed."""

    def __init__(self, sources: Mapping[str, str]):
        self._parsed = {name: _environment().from_string(text) for name, text in sources.items()}

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template writes. Any error where it writes none, or too much."""
        parts, size = [], 0
        # Piece by piece, so that a loop that writes without end stops at LARGEST.
        for part in self._parsed[name].generate(variables):
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise OverflowError(f"it writes more than {LARGEST} characters")
        return "".join(parts)


class Guarded(Templates):
    """Templates rendered in processes with limits. Safe to call from any thread. All errors are
    Failed."""

    def __init__(self, sources: Mapping[str, str]):
        _environment()  # ConfigError here, where it is not installed
        # Two processes: a conversation that uses up its seconds does not hold up short ones.
        self._short, self._long = (
            limited.Limited(__name__, dict(sources), SECONDS, MEMORY) for _ in range(2)
        )
        # Parse now, in the process too, so that a template that cannot be parsed fails at the
        # start.
        self._ask(self._short, None)

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        short = len(json.dumps(variables)) < SHORT
        return self._ask(self._short if short else self._long, (name, variables))

    def _ask(self, process: limited.Limited, request: Any) -> str:
        try:
            text, error, lineno = process.ask(request)
        except limited.Ended as ended:
            raise Failed(f"a conversation {ended}") from None
        if error is not None:
            raise Failed(error, lineno)
        return str(text)


class _Renders:
    def __init__(self, sources: Any):
        self._sources = sources
        self._templates: Templates | None = None

    def __call__(self, request: Any) -> tuple[str | None, str | None, int | None]:
        """Return the text of a conversation, or what went wrong and at which line."""
        try:
            # Parsed here and not by the caller: parsing a hostile template may cost as much as
            # rendering it.
            self._templates = self._templates or Templates(self._sources)
            return self._templates.render(*request) if request else "", None, None
        # Left to end the process, whose memory may be in any state.
        except MemoryError:
            raise
        except Exception as error:  # a template can do anything
            return None, str(error) or type(error).__name__, getattr(error, "lineno", None)


@functools.cache
def _environment() -> "ImmutableSandboxedEnvironment":
    """Jinja as transformers sets it up (utils/chat_template_utils.py). ConfigError if it is not
    installed."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError("chat templates are rendered by jinja2: pip install jinja2") from None

    class Generation(Extension):
        """`{% generation %}`, which marks what is trained on: the block between BEGIN and END."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # Written as variables, since only the caller knows marks that no message contains.
            begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN, END))
            return nodes.Scope([begin, *body, end]).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, without products that fill the memory."""

        # The sandbox bounds neither repetition nor powers, and one such call allocates before any
        # limit on the text is looked at.
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # Python repeats a sequence from either side of `*`.
            for value, times in ((left, right), (right, left)):
                size = len(value) if isinstance(value, Sized) else 0
                if operator == "**" and isinstance(value, int) and value is left:
                    size = value.bit_length()
                if isinstance(times, int) and size * times > LARGEST:
                    raise OverflowError(f"{operator} makes a value that is too large")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # Jinja's own tojson escapes <, > and & for HTML, which would be trained on.
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    limited.answer_all(_Renders)
