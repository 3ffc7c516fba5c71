"""`maxstack config`: show where a configuration's values come from, compare two configurations, and
write the JSON schema for editors."""

import json
from argparse import Namespace

from maxstack.command import CONFIG, OVERRIDES, argument, check_writable, command, group, write


@command(
    "config show",
    "Print the resolved configuration with the origin of each value.",
    "config show quickstart model.layers=2",
    CONFIG,
    OVERRIDES,
)
def show(args: Namespace) -> None:
    """Print the annotated YAML."""
    from maxstack import config
    from maxstack.load import load_tree

    print(config.annotated(*load_tree(args.config, args.overrides)), end="")


@command(
    "config diff",
    "Print the keys in which two resolved configurations differ, or nothing if they are equal.",
    "config diff quickstart my.yml",
    argument("a", help="YAML file or name of a preset"),
    argument("b", help="YAML file or name of a preset to compare with"),
    OVERRIDES,
)
def diff(args: Namespace) -> None:
    """Print a line for each key."""
    from maxstack import config
    from maxstack.config.writer import inline
    from maxstack.load import load_tree

    a, b = (load_tree(file, args.overrides)[0] for file in (args.a, args.b))
    for key, old, new in config.difference(a, b):
        before, after = (value if value == config.ABSENT else inline(value) for value in (old, new))
        print(f"{key}: {before} -> {after}")


@command(
    "config schema",
    "Print or write the JSON schema of configurations, for editors.",
    "config schema --out schema.json",
    argument("--out", metavar="FILE", help="file to write (default: print the schema)"),
)
def schema(args: Namespace) -> None:
    """Print or write the schema."""
    from maxstack.config.json_schema import json_schema
    from maxstack.schema.config import Config

    check_writable("--out", args.out)
    text = json.dumps(json_schema(Config), indent=2)
    if args.out is None:
        print(text)
        return
    write("--out", args.out, text + "\n")
    print(
        f"wrote {args.out}; start a YAML file with the line "
        f"`# yaml-language-server: $schema={args.out}` so that editors use it"
    )


main = group(
    "config",
    "Show and compare configurations.",
    "config show quickstart train.steps=100",
    show,
    diff,
    schema,
)
