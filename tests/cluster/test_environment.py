"""Variables that launchers set, and the process number and count read from them."""

import http.server
import threading
from types import SimpleNamespace

import pytest

from maxstack.cluster.environment import PORT, PORTS, Member, first_host, member
from maxstack.cluster.membership import devices_of
from maxstack.cluster.membership import member as joined_member
from maxstack.errors import ConfigError

SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[03-04,07]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_NTASKS": "6",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
JOBSET = {
    "JOBSET_NAME": "run",
    "JAX_COORDINATOR_ADDRESS": "run-w-0-0.run",
    "PROCESSES_IN_JOB": "4",
    "JOB_COMPLETION_INDEX": "1",
    "JOB_INDEX": "2",
    "JAX_PROCESS_COUNT": "12",
}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8081",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
PLAIN = {"JAX_COORDINATOR_ADDRESS": "here:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        (PLAIN, Member("variables (JAX_COORDINATOR_ADDRESS)", "here:1234", 3, 2)),
        (PLAIN | SLURM, Member("variables (JAX_COORDINATOR_ADDRESS)", "here:1234", 3, 2)),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "h",
                "JAX_COORDINATOR_PORT": "6002",
                "NNODES": "2",
                "NODE_RANK": "1",
            },
            Member("variables (JAX_COORDINATOR_ADDRESS)", "h:6002", 2, 1),
        ),
        (
            {
                "MASTER_ADDR": "m",
                "MASTER_PORT": "29500",
                "WORLD_SIZE": "4",
                "RANK": "3",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
            },
            Member("variables (MASTER_ADDR, RANK)", "m:29500", 4, 3, (1, 2)),
        ),
        (SLURM, Member("Slurm job 123456", f"gpu03:{PORTS[123456 % len(PORTS)]}", 6, 3, (1, 2))),
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "1"},
            Member("Slurm job 123456", f"gpu03:{PORTS[123456 % len(PORTS)]}", 6, 3),
        ),
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "gpu03-ib:9999"},
            Member("Slurm job 123456", "gpu03-ib:9999", 6, 3, (1, 2)),
        ),
        ({name: value for name, value in SLURM.items() if "STEP" not in name}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (JOBSET, Member("JobSet run", f"run-w-0-0.run:{PORT}", 12, 9)),
        (TPU, Member("GKE, TPU", f"a:{PORT}", 4, 2)),
        (TPU | SLICES, Member("GKE, TPU, slice 1 of 2", f"first:{PORT}", 8, 6)),
        (
            {
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "WARNING: could not determine TPU worker number",
            },
            None,
        ),
    ],
)
def test_a_launchers_variables_give_number_and_count(variables, wanted):
    assert member(variables, on_tpu=False) == wanted


def test_open_mpi_gives_the_address_of_process_0():
    alone = member(
        MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-h-1@1"}, on_tpu=False
    )
    assert (alone.processes, alone.process, alone.coordinator.split(":")[0]) == (4, 2, "localhost")
    assert member(MPI | URI, on_tpu=False).coordinator.startswith("10.96.0.1:6")
    assert (
        member(
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | MPI | URI, on_tpu=False
        ).source
        == "Open MPI"
    )  # mpirun inside a job
    with pytest.raises(ConfigError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        member(MPI, on_tpu=False)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "set JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES is not in the environment",
        ),
        (
            PLAIN | {"JAX_PROCESS_ID": "two"},
            "JAX_PROCESS_ID='two' in the environment is not an integer",
        ),
        (
            {"WORLD_SIZE": "4", "RANK": "1"},
            "RANK and WORLD_SIZE are in the environment, but not MASTER_ADDR",
        ),
        (
            PLAIN | {"JAX_PROCESS_ID": "3"},
            "process 3 of 3, says variables .*there is no such process",
        ),
    ],
)
def test_missing_variables_are_named(variables, says):
    with pytest.raises(ConfigError, match=says):
        member(variables, on_tpu=False)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a,b[1-2]", "a"),
        ("n[007-009,012],m3", "n007"),
        ("r[2,5]c[010-011]n[3].x.org,a[1-2]", "r2c010n3.x.org"),
        ("[12-14]", "12"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "n[1-2", "n[a-b]", ",a"])
def test_a_malformed_slurm_list_is_refused(hosts):
    with pytest.raises(ConfigError, match="is not a list of hosts; set JAX_COORDINATOR_ADDRESS"):
        first_host(hosts)


ALONE = {"MASTER_ADDR": "localhost", "WORLD_SIZE": "1", "RANK": "0"}
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            ALONE | STEP,
            "MASTER_ADDR, RANK.* is alone, and by SLURM_STEP_NUM_TASKS=2 one of 2",
        ),
        (ALONE | MPI | URI, "OMPI_COMM_WORLD_SIZE=4 one of 4, which would each train"),
        (
            ALONE | JOBSET,
            "JAX_PROCESS_COUNT=12 one of .* unset .* JAX_PROCESS_COUNT and PROCESSES_IN",
        ),
        (
            {**ALONE, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", **STEP},
            "SLURM_STEP_NUM_TASKS=2",
        ),  # torchrun of one process in each task
    ],
)
def test_a_process_alone_by_one_launcher_only_is_refused(variables, says):
    with pytest.raises(ConfigError, match=says):
        member(variables, on_tpu=False)


def test_the_configuration_overrides_the_launcher_and_is_compared_with_it(monkeypatch, capsys):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    own = SimpleNamespace(coordinator="h:1", processes=3, process=2)
    assert joined_member(own).processes == 3
    said = capsys.readouterr().err
    assert "3 processes by the configuration, which is used, and SLURM_STEP_NUM_TASKS=2" in said
    own.processes, own.process = 1, 0
    with pytest.raises(ConfigError, match="by the configuration this process is alone, and by"):
        joined_member(own)


def test_different_counts_of_launchers_are_told_and_the_first_is_used(capsys):
    torchrun = {**ALONE, "WORLD_SIZE": "8", "RANK": "5"}
    assert member(torchrun | STEP, on_tpu=False).processes == 8
    assert (
        "8 processes by variables (MASTER_ADDR, RANK), which is used, and SLURM_STEP_NUM_TASKS=2"
        in capsys.readouterr().err
    )
    agents = {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert member(torchrun | agents | STEP, on_tpu=False).local == (1, 4)
    assert member({**torchrun, "WORLD_SIZE": "2", "RANK": "1", **STEP}, on_tpu=False)
    assert member({**ALONE, **STEP, "SLURM_STEP_NUM_TASKS": "1"}, on_tpu=False) is None
    assert not capsys.readouterr().err


def test_several_slurm_tasks_without_srun_are_told(capsys):
    assert (
        member({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, on_tpu=False)
        is None
    )
    assert "Slurm job 7 has 2 tasks, but srun did not start this process" in capsys.readouterr().err


def test_a_port_that_torchrun_listens_on_is_not_used():
    given = {
        "MASTER_ADDR": "m",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    found = member(given | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, on_tpu=False)
    assert found.coordinator.startswith("m:6") and found.coordinator != "m:29500"


ATTRIBUTES = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
    "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9'\n",
}


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        value = (
            ATTRIBUTES.get(self.path.rpartition("/")[2])
            if self.headers["Metadata-Flavor"] == "Google"
            else None
        )
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *given):
        pass


def test_metadata_of_a_tpu_vm_is_read_where_there_are_tpus():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        assert member(host, on_tpu=True) == Member(
            "TPU pod, slice 1 of 2", f"10.0.0.9:{PORT}", 4, 3
        )
        assert (
            member(host, on_tpu=False) is None
            and member(host | {"TPU_SKIP_MDS_QUERY": "1"}, on_tpu=True) is None
        )
        server.shutdown()
    assert member(host, on_tpu=True) is None  # nobody answers


@pytest.mark.parametrize(
    ("here", "visible", "wanted"),
    [((0, 1), "0,1,2,3", None), ((1, 2), "0,1,2,3", [2, 3]), ((3, 4), "4,5,6,7", [3])],
)
def test_processes_of_one_host_share_its_gpus(here, visible, wanted, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices_of(here) == wanted


def test_gpus_that_cannot_be_shared_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(
        ConfigError,
        match="2 processes on .* cannot share its 3 GPUs; start one a host, or one a GPU",
    ):
        devices_of((0, 2))
