"""Declares commands: description, examples, arguments, and the function that runs. Imports only the
standard library, so that `--help` is fast."""

import argparse
import contextlib
import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from maxstack import strict_json
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.schema.config import Config

Argument = Callable[[argparse.ArgumentParser], object]


def argument(*names: str, **options: Any) -> Argument:
    """Make an argument for any number of commands; `names` and `options` are those of argparse's
    add_argument."""
    return lambda parser: parser.add_argument(*names, **options)


def positive(text: str) -> int:
    """Parse an integer above 0, as the type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def between(
    least: float, most: float, parse: Callable[[str], float] = float
) -> Callable[[str], float]:
    """Make the type of an argument: a number from `least` to `most`, read by `parse`."""

    def parsed(text: str) -> float:
        with contextlib.suppress(ValueError):
            # NaN fails the comparison.
            if least <= (number := parse(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a number from {least} to {most}")

    return parsed


def share(text: str) -> float:
    """Parse a number above 0, up to 1, as the type of an argument."""
    if not (number := between(0, 1)(text)):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def local_folder(text: str) -> Path:
    """Parse the path of a folder on this machine, as the type of an argument."""
    from maxstack.config import storage

    try:
        return storage.local(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


OVERRIDES = argument(
    "overrides",
    nargs="*",
    default=(),
    metavar="key=value",
    help="override a config value, such as model.dtype=float32; parsed as YAML",
)
CONFIG = argument(
    "config", metavar="CONFIG", help="YAML file, or name of a preset such as quickstart"
)
MODEL = argument(
    "model",
    metavar="MODEL",
    help="run folder, checkpoint, Hugging Face model folder (path or URL), .gguf file, "
    "or Org/Name on the hub",
)
TRUST_CODE = argument(
    "--trust-code",
    action="store_true",
    help="run code that a run's config.yml names, even if someone else wrote it",
)
"""Added to every command with CONFIG or MODEL."""
ALLOW_NONFINITE = argument(
    "--allow-nonfinite",
    action="store_true",
    help="accept weights that contain NaN or infinity",
)
WEIGHTS = argument(
    "--weights",
    choices=("evaluated", "train", "average"),
    help="which weights of a run to use: those it evaluates with, those it trains, or their moving "
    "average (default: evaluated)",
)
BATCH_SIZE = argument("--batch-size", type=positive, default=8, help="rows per batch (default: 8)")
TEMPERATURE = argument(
    "--temperature",
    type=between(0, 1000),
    default=1.0,
    help="sampling temperature; 0 picks the likeliest token (default: 1)",
)
SEED = argument("--seed", type=int, default=0, help="random seed (default: 0)")
SOLVER = argument(
    "--solver",
    choices=("euler", "heun"),
    default="euler",
    help="flow models: ODE solver (default: euler)",
)
GUIDANCE = argument(
    "--guidance",
    type=between(0, 100),
    default=1.0,
    metavar="W",
    help="flow models: classifier-free guidance scale (default: 1, no guidance)",
)
JSON = argument("--json", metavar="FILE", help="also write the results to FILE, in full precision")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `maxstack`. Calling it with the words after its name returns the exit code."""

    name: str
    description: str
    example: str
    arguments: tuple[Argument, ...]
    function: Callable[[argparse.Namespace], int | None]
    on_cpu: bool

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments, and keep `argv` as typed."""
        parser = _parser(self.name, self.description, self.example)
        for add in self.arguments:
            add(parser)
        if CONFIG in self.arguments or MODEL in self.arguments:
            TRUST_CODE(parser)
        return parser.parse_intermixed_args(argv, argparse.Namespace(argv=argv))

    def __call__(self, argv: Sequence[str]) -> int:
        args = self.parse(argv)
        if self.on_cpu:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if getattr(args, "trust_code", False):
            from maxstack.config import trust

            os.environ[trust.VARIABLE] = "1"
        return self.function(args) or 0


def command(
    name: str,
    description: str,
    example: str,
    *arguments: Argument,
    on_cpu: bool = False,
) -> Callable[[Callable[[argparse.Namespace], int | None]], Command]:
    """Decorate a function of the parsed arguments, which returns the exit code or None for 0, as a
    command. `example`: one or several, a line each. `on_cpu` hides accelerators from jax, unless
    JAX_PLATFORMS names one."""
    return lambda function: Command(name, description, example, arguments, function, on_cpu)


def group(
    name: str, description: str, example: str, *members: Command
) -> Callable[[Sequence[str]], int]:
    """Make a command whose first word names one of its `members`, which gets the other words."""
    by_name = {member.name.split()[-1]: member for member in members}

    def run(argv: Sequence[str]) -> int:
        parser = _parser(name, description, example)
        listing = parser.add_subparsers(dest="member", required=True, metavar="COMMAND")
        for word, member in by_name.items():
            listing.add_parser(word, help=member.description, add_help=False)
        return by_name[parser.parse_args(argv[:1]).member](argv[1:])

    return run


class _Parser(argparse.ArgumentParser):
    """A parser whose error for an unknown flag says how to set config values."""

    def error(self, message: str) -> NoReturn:
        flags = re.findall(r"(?<=[ :])--?([a-zA-Z][\w-]*)", message)
        if message.startswith("unrecognized arguments:") and flags:
            from maxstack.config.spelling import nearest
            from maxstack.schema.foreign import equivalent

            own = [option for action in self._actions for option in action.option_strings]
            hints = []
            for flag in flags[:3]:
                if near := nearest(f"--{flag}".replace("_", "-"), own):
                    hints.append(f"did you mean {near[0]}?")
                elif meant := equivalent(flag.replace("-", "_")):
                    hints.append(f"--{flag}: {meant}")
            message += "".join(f"; {hint}" for hint in hints)
            if any(action.dest == "overrides" for action in self._actions):
                message += "; settings are given as key=value, as in train.steps=100"
        super().error(message)


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph by itself, and keeps lines that begin with a space."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width)
            for line in text.split("\n")
        )


def _parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    first, *others = [f"maxstack {example}" for example in examples.split("\n")]
    epilog = "\n  ".join(["examples:", first, *others]) if others else f"example: {first}"
    return _Parser(
        prog=f"maxstack {name}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )


def load_config(args: argparse.Namespace) -> "Config":
    """Load the configuration that CONFIG and OVERRIDES name."""
    from maxstack.load import load

    return load(args.config, args.overrides)


def model_overrides(args: argparse.Namespace) -> list[str]:
    """Return the OVERRIDES of a MODEL, with those for ALLOW_NONFINITE and WEIGHTS."""
    overrides = [*args.overrides]
    if args.allow_nonfinite:
        overrides.append("checkpoint.allow_nonfinite=true")
    if args.weights:
        overrides.append(f"checkpoint.weights={args.weights}")
    return overrides


def check_writable(option: str, file: str | None) -> None:
    """ConfigError, before any work is done, if an option's file at a path or URL cannot be
    written."""
    from maxstack.config import storage

    if file is None:
        return
    if storage.is_url(file):
        with storage.filesystem(file):
            return
    path = Path(file)
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = f"the folder {path.parent} does not exist"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        problem = "cannot be written there"
    else:
        return
    raise ConfigError(f"{option} {path}: {problem}; give a file in a folder that exists")


def write(option: str, path: str, text: str) -> None:
    """Write an option's file at a path or URL; ConfigError if the system refuses."""
    from maxstack.config import storage

    try:
        with storage.replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written: {error.strerror or error}"
        ) from error


def write_json(path: str | None, figures: Any) -> None:
    """Write a JSON file, if a path is given."""
    if path:
        write("--json", path, strict_json.write(figures, indent=1) + "\n")
