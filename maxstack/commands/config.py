"""`maxstack config`: show where a configuration's values come from, compare two, write the JSON
schema for editors."""

import json
from argparse import Namespace

from maxstack.command import CONFIG, OVERRIDES, argument, check_writable, command, group, write


@command(
    "config show",
    "Print the resolved file with the origin of each value.",
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
    "Print the keys in which two resolved files differ; nothing if they are the same.",
    "config diff quickstart my.yml",
    argument("a", help="a YAML file or a preset's name"),
    argument("b", help="another"),
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
    "Write the JSON schema for editors.",
    "config schema --out schema.json",
    argument("--out", metavar="FILE", help="the file to write; by default the schema is printed"),
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
        f"wrote {args.out}; in a YAML file, editors find it by the first line "
        f"`# yaml-language-server: $schema={args.out}`"
    )


main = group(
    "config",
    "Look into configurations.",
    "config show quickstart train.steps=100",
    show,
    diff,
    schema,
)
