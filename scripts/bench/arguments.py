"""Arguments and files that several programs of scripts/ have in common."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of its program as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def takes_overrides(parser: argparse.ArgumentParser, of: str) -> None:
    """Add positional arguments `key=value`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help=f"replaces a value of {of}",
    )


def takes_peer_python(parser: argparse.ArgumentParser) -> None:
    """Add --peer-python."""
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the interpreter that has torch and transformers, if another",
    )


def takes_rounds(parser: argparse.ArgumentParser, default: int, of: str) -> None:
    """Add --rounds, one or more."""

    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text}: at least 1")
        return number

    parser.add_argument("--rounds", type=positive, default=default, help=of)


def takes_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", type=Path, help="also write every figure here")


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures to the file of --json, if there is one; SystemExit where it cannot be."""
    if path:
        try:
            path.write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            raise SystemExit(f"--json {path}: {error.strerror}") from None


def with_block(text: str, page: Path, begin: str, end: str, block: str) -> str:
    """The text of `page` with `block` as the lines between the marks; SystemExit unless both marks
    are there once."""
    between = re.compile(rf"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    replaced, count = between.subn(lambda marks: f"{marks[1]}{block}\n{marks[2]}", text)
    if count != 1:
        raise SystemExit(
            f"{page} has {count} places for a table; write `{begin}` and `{end}` where it belongs"
        )
    return replaced


def write_block(page: Path, begin: str, end: str, block: str) -> None:
    """Put `block` into a page between the marks."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_block(text, page, begin, end, block), encoding="utf-8")


def write_or_check(files: dict[Path, str], check: bool) -> None:
    """Write the files that differ from their text; with `check` exit, with 1 if there are any."""
    stale = {
        path: text
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if check:
        names = ", ".join(map(str, stale))
        raise SystemExit(f"not up to date: {names}; run {sys.argv[0]}" if stale else 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(path)
