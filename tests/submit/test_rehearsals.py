"""Real processes as each target starts them, on this machine and in what Slurm and Kubernetes would
give them: with the losses of one process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from processes import FLAGS, rows, stand_ins, train, write_config

pytestmark = pytest.mark.release
SHORT = ["train.steps=24"]
AFTER = 6
"""The step after which something happens."""
FACTS = {
    "topology": "h100:2x1",
    "env": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS},
}
PROGRAMS = {
    "maxstack": f'exec {sys.executable} -m maxstack.cli "$@"',
    "scontrol": 'echo "$*" > "$SLURM_SUBMIT_DIR/requeued"',
    "srun": f"""while [[ "$1" = --* ]]; do shift; done
exec {sys.executable} - "$@" <<'program'
import os, subprocess, sys
from pathlib import Path
names = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}}
started = [subprocess.Popen(sys.argv[1:], env=os.environ | names | {{"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}}) for i in range(2)]
Path(os.environ["SLURM_SUBMIT_DIR"], "pids").write_text(" ".join(str(process.pid) for process in started))
sys.exit(max(code if code >= 0 else 128 - code for code in [process.wait() for process in started]))
program""",  # noqa: E501
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all runs of this file lie, with a configuration, stand-ins for a cluster's programs,
    and what was compiled."""
    found = tmp_path_factory.mktemp("rehearsals")
    stand_ins(found / "bin", PROGRAMS)
    own_disk = {
        "restart_from_zero": True
    }  # each node's /tmp, for all that submit knows; here they share it
    (found / "slurm.yml").write_text(yaml.safe_dump(FACTS | own_disk))
    write_config(found, eval={"every": 8, "steps": 2})
    return found


@pytest.fixture(scope="module")
def alone(folder):
    """Devices -> the losses of one process that has so many."""
    found = {}

    def trained(devices):
        if devices not in found:
            name = f"alone-{devices}"
            words = [*SHORT, f"run.virtual_devices={devices}", f"run.name={name}"]
            train(folder / "config.yml", *words)
            found[devices] = losses(folder / name)
        return found[devices]

    return trained


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    """Records of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def losses(run: Path) -> dict[tuple[str, int], float]:
    return {(key, row["step"]): row[key] for key in ("loss", "eval_loss") for row in rows(run, key)}


def until_step(run: Path, running) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= AFTER for row in rows(run)):
        assert time.monotonic() < deadline and running(), "it never came to the step"
        time.sleep(0.02)


def shown(folder, target, name, maxstack):
    """The objects that a cluster would be given."""
    line = f"submit {folder}/config.yml --target {target} --cluster {folder}/{target}.yml --dry-run"
    return maxstack(line, *SHORT, f"run.name={name}")


def test_slurm_tasks_train_as_one_process_and_a_killed_one_requeues_the_job(
    folder, alone, tmp_path, maxstack
):
    script = shown(folder, "slurm", "slurm", maxstack)
    own = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(os.getpid()),
    }
    job = subprocess.Popen(
        ["bash", "-c", script],
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until_step(folder / "slurm", lambda: job.poll() is None)
    os.kill(int((tmp_path / "pids").read_text().split()[1]), signal.SIGKILL)
    output = job.communicate(timeout=300)[0]
    assert "process 1 of 2, says Slurm job" in output and "left with 137; requeued" in output, (
        output
    )
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    subprocess.run(
        ["bash", "-c", script],
        env=os.environ | own | {"SLURM_RESTART_COUNT": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert losses(folder / "slurm") == pytest.approx(alone(2), rel=1e-5)
