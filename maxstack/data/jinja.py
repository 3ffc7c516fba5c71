"""Jinja as chat templates are written in, in this process or in one with limits.

A template comes with a folder, and what it renders with a request, so either may be made to cost
much. The sandbox and the size of the text are limits here. `Guarded` parses and renders in a
process whose processor time and memory are limited too: whatever a template does, in loops or in
one call, ends that process alone, and the next conversation gets another.
"""

import datetime
import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sized
from typing import IO, TYPE_CHECKING, Any

from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST = 1 << 25
"""Characters of a rendered conversation; items of a product, and bits of a power, in it."""
SECONDS, WAIT = 2, 60
"""Processor time of a conversation in a process of its own, and how long it is waited for."""
MEMORY = 1 << 30
"""Bytes of address space of such a process."""
SHORT = 1 << 16
"""Conversations of fewer bytes do not wait for longer ones: each kind has a process."""
BEGIN, END = "generation_begins", "generation_ends"
"""Variables of a template that are written before and after what is trained on."""


class Failed(Exception):
    """What went wrong with a template, and at which line where that is known."""

    def __init__(self, message: str, lineno: int | None = None):
        super().__init__(message)
        self.lineno = lineno


class Templates:
    """Templates by name, rendered in this process. Any error for those that cannot be parsed."""

    def __init__(self, sources: Mapping[str, str]):
        self._parsed = {name: _environment().from_string(text) for name, text in sources.items()}

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """The text that a template writes. Any error where it writes none, or too much."""
        parts, size = [], 0
        for part in self._parsed[name].generate(variables):
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise OverflowError(f"it writes more than {LARGEST} characters")
        return "".join(parts)


class Guarded(Templates):
    """The same in processes with limits. Safe to call from any thread. Failed for all errors."""

    def __init__(self, sources: Mapping[str, str]):
        _environment()  # ConfigError here, where it is not installed
        self._short, self._long = _Process(sources), _Process(sources)
        self._short.ask(b"null")

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        request = json.dumps([name, variables]).encode()
        return (self._short if len(request) < SHORT else self._long).ask(request)


class _Process:
    """A process that renders, started at the first request and after each end."""

    def __init__(self, sources: Mapping[str, str]):
        self._sources, self._lock = json.dumps(sources).encode(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> str:
        """What a request is answered with."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__],  # -P: nothing of the working folder
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
                self._exchange(self._sources)
            text, error, lineno = json.loads(self._exchange(request))
        if error is not None:
            raise Failed(error, lineno)
        return str(text)

    def _exchange(self, request: bytes) -> bytes:
        process = self._process
        assert process and process.stdin and process.stdout
        try:
            _send(process.stdin, request)
            if select.select([process.stdout], [], [], WAIT)[0]:
                return _receive(process.stdout)
        except (OSError, EOFError):
            pass  # it has ended
        process.kill()
        process.communicate()
        raise Failed(
            f"its process ended with exit code {process.returncode}; a conversation may take "
            f"{SECONDS} seconds of processor time and {MEMORY >> 20} MiB of memory"
        )


def _send(file: IO[bytes], content: bytes) -> None:
    file.write(len(content).to_bytes(8) + content)
    file.flush()


def _receive(file: IO[bytes]) -> bytes:
    """What was sent. EOFError at the end."""
    if len(head := file.read(8)) < 8:
        raise EOFError
    if len(content := file.read(size := int.from_bytes(head))) < size:
        raise EOFError
    return content


def _answer_all() -> None:
    """Answer the requests of another process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sources = json.loads(_receive(source))
    _send(target, b"")
    templates = None
    while True:
        request = _receive(source)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process, as nothing handles it
        try:
            templates = templates or Templates(sources)
            asked = json.loads(request)
            answer = [templates.render(*asked) if asked else "", None, None]
        except MemoryError:
            answer = [None, f"it takes more than {MEMORY >> 20} MiB of memory", None]
        except Exception as error:  # a template can do anything
            words = str(error) or type(error).__name__
            answer = [None, words, getattr(error, "lineno", None)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(target, json.dumps(answer).encode())


@functools.cache
def _environment() -> "ImmutableSandboxedEnvironment":
    """Jinja as transformers sets it up (utils/chat_template_utils.py). ConfigError where it is not
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
            begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN, END))
            return nodes.Scope([begin, *body, end]).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, without products that fill the memory."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, times in ((left, right), (right, left)):
                size = len(value) if isinstance(value, Sized) else 0
                if operator == "**" and isinstance(value, int) and value is left:
                    size = value.bit_length()
                if isinstance(times, int) and size * times > LARGEST:
                    raise OverflowError(f"{operator} makes a value that is too large")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise TemplateError(message)

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
    try:
        _answer_all()
    except EOFError:
        pass
