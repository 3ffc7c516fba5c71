"""Formats tables and sizes as text that people and scripts can read."""

import itertools
import sys
from collections.abc import Iterable, Sequence


def table(sides: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Format rows of cells as aligned columns, two spaces before each.

    `sides`: a letter per column, l or r, for its alignment. No cell is cut or folded. The header is
    bold on a terminal; elsewhere everything is plain.
    """
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, show_header=bool(header), padding=(0, 0, 0, 2))
    for side, title in itertools.zip_longest(sides, header, fillvalue=""):
        grid.add_column(title, justify="right" if side == "r" else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    # A million columns wide: rich folds or cuts cells that do not fit the terminal, and scripts
    # read this text.
    console = Console(
        width=10**6,
        force_terminal=sys.stdout.isatty(),
        force_jupyter=False,
        # Cells hold paths of arguments such as ['embed'], which rich would read as markup.
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def bytes_text(number: float) -> str:
    """Format bytes in GiB, MiB or KiB."""
    units = (("GiB", 2**30), ("MiB", 2**20))
    unit, scale = next((row for row in units if number >= row[1] / 10), ("KiB", 2**10))
    return f"{number / scale:,.2f} {unit}"
