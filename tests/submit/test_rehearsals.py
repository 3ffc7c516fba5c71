"""Real processes as each target starts them, on this machine and in what Slurm and Kubernetes would
give them: with the losses of one process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from processes import FLAGS, environment, rows, run, stand_ins, training, write_config

from maxstack import cli

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
    (found / "gke.yml").write_text(
        yaml.safe_dump(
            FACTS | {"image": "repo/maxstack:1", "bucket": {"name": "bucket", "mount": str(found)}}
        )
    )
    write_config(found, eval={"every": 8, "steps": 2})
    return found


@pytest.fixture(scope="module")
def alone(folder):
    """Devices -> the losses of one process that has so many."""
    found = {}

    def train(devices):
        if devices not in found:
            name = f"alone-{devices}"
            words = [*SHORT, f"run.virtual_devices={devices}", f"run.name={name}"]
            run([*maxstack("train", folder / "config.yml"), *words], environment())
            found[devices] = losses(folder / name)
        return found[devices]

    return train


@pytest.fixture(autouse=True)
def records(tmp_path, monkeypatch):
    """Records of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def maxstack(*words: object) -> list[str]:
    return [sys.executable, "-m", "maxstack.cli", *map(str, words)]


def losses(run: Path) -> dict[tuple[str, int], float]:
    return {(key, row["step"]): row[key] for key in ("loss", "eval_loss") for row in rows(run, key)}


def until_step(run: Path, running) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= AFTER for row in rows(run)):
        assert time.monotonic() < deadline and running(), "it never came to the step"
        time.sleep(0.02)


def test_local_processes_train_as_one_with_as_many_devices_though_one_is_killed(folder, alone):
    name, count = "local", 2
    words = [
        *maxstack("submit", folder / "config.yml", "--target", "local", "--processes", count),
        *SHORT,
        f"run.virtual_devices={count}",
        "data.workers=2",
    ]
    submitted = subprocess.Popen(
        [*words, f"run.name={name}"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(submitted.stdout))
    reader.start()
    until_step(folder / name, lambda: submitted.poll() is None)
    os.kill(training(submitted.pid, 1), signal.SIGKILL)
    assert submitted.wait(300) == 0, "".join(output)
    reader.join()
    text = "".join(output)
    assert (
        f"{name}: {count} processes on this machine, {count} devices (data={count})" in text
        and "[1] supervise: killed by SIGKILL" in text
    )
    assert "[0] done: " in text and text.splitlines()[-1] == f"{name}: exited with 0"
    assert (folder / name / "submit.log").read_text() in text
    assert (
        losses(folder / name) == pytest.approx(alone(count), rel=1e-5)
        and len(alone(count)) >= 24 + 3
    )


def shown(folder, target, name, capsys):
    """The objects that a cluster would be given."""
    words = [
        "submit",
        str(folder / "config.yml"),
        "--target",
        target,
        "--cluster",
        str(folder / f"{target}.yml"),
        "--dry-run",
    ]
    assert cli.main([*words, *SHORT, f"run.name={name}"]) == 0
    return capsys.readouterr().out


def test_tasks_of_slurm_train_as_one_and_the_job_is_queued_again_where_one_was_killed(
    folder, alone, tmp_path, capsys
):
    script = shown(folder, "slurm", "slurm", capsys)
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
    assert "process 1 of 2, says Slurm job" in output and "left with 137; queued again" in output, (
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


def test_pods_of_a_jobset_train_as_one_and_go_on_after_one_was_told_to_leave(
    folder, alone, tmp_path, capsys
):
    *_, jobset = yaml.safe_load_all(shown(folder, "gke", "gke", capsys))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    mistakes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]

    def pods():
        with socket.create_server(("127.0.0.1", 0)) as free:
            # a cluster's DNS knows the name of the first pod
            at = f"localhost:{free.getsockname()[1]}"
        for i in range(job["completions"]):
            own = {
                entry["name"]: entry.get("value", "0").replace("$$", "$")
                for entry in container["env"]
            }
            own |= {
                "JAX_COORDINATOR_ADDRESS": at,
                "JOB_COMPLETION_INDEX": str(i),
                "MAXSTACK_JOB_KEY": "k" * 64,
                "PATH": f"{folder}/bin:{os.environ['PATH']}",
            }
            words = [
                word.replace("/tmp/run.yml", f"{tmp_path}/run-{i}.yml")
                for word in container["command"]
            ]
            yield subprocess.Popen(
                words,
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    first = [*pods()]
    until_step(folder / "gke", lambda: all(pod.poll() is None for pod in first))
    first[1].send_signal(signal.SIGTERM)
    outputs = [pod.communicate(timeout=300)[0] for pod in first]
    assert [pod.returncode for pod in first] == [42, 42] and not {42} & {*mistakes}, "\n".join(
        outputs
    )
    assert "process 1 of 2, says JobSet gke" in outputs[1]
    second = [*pods()]
    outputs = [pod.communicate(timeout=300)[0] for pod in second]
    assert [pod.returncode for pod in second] == [0, 0], "\n".join(outputs)
    assert losses(folder / "gke") == pytest.approx(alone(2), rel=1e-5)
