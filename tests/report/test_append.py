"""Lines for a file on a disk that is full for a while: a real one, of a few pages."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from maxstack.report.append import Appender
folder = Path(sys.argv[1])
(folder / "rows").write_text("a line that a kill cut")
rows, ballast = Appender(folder / "rows"), folder / "ballast"
ballast.write_bytes(bytes(28 * 1024))
lines = [f"{number} {'x' * 100}" for number in range(100)]
for number, line in enumerate(lines):
    if number == 90:
        ballast.unlink()
    rows.add(line + "\\n")
    if number == 89:
        early = (folder / "rows").read_text()
        assert early.endswith("x\\n") and early.count("\\n") < 90, "whole lines, and not all"
assert (folder / "rows").read_text().splitlines() == ["a line that a kill cut", *lines]
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    != 0,
    reason="a full file system needs a mount of one's own",
)
def test_what_a_full_disk_refused_is_told_once_and_written_whole_when_there_is_room(tmp_path):
    command = (
        f"mount -t tmpfs -o size=32k none '{tmp_path}' && exec '{sys.executable}' -c \"$0\" "
        f"'{tmp_path}'"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == f"{tmp_path / 'rows'}: No space left on device; the run continues and "
        "retries later\n"
    )
