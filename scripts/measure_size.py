"""The size of the code in tokens of Python, without comments and line breaks, by folder; --write
puts the package's, rounded to thousands, into README.md.

example: python scripts/measure_size.py --write
"""

import argparse
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NESTING = {"FSTRING_START": 1, "FSTRING_END": -1}
"""Python 3.12 and later split an f-string into tokens between these two."""
STATED = re.compile(r"([\d,]+) tokens of Python")


def token_lines(path: Path) -> list[int]:
    """The line of each token of one file. An f-string is one token, as in Python 3.11."""
    text = io.StringIO(path.read_text(encoding="utf-8"))
    depth, lines = 0, []
    for token in tokenize.generate_tokens(text.readline):
        if depth == 0 and token.type not in NO_TOKENS:
            lines.append(token.start[0])
        depth += NESTING.get(tokenize.tok_name[token.type], 0)
    return lines


def tokens(path: Path) -> int:
    """Tokens of one file."""
    return len(token_lines(path))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the number into README.md")
    args = parser.parse_args()
    sizes = {
        folder: sum(map(tokens, (ROOT / folder).rglob("*.py")))
        for folder in ("maxstack", "scripts", "tests")
    }
    for folder in sorted((ROOT / "maxstack").iterdir()):
        if any(folder.glob("*.py")):
            files = [*folder.rglob("*.py")]
            print(
                f"{sum(map(tokens, files)):>9,}  {folder.relative_to(ROOT)}/ ({len(files)} files)"
            )
    hallway = [*(ROOT / "maxstack").glob("*.py")]
    print(f"{sum(map(tokens, hallway)):>9,}  maxstack/*.py ({len(hallway)} files)")
    for folder, size in sizes.items():
        print(f"{size:>9,}  {folder}/ in all")
    if args.write:
        readme = ROOT / "README.md"
        stated = f"{round(sizes['maxstack'], -3):,} tokens of Python"
        readme.write_text(STATED.sub(stated, readme.read_text()))


if __name__ == "__main__":
    main()
