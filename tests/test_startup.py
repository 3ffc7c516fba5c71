"""What happens before the first step, where it needs more than one process."""

import subprocess
import sys

from processes import environment, joined, write_config

HURRIED = """
import sys
from maxstack import cli, startup, train
startup.{}
sys.exit(cli.run(train.program, sys.argv[1:]))
"""


def test_a_process_says_what_it_waits_for_and_leaves_where_another_one_never_joins(tmp_path):
    command = [sys.executable, "-c", HURRIED.format("JOIN, startup.WAITING = 3.0, 1.0"), str(write_config(tmp_path)), *joined(2)[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert done.returncode == 42 and "process 0 of 2: not all have joined at localhost:" in done.stderr
    assert "after 1 s of at most 3" in done.stderr and "Start one process for each number from 0 to 1" in done.stderr and "***" not in done.stderr


def test_processes_that_do_not_see_one_run_folder_are_refused(tmp_path):
    config, program, started = write_config(tmp_path, run={"output_dir": "runs"}), HURRIED.format("SEEN = 1.0"), []
    for host, own in zip(("one", "other"), joined(2), strict=True):
        (tmp_path / host).mkdir()
        started.append(subprocess.Popen([sys.executable, "-c", program, str(config), *own], cwd=tmp_path / host, env=environment(),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], outputs
    assert "error: run.output_dir: process 1 on " in outputs[1] and " does not see in runs/run what process 0 writes there" in outputs[1]
    assert "process 1" in outputs[0] and "does not see in runs/run" in outputs[0] and "Traceback" not in outputs[0] + outputs[1]
