"""Objects for GKE that serve a model: a Deployment, or for vLLM over several hosts a
LeaderWorkerSet, and a Service.

No request fails while a pod ends: Kubernetes removes it from the Service and asks it to end at the
same time, so it serves on for PROPAGATION seconds (preStop) and then finishes its answers."""

import dataclasses
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import yaml

from maxstack import config
from maxstack.config import storage
from maxstack.data import hub
from maxstack.errors import ConfigError
from maxstack.schema.cluster import ClusterConfig
from maxstack.submit import gke, remote, vllm
from maxstack.submit.job import Placement, Submission, is_within

PORT = 8000
RAY_PORT = 6379
PROPAGATION = 15
"""Seconds that a pod serves on after it was asked to end, until no Service sends it requests."""
READING = 35
"""Seconds for clients to read their last answers: GRACE of server/process.py, and the process's
end."""
LEAST = 30
"""Seconds, at least, to finish answers."""
STARTING = 3600
"""Seconds that a pod may take to read its weights and compile."""
SEED = '"$(shuf --input-range=0-2147483647 --head-count=1)"'
"""Seed for requests without one, different in each process; vLLM's default is 0."""
ROLE = "app.kubernetes.io/component"
REACH_LEADER = (
    "import os, socket; "
    f"socket.create_connection((os.environ['LWS_LEADER_ADDRESS'], {RAY_PORT}), 5)"
)
AWAIT_WORKERS = (
    "import os, ray, time\nray.init(address='auto')\n"
    "while sum(node['Alive'] for node in ray.nodes()) < int(os.environ['LWS_GROUP_SIZE']):\n"
    "    time.sleep(2)"
)


@dataclasses.dataclass(frozen=True)
class Server(Placement):
    """A model to be served, and its place."""

    command: str
    """Shell command of the server."""
    replicas: int

    @property
    def kind(self) -> str:
        """The kind of object that makes its pods."""
        return "deployment" if self.topology.hosts == 1 else "leaderworkerset"

    @property
    def service(self) -> str:
        """Name of the Service; a LeaderWorkerSet makes one of its own name itself."""
        return self.name if self.kind == "deployment" else f"{self.name}-leader"


def submit(name: str, args: Namespace) -> int:
    """Submit a server; with --dry-run print what would be submitted."""
    if args.target != "gke":
        raise ConfigError(f"--serve: needs --target gke, not {args.target}")
    if args.max_restarts is not None or args.force:
        raise ConfigError("--max-restarts and --force: are for training; leave them out")
    cluster = remote.read_cluster(args)
    job = server(name, cluster, args)
    given = submission(job)
    print(
        f"{name}: {args.replicas} of {args.config} on {job.topology.name}; maxstack plan --serve "
        "says what fits",
        file=sys.stderr,
    )
    if args.out:
        files = [("serving.yml", "what kubectl reads", given.text)]
        remote.write_files(args.out, files, [*given.command[:-1], "serving.yml"], given.later)
    elif args.dry_run:
        sys.stdout.write(given.text)
    if args.dry_run:
        return 0
    facts = {"cluster": args.cluster, "topology": job.topology.name}
    remote.hand_over(
        name, args.target, given, facts, f"http://{job.service}.{cluster.namespace}:{PORT}"
    )
    return 0


def server(name: str, cluster: ClusterConfig, args: Namespace) -> Server:
    """Make the server that the arguments ask for; ConfigError for what pods could not run."""
    from maxstack.plan.topology import parse

    topology = parse(cluster.topology, "topology:")
    if not topology.chip:
        raise ConfigError(f"topology: {cluster.topology} is this machine; give the cluster's")
    if topology.slices > 1:
        raise ConfigError(
            f"topology: {topology.name} has {topology.slices} slices, and one slice serves a "
            "replica; give one, and --replicas"
        )
    if cluster.grace < (least := PROPAGATION + READING + LEAST):
        raise ConfigError(f"grace={cluster.grace}: requests need {least} s to end; raise it")
    job = Server(name, cluster, topology, "", args.replicas)
    job = dataclasses.replace(job, command=COMMANDS[args.engine](job, args))
    is_path = not storage.is_url(args.config) and not hub.is_model_name(args.config)
    if is_path and not is_within(args.config, job.mounts):
        print(
            f"not in the bucket, so the image must have it on every host: {args.config}",
            file=sys.stderr,
        )
    return job


def _our_command(job: Server, args: Namespace) -> str:
    if job.topology.hosts > 1:
        chips = f" ({chip.chips_per_host} chips)" if (chip := job.topology.chip) else ""
        raise ConfigError(
            f"topology: {job.topology.name} has {job.topology.hosts} hosts, and maxstack's server "
            f"runs on the devices of one process; give a topology of one host{chips}, and "
            "--replicas, or --engine vllm, which gets a LeaderWorkerSet"
        )
    if not args.api_key_file:
        print(f"{job.name}: serves everybody who reaches it; see --api-key-file", file=sys.stderr)
    config.load(vllm.VllmConfig, {}, [each for each in args.overrides if each[:5] == "serve"])
    cache = []
    if job.cluster.bucket and not any("compilation_cache" in each for each in args.overrides):
        cache.append(f"run.compilation_cache={job.cluster.bucket.mount}/.cache/maxstack/xla")
    flags = {
        "--host": "0.0.0.0",
        "--port": PORT,
        "--served-model-name": _model_name(args.config),
        "--api-key-file": args.api_key_file,
        "--tool-parser": args.tool_parser,
        "--grace": job.cluster.grace - PROPAGATION - READING,
    }
    words = "maxstack", "serve", args.config, *vllm.words_of(flags)
    return shlex.join([*words, *args.overrides, *cache])


def _vllm_command(job: Server, args: Namespace) -> str:
    if args.api_key_file:
        raise ConfigError(
            "--api-key-file: vLLM reads its key from the variable VLLM_API_KEY; set it in secrets "
            "of the cluster's file"
        )
    if "VLLM_API_KEY" not in job.cluster.secrets:
        print(f"{job.name}: serves everybody who reaches it; see secrets", file=sys.stderr)
    asked = vllm.read_overrides(args.overrides)
    hosts = job.topology.hosts
    stages = 1 if job.tpu else hosts
    flags = {
        "--host": "0.0.0.0",
        "--port": PORT,
        "--served-model-name": _model_name(args.config),
        "--dtype": asked.model.dtype,
        "--pipeline-parallel-size": stages if stages > 1 else None,
        "--distributed-executor-backend": "ray" if hosts > 1 else None,
    }
    drain = job.cluster.grace - PROPAGATION - READING
    words = [*vllm.words_of(flags), *vllm.serve_flags(asked.serve, job.topology.size // stages)]
    words += vllm.answer_flags(drain) + vllm.tool_flags(args.tool_parser)
    return f"{shlex.join(['vllm', 'serve', args.config, *words])} --seed {SEED}"


COMMANDS = {"maxstack": _our_command, "vllm": _vllm_command}


def submission(job: Server) -> Submission:
    """Return the commands of kubectl."""
    words = gke.kubectl(job)
    pods = f"app.kubernetes.io/instance={job.name},{ROLE}=server"
    logs = [*words, "logs", "--selector", pods, "--prefix", "--tail=-1"]
    logs.append(f"--max-log-requests={job.replicas}")
    both = f"{job.kind}/{job.name}", f"service/{job.service}"
    later = {
        "there": [*words, "get", both[0], "--ignore-not-found", "--output=name"],
        "status": [*words, "get", *both],
        "logs": logs,
        "follow": [*logs, "--follow"],
        "stop": [*words, "delete", *both, "--cascade=foreground"],
    }
    return Submission([*words, "create", "--filename", "-"], manifest(job), later)


def manifest(job: Server) -> str:
    """The YAML of both objects."""
    trees = [deployment(job) if job.kind == "deployment" else leader_worker_set(job), service(job)]
    return yaml.safe_dump_all(trees, sort_keys=False, width=10**6)


def service(job: Server) -> dict[str, Any]:
    """The Service, which the cluster reaches by its name and namespace."""
    port = {"name": "http", "port": PORT, "targetPort": "http"}
    spec = {"type": "ClusterIP", "selector": _labels(job, "server"), "ports": [port]}
    return _object(job, "v1", "Service", {"name": job.service}, spec)


def deployment(job: Server) -> dict[str, Any]:
    """Build the Deployment, with a pod for each replica."""
    spec = {
        "replicas": job.replicas,
        "progressDeadlineSeconds": STARTING,
        "selector": {"matchLabels": _labels(job, "server")},
        "template": _server_template(job, f"exec {job.command}"),
    }
    return _object(job, "apps/v1", "Deployment", {}, spec)


def leader_worker_set(job: Server) -> dict[str, Any]:
    """Build the LeaderWorkerSet: for each replica a leader that answers and its workers, joined by
    Ray."""
    leader = (
        f"ray start --head --port={RAY_PORT} && python3 -c {shlex.quote(AWAIT_WORKERS)} && "
        f"exec {job.command}"
    )
    reached = f"python3 -c {shlex.quote(REACH_LEADER)} 2>/dev/null"
    worker = (
        f"until {reached}; do sleep 5; done; "
        f'exec ray start --address="$LWS_LEADER_ADDRESS:{RAY_PORT}" --block'
    )
    drained = f"while {reached}; do sleep 2; done"
    container = {
        "name": "worker",
        "command": _shell(worker),
        "env": _environment(job),
        "lifecycle": {"preStop": {"exec": {"command": _shell(drained)}}},
    }
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    alone = {"annotations": {key: "cloud.google.com/gke-nodepool"}} if job.tpu else {}
    group = {
        "size": job.topology.hosts,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _server_template(job, leader),
        "workerTemplate": gke.pod_template(job, container, _labels(job, "worker"), {}),
    }
    spec = {
        "replicas": job.replicas,
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": group,
    }
    return _object(job, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", alone, spec)


def _object(
    job: Server, version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    metadata = gke.object_metadata(job) | metadata
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _server_template(job: Server, command: str) -> dict[str, Any]:
    """Build the template of a pod that answers, which Prometheus finds by its annotations."""
    container = {
        "name": "server",
        "command": _shell(command),
        "env": _environment(job),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": _probe(10, STARTING // 10),
        "readinessProbe": _probe(5, 3),
        "livenessProbe": _probe(10, 6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PROPAGATION)]}}},
    }
    template = gke.pod_template(job, container, _labels(job, "server"), {})
    scraped = {"scrape": "true", "port": str(PORT), "path": "/metrics"}
    annotations = {f"prometheus.io/{key}": value for key, value in scraped.items()}
    template["metadata"].setdefault("annotations", {}).update(annotations)
    return template


def _probe(period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "timeoutSeconds": 5,
        "periodSeconds": period,
        "failureThreshold": failures,
    }


def _model_name(model: str) -> str:
    return model if hub.is_model_name(model) else Path(model).name


def _labels(job: Server, role: str) -> dict[str, str]:
    return gke.labels(job) | {ROLE: role}


def _environment(job: Server) -> list[dict[str, Any]]:
    return gke.variables(job, {"HOME": gke.HOME, **job.cluster.env})


def _shell(text: str) -> list[str]:
    return ["sh", "-c", gke.escape(text)]
