"""Temporaries of a run on one CPU device: the system gives their pages once."""

import subprocess
import sys

import pytest
from processes import environment, write_config

PROGRAM = """
import resource
import sys
from maxstack import cli, train
from maxstack.report.metrics import Writer

write = Writer.write

def noting(self, row):
    print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    write(self, row)

Writer.write = noting
sys.exit(cli.run(train.program, sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("tunables", "kept"), [("glibc.malloc.hugetlb=0", False), (None, True)], ids=str
)
@pytest.mark.slow
def test_train_keeps_pages_between_steps_unless_the_environment_chooses(tmp_path, tunables, kept):
    """An array of the MLP's hidden units is 64 MiB: 32 pages where they are huge, else 16,384."""
    block = {
        "mixer": {"kind": "attention", "heads": 1, "kv_heads": 1, "head_dim": 16},
        "mlp": {"kind": "gated", "hidden": 2048},
    }
    config = write_config(
        tmp_path,
        model={"embed": 16, "layers": 1, "blocks": {"block": block}},
        data={"sources": [{"kind": "synthetic", "documents": 100, "length": 65, "vocab": 320}]},
        train={"steps": 16, "batch_size": 128},
        checkpoint={"every": 0},
    )
    given = {k: v for k, v in environment().items() if k != "GLIBC_TUNABLES"}
    given |= {"GLIBC_TUNABLES": tunables} if tunables else {}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(config)],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    faults = [int(line.split()[1]) for line in told.splitlines() if line.startswith("faults")]
    assert (faults[-1] - faults[-6] < 200) == kept, faults
