"""A file of JSON lines that takes long to write and resumes after a kill.

Lines are appended to FILE.unfinished in whatever order they end, each with its key; the first line
is a hash of all that they depend on. The file itself appears at the end, whole and in order.
"""

import json
from pathlib import Path
from typing import Any

from maxstack import strict_json
from maxstack.config import storage
from maxstack.errors import ConfigError


class ResumableFile:
    """Finished lines, appended to FILE.unfinished until all are there."""

    def __init__(self, out: str, settings: str):
        self._out, self._unfinished = out, Path(f"{out}.unfinished")
        self.lines: dict[tuple[int, int], str] = {}
        # Object stores cannot append.
        if storage.is_url(out):
            raise ConfigError(
                f"--out {out}: must be on this machine, so that it can resume after a kill"
            )
        header = json.dumps({"settings": settings})
        if self._unfinished.is_file():
            self._read(header)
        else:
            self._unfinished.write_text(header + "\n", encoding="utf-8")

    def _read(self, header: str) -> None:
        """Read the lines of an earlier call; one that was not written whole is dropped."""
        # What follows the last line end was being written when the process was killed.
        whole = self._unfinished.read_bytes().rpartition(b"\n")[0].decode().splitlines()
        if not whole or whole[0] != header:
            raise ConfigError(
                f"{self._unfinished}: was begun with another model, other prompts or other "
                "settings; give these again, or delete it, or give another --out"
            )
        for line in whole[1:]:
            key, row = strict_json.parse(line, str(self._unfinished))
            self.lines[key[0], key[1]] = json.dumps(row, ensure_ascii=False)
        self._unfinished.write_text("\n".join(whole) + "\n", encoding="utf-8")

    def append(self, key: tuple[int, int], row: dict[str, Any]) -> None:
        """Append a line."""
        self.lines[key] = strict_json.write(row, ensure_ascii=False)
        # Closed after each line, so that a kill loses at most the one being written.
        with self._unfinished.open("a", encoding="utf-8") as file:
            file.write(f"[{json.dumps(key)}, {self.lines[key]}]\n")

    def write(self) -> None:
        """Write all lines in their order."""
        with storage.replacing(self._out) as file:
            lines = [line for _, line in sorted(self.lines.items())]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._unfinished.unlink()
