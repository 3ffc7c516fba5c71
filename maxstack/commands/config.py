"""`maxstack config`: show where a configuration's values come from, compare two, write the JSON
schema for editors."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from maxstack.config.errors import ConfigError
from maxstack.config.writer import inline


def main(argv: Sequence[str]) -> int:
    """Runs one of `config show`, `config diff` and `config schema`."""
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="maxstack config",
        description="Look into configurations.",
        epilog="example: maxstack config show quickstart train.steps=100",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    show = commands.add_parser(
        "show",
        help="print the resolved file with the origin of each value",
        epilog="example: maxstack config show quickstart model.layers=2",
    )
    show.add_argument("file", help="a YAML file or a preset's name")
    show.set_defaults(run=_show)

    diff = commands.add_parser(
        "diff",
        help="print the keys in which two resolved files differ",
        epilog="example: maxstack config diff quickstart my.yml; prints nothing if they are the "
        "same",
    )
    diff.add_argument("a", help="a YAML file or a preset's name")
    diff.add_argument("b", help="another")
    diff.set_defaults(run=_diff)
    for command in (show, diff):
        command.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="a.b.c=value",
            help="values that replace the file's",
        )

    schema = commands.add_parser(
        "schema",
        help="write the JSON schema for editors",
        epilog="example: maxstack config schema --out schema.json",
    )
    schema.add_argument(
        "--out", type=Path, help="the file to write; by default the schema is printed"
    )
    schema.set_defaults(run=_schema)
    return parser


def _show(args: argparse.Namespace) -> int:
    from maxstack import config
    from maxstack.load import load_tree

    print(config.annotated(*load_tree(args.file, args.overrides)), end="")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from maxstack import config
    from maxstack.load import load

    a, b = (load(file, args.overrides) for file in (args.a, args.b))
    for key, old, new in config.difference(a, b):
        before, after = (value if value == config.ABSENT else inline(value) for value in (old, new))
        print(f"{key}: {before} -> {after}")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from maxstack.config.json_schema import json_schema
    from maxstack.schema.config import Config

    text = json.dumps(json_schema(Config), indent=2)
    if args.out is None:
        print(text)
        return 0
    try:
        args.out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {args.out}: cannot be written: {error.strerror or error}"
        ) from None
    print(
        f"wrote {args.out}; in a YAML file, editors find it by the first line `# "
        f"yaml-language-server: $schema={args.out}`"
    )
    return 0
