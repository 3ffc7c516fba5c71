"""This process's number and the number of processes, from the variables of its launcher.

jax's own cluster detection is not used: it was right in 10 of 15 cases, without torchrun and JobSet
among others, and gave each Slurm task one GPU instead of a share (EXPERIMENTS.md). Launchers are
tried in a fixed order. Where the variables of another one give another count, a line is printed;
where each of several processes would train alone in one folder, that is an error.
"""

import hashlib
import re
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxstack.errors import ConfigError, quoted

PORT = 8476
"""Default port of process 0."""
PORTS = range(61440, 65536)
"""Ports for jobs that share hosts, one by the job's number."""
HOST = re.compile(r"([^],[\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+(?=,|$)")
"""A host, or several by ranges of numbers, in a list of Slurm's (scontrol(1), "show hostnames")."""
TORCHRUN = {"MASTER_ADDR", "WORLD_SIZE", "RANK"}
COUNTS = (
    ("WORLD_SIZE", "RANK", "MASTER_ADDR"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("JAX_PROCESS_COUNT", "PROCESSES_IN_JOB"),
)
"""A launcher's variable for the number of processes, and others that it sets with it."""
METADATA = "metadata.google.internal"
METADATA_WAIT = 3.0
"""Seconds that Google's metadata server has to answer."""


@dataclass(frozen=True)
class Member:
    """One process of several."""

    source: str
    """What gave the numbers, such as a launcher."""
    coordinator: str
    """host:port of process 0."""
    processes: int
    process: int
    local: tuple[int, int] = (0, 1)
    """(number, count) among the processes that share the devices of this host."""

    def describe(self) -> str:
        """Return a line for the log."""
        number, count = self.local
        shared = f", {number} of {count} on this host" if count > 1 else ""
        return (
            f"process {self.process} of {self.processes}{shared}, says {self.source}; process "
            f"0 at {self.coordinator}"
        )


Variables = Mapping[str, str]


def member(variables: Variables, on_tpu: bool) -> Member | None:
    """Return the member that the first launcher in the environment describes; None where this
    process is alone. `on_tpu`: there are TPUs, so Google's metadata server may be asked.
    ConfigError where a launcher set only some of its variables."""
    # Variables that somebody sets come before those that a scheduler or libtpu leaves in every
    # environment.
    for launcher in (_plain, _torchrun, _open_mpi, _slurm, _jobset, _gke_tpu):
        if own := launcher(variables):
            if own.process >= own.processes:
                raise ConfigError(
                    f"{own.describe()}: there is no such process; check what set these numbers"
                )
            check_others(own, variables)
            return own if own.processes > 1 else None
    if "JAX_COORDINATOR_ADDRESS" in variables:
        raise ConfigError(
            "JAX_COORDINATOR_ADDRESS is in the environment, without the number of processes and of "
            "this one; set JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset it"
        )
    missing = TORCHRUN - variables.keys()
    if len(missing) == 1 and variables.get("WORLD_SIZE") != "1":
        raise ConfigError(
            f"{' and '.join(sorted(TORCHRUN - missing))} are in the environment, but not "
            f"{', '.join(missing)}; set it, or unset them"
        )
    # Last, and only where there are TPUs: elsewhere nobody answers, and each name costs
    # METADATA_WAIT.
    if on_tpu and "TPU_SKIP_MDS_QUERY" not in variables:
        host = variables.get("GCE_METADATA_HOST", METADATA)
        own = _tpu_pod(lambda name: _attribute(host, name))
        return own if own and own.processes > 1 else None
    return None


def check_others(own: Member, variables: Variables) -> None:
    """Print where another launcher's variables give another count. ConfigError where this process
    would train alone, as its siblings would in the same folder."""
    agents = variables.get("GROUP_WORLD_SIZE")  # each of torchrun's is a task of Slurm's
    for group in COUNTS:
        if not variables.keys() >= {*group}:
            continue
        name, count = group[0], _number(variables, group[0])
        # A count of 1 is what a launcher leaves around a single process, and contradicts nothing.
        if count == 1 or count == own.processes or f"{count}" == agents:
            continue
        if own.processes == 1:
            raise ConfigError(
                f"by {own.source} this process is alone, and by {name}={count} one of {count}, "
                "which would each train alone in one folder; unset the former, which another "
                f"launcher may have left, or, where each is its own run, {' and '.join(group)}"
            )
        say(f"{own.processes} processes by {own.source}, which is used, and {name}={count}")


def _plain(variables: Variables) -> Member | None:
    """Read jax's own variable for the coordinator, with number and count by either of two names."""
    numbers = ("JAX_PROCESS_ID", "NODE_RANK")
    if not variables.get("JAX_COORDINATOR_ADDRESS") or variables.keys().isdisjoint(numbers):
        return None
    return Member(
        "variables (JAX_COORDINATOR_ADDRESS)",
        _coordinator(variables),
        _number(variables, "JAX_NUM_PROCESSES", "NNODES"),
        _number(variables, *numbers),
    )


def _torchrun(variables: Variables) -> Member | None:
    if not variables.keys() >= TORCHRUN:
        return None
    local = (0, 1)
    if "LOCAL_WORLD_SIZE" in variables:
        local = _number(variables, "LOCAL_RANK"), _number(variables, "LOCAL_WORLD_SIZE")
    port: str | int = variables.get("MASTER_PORT", PORT)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        port = _port_of(f"{variables.get('TORCHELASTIC_RUN_ID')} {port}")
    return Member(
        "variables (MASTER_ADDR, RANK)",
        f"{variables['MASTER_ADDR']}:{port}",
        _number(variables, "WORLD_SIZE"),
        _number(variables, "RANK"),
        local,
    )


def _slurm(variables: Variables) -> Member | None:
    """Read the variables of a task of an srun step; the batch script itself has none."""
    needed = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}
    if not variables.keys() >= needed:
        if (tasks := int(variables.get("SLURM_NTASKS", "1"))) > 1:
            say(
                f"Slurm job {variables.get('SLURM_JOB_ID')} has {tasks} tasks, but srun did not "
                "start this process; unless another launcher did, it trains alone"
            )
        return None
    job, step = _number(variables, "SLURM_JOB_ID"), int(variables.get("SLURM_STEP_ID", 0))
    # All tasks know job and step, and no message between them is needed. 97 keeps steps of one job,
    # and jobs with neighbouring numbers, apart on a host that they share.
    port = PORTS[(job + 97 * step) % len(PORTS)]
    bind = variables.get("SLURM_GPU_BIND", "none")
    # Where Slurm binds GPUs to tasks each sees its own alone, and must not take a share of these
    # again.
    has_own_gpus = (
        not bind.startswith(("none", "verbose"))
        or "SLURM_GPUS_PER_TASK" in variables
        or "gpu" in variables.get("SLURM_TRES_PER_TASK", "")
    )
    tasks_of_nodes = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(variables.get("SLURM_NODEID", 0))
    local = (0, 1)
    if not has_own_gpus and node < len(tasks_of_nodes):
        local = int(variables.get("SLURM_LOCALID", 0)), tasks_of_nodes[node]
    return Member(
        f"Slurm job {job}",
        _coordinator(variables) or f"{first_host(variables['SLURM_STEP_NODELIST'])}:{port}",
        _number(variables, "SLURM_STEP_NUM_TASKS"),
        _number(variables, "SLURM_PROCID"),
        local,
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list of Slurm's: `n[007-009,012]-b[3-4],m3` -> n007-b3."""
    match = HOST.match(hosts)
    if not match or match[0].startswith("("):  # (null): no step has begun
        raise ConfigError(
            f"SLURM_STEP_NODELIST={quoted(hosts)} is not a list of hosts; set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT of the first one"
        )
    return re.sub(r"\[(\d+).*?\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to 2, 2, 2, 1."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def _open_mpi(variables: Variables) -> Member | None:
    if not variables.keys() >= {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}:
        return None
    size = _number(variables, "OMPI_COMM_WORLD_SIZE")
    local = int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    launcher = variables.get("OMPI_MCA_orte_hnp_uri", "")
    port = _port_of(variables.get("PMIX_NAMESPACE") or launcher.partition(";")[0])
    if not (address := _coordinator(variables)):
        if local == size:
            address = f"localhost:{port}"
        elif host := re.search(r"tcp://([\d.]+)", launcher):
            address = f"{host[1]}:{port}"
        else:
            raise ConfigError(
                "Open MPI does not say where process 0 runs; give it: mpirun -x "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT ..., the first host and a free port there"
            )
    return Member(
        "Open MPI",
        address,
        size,
        _number(variables, "OMPI_COMM_WORLD_RANK"),
        (int(variables.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), local),
    )


def _jobset(variables: Variables) -> Member | None:
    """A pod of a JobSet whose manifest hands its annotations down (ours, xpk's for CPUs): of jobs
    with `PROCESSES_IN_JOB` pods each."""
    needed = {"JAX_COORDINATOR_ADDRESS", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX"}
    if not variables.keys() >= needed:
        return None
    # Kubernetes counts the pods of each job from 0; a JobSet has a job for each slice.
    pods_before = int(variables.get("JOB_INDEX", 0)) * _number(variables, "PROCESSES_IN_JOB")
    return Member(
        f"JobSet {variables.get('JOBSET_NAME', '')}".strip(),
        _coordinator(variables),
        _number(variables, "JAX_PROCESS_COUNT"),
        pods_before + _number(variables, "JOB_COMPLETION_INDEX"),
    )


def _gke_tpu(variables: Variables) -> Member | None:
    """Read the variables of a pod of a TPU node pool: the hosts of its slice, and the slice's
    number among several."""
    hosts = variables.get("TPU_WORKER_HOSTNAMES", "").split(",")
    several = len(hosts) > 1 or "MEGASCALE_NUM_SLICES" in variables
    if "TPU_WORKER_ID" not in variables or not several:  # libtpu sets both where it is alone
        return None
    return _of_slices("GKE, TPU", hosts, _number(variables, "TPU_WORKER_ID"), variables)


def _tpu_pod(attribute: Callable[[str], str | None]) -> Member | None:
    """Read a TPU VM's metadata: lists of `host` or `name:number:address`, and for several slices
    `tpu-env`."""
    number, workers = attribute("agent-worker-number"), attribute("worker-network-endpoints")
    if number is None or workers is None:
        return None
    lines = (line.partition(":") for line in (attribute("tpu-env") or "").splitlines())
    return _of_slices(
        "TPU pod",
        [worker.split(":")[-1] for worker in workers.split(",")],
        int(number),
        {key.strip(): value.strip().strip("'") for key, _, value in lines},
    )


def _of_slices(source: str, hosts: list[str], number: int, variables: Variables) -> Member:
    slices = int(variables.get("MEGASCALE_NUM_SLICES") or 1)
    own = int(variables.get("MEGASCALE_SLICE_ID") or 0)
    # Of several slices the first host of the first one; each knows only the hosts of its own.
    first = (variables.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).split(":")[0]
    return Member(
        f"{source}, slice {own} of {slices}" if slices > 1 else source,
        f"{first}:{PORT}",
        slices * len(hosts),
        own * len(hosts) + number,
    )


def _attribute(host: str, name: str) -> str | None:
    """Ask the metadata server for an attribute of this machine; None where there is none, or no
    answer."""
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_WAIT) as answer:
            return answer.read().decode()
    except OSError:
        return None


def say(text: str) -> None:
    """Print to stderr, since the log is not open yet."""
    print(f"distributed: {text}", file=sys.stderr)


def _port_of(job: str) -> int:
    """Choose a port by the hash of a job's name."""
    digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
    return PORTS[int.from_bytes(digest) % len(PORTS)]


def _coordinator(variables: Variables) -> str:
    """Return JAX_COORDINATOR_ADDRESS with a port; "" where it is not set."""
    address = variables.get("JAX_COORDINATOR_ADDRESS", "")
    if not address or re.search(r":\d+$", address):
        return address
    return f"{address}:{variables.get('JAX_COORDINATOR_PORT', PORT)}"


def _number(variables: Variables, *names: str) -> int:
    """Return the integer in the first of some variables that is set."""
    for name in names:
        if name in variables:
            if not variables[name].isdecimal():
                raise ConfigError(
                    f"{name}={quoted(variables[name])} in the environment is not an integer"
                )
            return int(variables[name])
    raise ConfigError(
        f"{names[0]} is not in the environment, but other variables say that there are several "
        "processes; set it"
    )
