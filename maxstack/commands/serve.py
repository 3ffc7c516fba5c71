"""`maxstack serve`: serve a model over OpenAI's API, or packages over the Open Inference
Protocol."""

import functools
import logging
import os
import sys
import threading
import time
import webbrowser
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from maxstack.command import (
    ALLOW_NONFINITE,
    TRUST_CODE,
    WEIGHTS,
    argument,
    command,
    model_overrides,
)
from maxstack.commands import serve_connections
from maxstack.commands.serve_connections import LOOPBACK
from maxstack.commands.serve_packages import (
    FLAGS,
    OF_PACKAGES,
    are_packages,
    refuse_flags,
    serve_packages,
)
from maxstack.errors import ConfigError, installing
from maxstack.regular_file import read_regular

if TYPE_CHECKING:
    from maxstack.data.chat import ChatTemplate

MOST_KEYS = 1 << 20
"""Bytes of a file of keys."""
LONGEST_KEY = 1024
"""Bytes of a key."""
TEMPERATURE = 0.3
"""Of a conversation that --open begins: a small model, which a newcomer tries, wanders at 1."""
BEGINNING = 1024
"""Tokens that the cache of a server has room for at the start."""
log = logging.getLogger(__name__)


@command(
    "serve",
    "Serve a model over HTTP with OpenAI's API, or packages with the Open Inference Protocol, "
    "until SIGTERM or Ctrl-C.",
    "serve runs/quickstart --port 8000 serve.max_requests=16",
    argument(
        "words",
        nargs="+",
        metavar="FOLDER",
        help="run folder, checkpoint, Hugging Face model folder (path or URL), .gguf file, or "
        "Org/Name on the hub; or any number of packages or folders of package versions. Arguments "
        "of the form key=value override config values, such as model.dtype=float32; parsed as YAML",
    ),
    *serve_connections.FLAGS,
    TRUST_CODE,
    argument(
        "--api-key-file",
        metavar="FILE",
        help="file of client API keys, one per line (default: no key is required)",
    ),
    argument(
        "--served-model-name",
        metavar="NAME",
        help="model name in the API (default: the folder's name); adapters are named by "
        "serve.adapters",
    ),
    argument(
        "--chat-template", metavar="FILE", help="Jinja chat template (default: the model's own)"
    ),
    argument(
        "--tool-parser",
        metavar="NAME",
        help="format of tool calls: hermes, llama3, mistral or none (default: detected from the "
        "chat template)",
    ),
    argument(
        "--open",
        action="store_true",
        help="open the page in this machine's browser; where there is none, chat in the terminal "
        "in place of serving",
    ),
    *FLAGS,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: Namespace) -> None:
    """Serve; ConfigError for wrong arguments before the model is read."""
    from maxstack.inference.tools import FORMATS

    keys = _read_keys(args.api_key_file)
    serve_connections.check(args, keys)
    if args.tool_parser not in (None, "none", *FORMATS):
        raise ConfigError(f"--tool-parser {args.tool_parser}: is not one of {', '.join(FORMATS)}")
    folders = [word for word in args.words if "=" not in word]
    args.overrides = [word for word in args.words if "=" in word]
    if not folders:
        raise ConfigError(f"{args.words[0]}: is an override, not a folder; name a folder to serve")
    if are_packages(folders):
        _check_installed()
        return serve_packages(folders, args, keys, LOOPBACK if args.host in LOOPBACK else ())
    refuse_flags(args, OF_PACKAGES, "packages")
    if len(folders) > 1:
        raise ConfigError(f"{' '.join(folders)}: give one model, or any number of packages")
    (args.model,) = folders
    if args.open and not _has_browser():
        log.warning("no browser here: chat in the terminal, and end it with Ctrl-D")
        return _chat_in_terminal(args)
    _serve(args, keys)


def _has_browser() -> bool:
    """Return True where a page can be shown to whoever gave the command."""
    if "BROWSER" in os.environ:
        return True
    # Over SSH a browser would open on the wrong screen, and one of text cannot run the page.
    screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if "SSH_CONNECTION" in os.environ or not screen:
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def _chat_in_terminal(args: Namespace) -> None:
    from maxstack.commands import generate

    template = ["--chat-template", args.chat_template] if args.chat_template else []
    calm = ["--temperature", str(TEMPERATURE)]
    generate.main([args.model, "--chat", *calm, *template, *model_overrides(args)])


def _check_installed() -> None:
    """ConfigError if the server's packages are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"maxstack serve needs the {error.name} package: {installing('serve')}"
        ) from None


def _serve(args: Namespace, keys: list[bytes]) -> None:
    """Serve with our own engine."""
    _check_installed()
    from maxstack.inference.engine_setup import First, chat_template, room, start
    from maxstack.inference.server.admission import Access
    from maxstack.inference.server.app import make_app
    from maxstack.inference.server.process import serve
    from maxstack.inference.server.state import State
    from maxstack.inference.service import Service

    listener = serve_connections.listen(args)
    served = start(args.model, model_overrides(args), check=lambda *_: First(None, BEGINNING))
    # A later request may begin like one that has ended.
    served.engine.scheduler.keep_prefixes(True)
    read = functools.partial(chat_template, served.model, served.cfg, served.own)
    template = _template_if_any(read, served.model, args)
    name = _model_name(args)
    if name in served.engine.adapters:
        raise ConfigError(f"{name}: is also an adapter's name; set --served-model-name")
    print(f"{name}: {room(served.engine)}", flush=True)
    service = Service(served.engine, served.cfg.serve.max_waiting)
    service.warm()
    state = State(
        served,
        service,
        name,
        template,
        _tool_parser(args, template),
        Access(keys, LOOPBACK if args.host in LOOPBACK else ()),
        int(time.time()),
    )
    serve(
        make_app(state),
        listener,
        functools.partial(_announce, name, args.open),
        service.drain,
        args.grace,
    )


def _announce(name: str, opens: bool, origin: str) -> str:
    """Return the line that tells the server's address, and open its page if asked to."""
    if opens:
        page = f"{origin}/#temperature={TEMPERATURE}"
        # In a thread, since some browsers return only once they are closed.
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    return f"{name}: {origin}/v1, and in a browser {origin}"


def _model_name(args: Namespace) -> str:
    """Return the model's name in the API."""
    folder = Path(args.model)
    # A GGUF file is named without its ending.
    name = folder.stem if folder.is_file() else folder.resolve().name
    return args.served_model_name or (name if folder.exists() else args.model)


def _read_keys(file: str | None) -> list[bytes]:
    """Read the keys of a file; ConfigError if it has none."""
    if file is None:
        return []
    try:
        lines = read_regular(file, MOST_KEYS).splitlines()
        if Path(file).stat().st_mode & 0o044:
            log.warning("--api-key-file %s: other users can read it; chmod 600 it", file)
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: cannot be read: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file {file}: has no key; write one per line")
    if max(map(len, keys)) > LONGEST_KEY:
        raise ConfigError(f"--api-key-file {file}: a key is longer than {LONGEST_KEY} bytes")
    return keys


def _template_if_any(
    read: Callable[[str | None], "ChatTemplate"], model: str | Path, args: Namespace
) -> "ChatTemplate | None":
    """Read --chat-template, or the model's own template; None for a model without one."""
    try:
        return read(args.chat_template)
    except ConfigError:
        if args.chat_template is not None:
            raise
        log.warning("%s has no chat template; only /v1/completions is available", model)
        return None


def _tool_parser(args: Namespace, template: "ChatTemplate | None") -> str | None:
    """Return the format of tool calls, as set by --tool-parser or detected from the template."""
    from maxstack.inference.tools import guess_format

    name = args.tool_parser
    if name is not None or template is None:
        return None if name == "none" else name
    return guess_format("\n".join(template.sources.values()))
