"""An sbatch script for nodes with GPUs: srun starts a process per host or per GPU, and the exit
code decides whether the job is requeued.

The script holds the packed configuration. A file NAME-JOB.stop beside the log says that the user
stopped the job: without it a job that left after SIGTERM would be requeued like one whose time was
over.
"""

import shlex
from pathlib import Path

from maxstack.cluster.job_key import VARIABLE
from maxstack.errors import ConfigError
from maxstack.schema.cluster import MARGIN
from maxstack.submit.job import CONFIG, NUMBER, SCRIPT, Job, Submission, check_size

STOP = (
    'touch "$1" || exit; scancel --state=PENDING "$2"; scancel --signal=TERM --state=RUNNING "$2"'
)
"""Slurm sends a pending job no signal but SIGKILL."""


def submission(job: Job) -> Submission:
    """Return the commands of Slurm."""
    log = str(Path.cwd() / f"{job.name}-{NUMBER}.log")
    later = {
        "there": ["squeue", "--me", "--noheader", "--name", job.name],
        "status": ["squeue", "--jobs", NUMBER],
        "logs": ["cat", log],
        "follow": ["tail", "--lines=+1", "--follow", log],
        "stop": ["bash", "-c", STOP, "stop", log.removesuffix("log") + "stop", NUMBER],
    }
    return Submission(["sbatch", "--parsable"], script(job), later)


def script(job: Job) -> str:
    """Return the script, which contains the configuration. `scontrol requeue` restarts the job
    after exit codes that allow it."""
    cluster, slurm = job.cluster, job.cluster.slurm
    if job.tpu:
        raise ConfigError(
            f"topology: {job.topology.name} has TPUs; --target slurm is for GPUs, such as h100:4x8"
        )
    gpus = job.chips_of_a_host
    options = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks-per-node": gpus if slurm.per_gpu else 1,
        "gpus-per-node": gpus,
        "mem": slurm.mem,
        "cpus-per-task": slurm.cpus_per_task,
        "time": slurm.time,
        # Sent to the tasks that long before the time is over, so that they save.
        "signal": f"TERM@{cluster.grace + MARGIN}",
        # A requeued job goes on in the same log.
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation or cluster.reservation,
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    hosts = f"--nodes={job.hosts} --ntasks={job.hosts} --ntasks-per-node=1"
    exports = [f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items()]
    # Since Slurm 22.05 srun does not inherit it from sbatch (srun(1), --cpus-per-task).
    cpus = f" --cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    copy = f'"$SLURM_SUBMIT_DIR/{job.name}-{CONFIG}"'
    unpack, path = job.unpack_command(f"echo {job.packed}", copy)
    head = "\n".join(["#!/usr/bin/env bash", *lines, "#SBATCH --exclusive", "#SBATCH --requeue"])
    setup = "".join(f"{line}\n" for line in (*exports, *slurm.setup))
    text = f"""{head}

stop="$SLURM_SUBMIT_DIR/{job.name}-$SLURM_JOB_ID.stop"
if [ -e "$stop" ]; then
  echo "stopped before it was started again" >&2
  exit 0
fi
{setup}# The job's key, which only its tasks get.
{VARIABLE}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d '[:space:]') && export {VARIABLE} || exit 1
# The job's own copy of the configuration, in the folder that it was submitted from, which all
# nodes see.
{unpack} || exit 1
config={path}
# Check that maxstack runs and reads this on every host: srun returns the largest of several exit
# codes, and hosts that wait for one with a mistake would leave with 42.
srun --label {hosts} maxstack config show "$config" > /dev/null
code=$?
case "$code" in
  1 | 2 | 126 | 127) exit "$code" ;;
esac
# Each task is maxstack itself: a shell around it would get Slurm's SIGTERM in its place.
srun --label --kill-on-bad-exit=0{cpus} maxstack train "$config"
code=$?
# 0: done. 1, 2: a mistake, 126, 127: no such program, which a restart does not fix. After anything
# else the job resumes from the last checkpoint.
case "$code" in
  0 | 1 | 2 | 126 | 127) exit "$code" ;;
esac
if [ -e "$stop" ]; then
  echo "left with $code; stopped, not requeued" >&2
  exit 0
fi
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {cluster.max_restarts} ]; then
  echo "left with $code after {cluster.max_restarts} restarts; not requeued" >&2
  exit "$code"
fi
echo "left with $code; requeued" >&2
scontrol requeue "$SLURM_JOB_ID"
"""
    check_size(job, "slurm", "the script", text, SCRIPT)
    return text
