"""What happens before the first step, where it needs more than one process."""

import subprocess
import sys

from processes import environment, joined, write_config

HURRIED = """
import sys
from maxstack import cli, startup, train
startup.JOIN, startup.WAITING = 3.0, 1.0
sys.exit(cli.run(train.program, sys.argv[1:]))
"""


def test_a_process_says_what_it_waits_for_and_leaves_where_another_one_never_joins(tmp_path):
    command = [sys.executable, "-c", HURRIED, str(write_config(tmp_path)), *joined(2)[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.returncode == 42 and "process 0 of 2: not all have joined at localhost:" in done.stderr
    assert "after 1 s of at most 3" in done.stderr and "Start one process for each number from 0 to 1" in done.stderr and "***" not in done.stderr
