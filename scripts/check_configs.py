"""Which config.json files of a folder maxstack reads: every *.json below it is taken for one, and
is accepted, refused with the reason, or accepted with keys that are passed over.

example: python scripts/check_configs.py published
"""

import argparse
import collections
import logging
import shutil
import tempfile
from pathlib import Path

from maxstack.errors import ConfigError, DataError
from maxstack.hf.contents import Contents


class Told(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, without its file."""
        self.lines.append(record.getMessage().partition(": ")[2])


def check(file: Path) -> tuple[str, str]:
    """accepted, told or refused, and why."""
    told = Told()
    logging.getLogger("maxstack").addHandler(told)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        try:
            Contents(folder, weights=False)
        except (ConfigError, DataError) as error:
            return "refused", str(error).replace(f"{folder}/", "")
        finally:
            logging.getLogger("maxstack").removeHandler(told)
    return ("told", told.lines[0]) if told.lines else ("accepted", "")


def main() -> None:
    """Print a line for each file, and the sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with config.json files, of any names")
    folder = parser.parse_args().folder
    files = sorted(folder.rglob("*.json"))
    if not files:
        parser.error(f"{folder}: no *.json is below it")
    found = {file: check(file) for file in files}
    for file, (verdict, why) in found.items():
        print(f"{verdict:8}  {file.relative_to(folder)}{'  ' if why else ''}{why}")
    counts = collections.Counter(verdict for verdict, _ in found.values())
    print(", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
