"""As which of how many processes this one was started, from what its launcher left in the
environment."""

import hashlib
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxstack.errors import ConfigError, quoted

PORT = 8476
"""Where process 0 is reached if nothing says otherwise."""
PORTS = range(61440, 65536)
"""Of jobs that share hosts: one of these, by the job's number."""
TORCHRUN = {"MASTER_ADDR", "WORLD_SIZE", "RANK"}
METADATA = "metadata.google.internal"
METADATA_WAIT = 3.0
"""Seconds that a machine of Google's cloud has to tell of itself."""


@dataclass(frozen=True)
class Member:
    """One process of several."""

    found: str
    """What said so."""
    coordinator: str
    """host:port of process 0."""
    processes: int
    process: int
    here: tuple[int, int] = (0, 1)
    """The number of this one among those that share the devices of its host, and how many these
    are."""

    def told(self) -> str:
        """In a line."""
        shared = f", {self.here[0]} of {self.here[1]} on this host" if self.here[1] > 1 else ""
        return (
            f"process {self.process} of {self.processes}{shared}, says {self.found}; process "
            f"0 at {self.coordinator}"
        )


Variables = Mapping[str, str]


def member(variables: Variables, on_tpu: bool) -> Member | None:
    """The first launcher that the environment tells of; None where this process is alone. `on_tpu`:
    TPUs are here, so that Google's metadata server may be asked. ConfigError where a launcher left
    half of what is needed."""
    for launcher in (_plain, _torchrun, _open_mpi, _slurm, _jobset, _gke_tpu):
        if found := launcher(variables):
            if found.process >= found.processes:
                raise ConfigError(
                    f"{found.told()}: there is no such process; look at what set these numbers"
                )
            return found if found.processes > 1 else None
    if "JAX_COORDINATOR_ADDRESS" in variables:
        raise ConfigError(
            "JAX_COORDINATOR_ADDRESS is in the environment, but not how many processes "
            "there are and which this is; set "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset it"
        )
    missing = TORCHRUN - variables.keys()
    if len(missing) == 1 and variables.get("WORLD_SIZE") != "1":
        raise ConfigError(
            f"{' and '.join(sorted(TORCHRUN - missing))} are in the environment, but not "
            f"{', '.join(missing)}; set it, or unset them"
        )
    if on_tpu and "TPU_SKIP_MDS_QUERY" not in variables:
        found = _tpu_pod(_metadata(variables.get("GCE_METADATA_HOST", METADATA)))
        return found if found and found.processes > 1 else None
    return None


def _plain(variables: Variables) -> Member | None:
    """jax's own variable of the coordinator, with a number and a count by the names that launchers
    give them."""
    address, numbers = variables.get("JAX_COORDINATOR_ADDRESS"), ("JAX_PROCESS_ID", "NODE_RANK")
    if not address or not any(name in variables for name in numbers):
        return None
    return Member(
        "variables (JAX_COORDINATOR_ADDRESS)",
        _with_port(address, variables),
        _first(variables, "JAX_NUM_PROCESSES", "NNODES"),
        _first(variables, *numbers),
    )


def _torchrun(variables: Variables) -> Member | None:
    if not TORCHRUN <= variables.keys():
        return None
    here = (
        (_first(variables, "LOCAL_RANK"), _first(variables, "LOCAL_WORLD_SIZE"))
        if "LOCAL_WORLD_SIZE" in variables
        else (0, 1)
    )
    port = variables.get("MASTER_PORT", str(PORT))
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        port = _port_of(f"{variables.get('TORCHELASTIC_RUN_ID')} {port}")
    at = f"{variables['MASTER_ADDR']}:{port}"
    return Member(
        "variables (MASTER_ADDR, RANK)",
        at,
        _first(variables, "WORLD_SIZE"),
        _first(variables, "RANK"),
        here,
    )


def _slurm(variables: Variables) -> Member | None:
    """A task of an srun step; not the batch script itself, which has no step's variables."""
    if (
        not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}
        <= variables.keys()
    ):
        if int(many := variables.get("SLURM_NTASKS", "1")) > 1:
            print(
                f"distributed: Slurm job {variables.get('SLURM_JOB_ID')} has {many} "
                "tasks, but this is none of an srun step's; if nothing else "
                "says with whom, it trains alone",
                file=sys.stderr,
                flush=True,
            )
        return None
    job = _first(variables, "SLURM_JOB_ID")
    step = int(variables.get("SLURM_STEP_ID", 0))
    address = (
        variables.get("JAX_COORDINATOR_ADDRESS")
        or f"{first_host(variables['SLURM_STEP_NODELIST'])}:{PORTS[(job + 97 * step) % len(PORTS)]}"
    )
    tasks = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(variables.get("SLURM_NODEID", 0))
    bind = variables.get("SLURM_GPU_BIND", "none")
    bound = (
        not bind.startswith(("none", "verbose"))
        or "SLURM_GPUS_PER_TASK" in variables
        or "gpu" in variables.get("SLURM_TRES_PER_TASK", "")
    )
    here = (
        (0, 1)
        if bound
        else (int(variables.get("SLURM_LOCALID", 0)), tasks[node] if node < len(tasks) else 1)
    )
    number = _first(variables, "SLURM_PROCID")
    return Member(
        f"Slurm job {job}",
        _with_port(address, variables),
        _first(variables, "SLURM_STEP_NUM_TASKS"),
        number,
        here,
    )


def first_host(hosts: str) -> str:
    """Of Slurm's list of hosts: `n[007-009,012],m3` begins with n007."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    if not found:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={quoted(hosts)}: is no list of hosts; set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT of the first one"
        )
    return found[1] + (found[2] or "") + (found[3] or "")


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> 2, 2, 2, 1."""
    return [
        int(number)
        for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]


def _open_mpi(variables: Variables) -> Member | None:
    if not {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= variables.keys():
        return None
    size, local = (
        _first(variables, "OMPI_COMM_WORLD_SIZE"),
        int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)),
    )
    job = (
        variables.get("PMIX_NAMESPACE")
        or variables.get("OMPI_MCA_orte_hnp_uri", "").partition(";")[0]
    )
    port = _port_of(job)
    launcher = re.search(r"tcp://([\d.]+)", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    if address := variables.get("JAX_COORDINATOR_ADDRESS"):
        address = _with_port(address, variables)
    elif local == size:
        address = f"localhost:{port}"
    elif launcher:
        address = f"{launcher[1]}:{port}"
    else:
        raise ConfigError(
            "Open MPI does not say where process 0 runs; give it: mpirun -x "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT ..., the first host and "
            "a free port there"
        )
    return Member(
        "Open MPI",
        address,
        size,
        _first(variables, "OMPI_COMM_WORLD_RANK"),
        (int(variables.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), local),
    )


def _jobset(variables: Variables) -> Member | None:
    """A pod of a JobSet whose manifest hands its annotations down (ours, xpk's for CPUs): of jobs
    with `PROCESSES_IN_JOB` pods each."""
    if (
        not {"JAX_COORDINATOR_ADDRESS", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX"}
        <= variables.keys()
    ):
        return None
    each = _first(variables, "PROCESSES_IN_JOB")
    process = int(variables.get("JOB_INDEX", 0)) * each + _first(variables, "JOB_COMPLETION_INDEX")
    return Member(
        f"JobSet {variables.get('JOBSET_NAME', '')}".strip(),
        _with_port(variables["JAX_COORDINATOR_ADDRESS"], variables),
        _first(variables, "JAX_PROCESS_COUNT"),
        process,
    )


def _gke_tpu(variables: Variables) -> Member | None:
    """A pod of a TPU node pool: GKE adds the hosts of its slice and, of several slices, which one
    this is."""
    hosts = variables.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if "TPU_WORKER_ID" not in variables or (
        len(hosts) == 1 and "MEGASCALE_NUM_SLICES" not in variables
    ):  # libtpu leaves both where it is alone
        return None
    return _of_slices("GKE, TPU", hosts, _first(variables, "TPU_WORKER_ID"), variables)


def _tpu_pod(attribute: Callable[[str], str | None]) -> Member | None:
    """A TPU VM, by its metadata: lists of `host` or `name:number:address`, and of several slices
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


def _of_slices(found: str, hosts: list[str], number: int, variables: Variables) -> Member:
    slices, this = (
        int(variables.get("MEGASCALE_NUM_SLICES") or 1),
        int(variables.get("MEGASCALE_SLICE_ID") or 0),
    )
    first = (variables.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).split(":")[0]
    return Member(
        f"{found}, slice {this} of {slices}" if slices > 1 else found,
        f"{first}:{PORT}",
        slices * len(hosts),
        this * len(hosts) + number,
    )


def _metadata(host: str) -> Callable[[str], str | None]:
    """Attributes of this machine; None for one that it has not, or where nobody answers."""

    def attribute(name: str) -> str | None:
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
            headers={"Metadata-Flavor": "Google"},
        )
        try:
            with urllib.request.urlopen(request, timeout=METADATA_WAIT) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, TimeoutError, OSError):
            return None

    return attribute


def _port_of(job: str) -> str:
    """A port that follows from the name of a job."""
    return str(
        PORTS[int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest()) % len(PORTS)]
    )


def _with_port(address: str, variables: Variables) -> str:
    return (
        address
        if re.search(r":\d+$", address)
        else f"{address}:{variables.get('JAX_COORDINATOR_PORT', PORT)}"
    )


def _first(variables: Variables, *names: str) -> int:
    """The first of some variables, a whole number."""
    for name in names:
        if name in variables:
            if not variables[name].isdecimal():
                raise ConfigError(
                    f"{name}={quoted(variables[name])} in the environment: is no whole number"
                )
            return int(variables[name])
    raise ConfigError(
        f"{names[0]} is not in the environment, beside what says that there are several "
        "processes; set it"
    )
